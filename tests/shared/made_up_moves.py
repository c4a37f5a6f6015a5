"""Moves the made-up bytes of one state on the machine that it is run on: ``python3 - '<json>'``, read from its input.

Python 3.8, standard library. The made-up GPUs are a file (``made_up_gpus`` of the backends local and ssh), whose
processes are rewritten here. Beside it are the states, the orders that were done, and the last order about each state.
An older order that comes late (its daemon may be dead by then) is refused. One state is moved at a time. What must
never happen is refused, and reported to the witness.

Exit status: 0 done, 1 not done (the reason is on stderr), 3 not begun, 75 not known.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

DONE, NOT_DONE, NOT_BEGUN, NOT_KNOWN = 0, 1, 3, 75
_KEPT = 200
_STATES_KEPT = 1_000


def main() -> int:
    """Do one thing with one state."""
    told = json.loads(sys.argv[1])
    lock = os.open(told["file"] + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    probing = told["do"] == "probe"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if probing else 0))
    except OSError:
        return NOT_KNOWN  # something is being moved; it may be this
    host = Host(told)
    if probing:
        return DONE if told["order_key"] in host.done else NOT_DONE if host.begun() else NOT_BEGUN
    if told["order_key"] in host.done:
        return DONE
    if host.late():
        return NOT_DONE
    move = {"load": host.load, "park": host.park, "discard": host.discard}[told["do"]]
    return move()


class Host:
    """The states on this machine, and the one that it is about."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.path = told["file"] + ".states"
        try:
            with open(self.path, encoding="utf-8") as file:
                kept = json.load(file)
        except FileNotFoundError:
            kept = {"states": {}, "done": []}
        self.last: dict[str, dict[str, Any]] = kept.get("last", {})
        self.done: list[str] = kept["done"]
        self.states: dict[str, dict[str, Any]] = {key: one for key, one in kept["states"].items() if alive(one)}
        self.state = self.states.get(told["key"])

    def begun(self) -> bool:
        """Whether the order was the last that touched the state."""
        return self.state is not None and self.state["order"] == self.told["order"]

    def late(self) -> bool:
        """Whether a later order about the state was begun. Stamps begin again with a new journal, times do not."""
        told = self.told
        key = f"{told['job']} {told['pool']} {told['node']}"
        last = self.last.get(key)
        if last is not None and told["stamp"] < last["stamp"] and told["issued_at"] <= last["issued_at"]:
            sys.stderr.write(f"order {told['order']} comes late: {last['order']} was carried out after it\n")
            return True
        self.last.pop(key, None)
        self.last[key] = {name: told[name] for name in ("order", "stamp", "issued_at")}
        for old in list(self.last)[:-_STATES_KEPT]:
            del self.last[old]
        replace(self.path, {"states": self.states, "done": self.done, "last": self.last})
        return False

    def load(self) -> int:
        """Bytes onto the GPUs."""
        told = self.told
        for gpu in told["gpus"]:
            for other in self.states.values():
                there = other["gpus"].get(gpu, 0)
                agreed = other["agreed_mb"] if other["place"] == "parked" else 0
                if (other["job"], other["run"]) != (told["job"], told["run"]) and there > agreed:
                    return self.violated(gpu, other, there)
        warm = self.state is not None
        self.state = self.state or {"gpus": {}}
        self.state.update({name: told[name] for name in ("job", "name", "run", "pool", "agreed_mb", "pid", "started")})
        self.state["gpus"].update(dict.fromkeys(told["gpus"], told["mb"]))
        self.states[told["key"]] = self.state
        self.keep("loading", "load", told["gpus"])
        time.sleep(told["copy_s"] if warm else 0)
        return self.end("loaded", "loaded", told["gpus"])

    def park(self) -> int:
        """Bytes off the GPUs, but for the residual memory."""
        if self.state is None:
            sys.stderr.write("nothing of it is here; load it first\n")
            return NOT_DONE
        if self.state["place"] != "parked":
            self.keep("parking", "", ())
            time.sleep(self.told["copy_s"])
        left = self.told["agreed_mb"]
        self.state["gpus"] = {gpu: min(mb, left) for gpu, mb in self.state["gpus"].items()}
        return self.end("parked", "park", self.state["gpus"])

    def discard(self) -> int:
        """Nothing is left; of what is not there: done."""
        if self.state is not None:
            gpus = list(self.state["gpus"])
            self.state["gpus"] = {}
            del self.states[self.told["key"]]
            self.tell("discard", gpus)
        return self.end("gone", "", ())

    def end(self, place: str, event: str, gpus: Iterable[str]) -> int:
        """The order is done. That is written last: this may be killed between two files."""
        self.keep(place, event, gpus)
        self.done = [*self.done, self.told["order_key"]][-_KEPT:]
        replace(self.path, {"states": self.states, "done": self.done, "last": self.last})
        return DONE

    def keep(self, place: str, event: str, gpus: Iterable[str]) -> None:
        """Write down what is where, for NVML's stand-in and for the next of us."""
        if self.state is not None:
            self.state["place"], self.state["order"] = place, self.told["order"]
        replace(self.path, {"states": self.states, "done": self.done, "last": self.last})
        with open(self.told["file"], encoding="utf-8") as file:
            box = json.load(file)
        for index, gpu in enumerate(box["gpus"]):
            name = f"{self.told['host']}/gpu{index}"
            gpu["processes"] = [
                {"pid": state["pid"], "started": state["started"], "mb": state["gpus"][name]}
                for state in self.states.values()
                if state["gpus"].get(name)
            ]
        replace(self.told["file"], box)
        if event:
            self.tell(event, gpus)

    def violated(self, gpu: str, other: dict[str, Any], there: int) -> int:
        """Two jobs on one GPU."""
        told = self.told
        why = (
            f"double hold of {gpu}: job {told['name']!r} run {told['run']} loads {told['mb']} MB onto it, while job "
            f"{other['name']!r} run {other['run']} ({other['place']}) has {there} MB there"
        )
        self.tell("violation", [gpu], kind="DoubleHold", why=why)
        sys.stderr.write(f"VIOLATION, THE SCHEDULER IS BROKEN: {why}\n")
        return NOT_DONE

    def tell(self, event: str, gpus: Iterable[str], **more: Any) -> None:
        """A line of the witness for each GPU."""
        told = self.told
        if not told["record"]:
            return
        about = {name: told[name] for name in ("host", "job", "name", "run", "pool", "order", "pid")}
        record = os.open(told["record"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for gpu in gpus:
            mb = (self.state or {"gpus": {}})["gpus"].get(gpu, 0)
            line = {
                "wall": time.time(),
                "mono": time.monotonic(),
                "event": event,
                "gpu": gpu,
                "mb": mb,
                **about,
                **more,
            }
            os.write(record, json.dumps(line).encode() + b"\n")
        os.close(record)


def alive(state: dict[str, Any]) -> bool:
    """Whether its process lives; in doubt it does."""
    if not state["pid"] or not state["started"].isdecimal():
        return True
    try:
        with open(f"/proc/{state['pid']}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and fields[19] == state["started"]


def replace(path: str, content: Any) -> None:
    """All of it at once, for a reader meanwhile."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(path + ".new", path)


if __name__ == "__main__":
    os._exit(main())  # to take the interpreter apart would be a tenth of all that it takes
