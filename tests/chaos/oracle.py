"""What must be true after a storm, judged from what was written down by others than the daemon's state.

Three records, and none believes another: the clients' (what was acknowledged to them, and when they held which GPUs),
the hardware's (the mock backend's witness: whose bytes were where), and the journal as it was shown, during the storm
to one who follows it, and afterwards in full.

    lost         acknowledged, and not in the journal
    violations   a sentence for each thing that must never be
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]

#: how long a line may lie beside what it tells of, in seconds: it is written just before or after
BESIDE_S = 0.002


@dataclass
class Verdict:
    lost: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Process:
    """What the storm knows of one client process."""

    name: str
    pid: int
    #: by the monotonic clock; not later than it really was
    died: float
    #: the storm has given cause for the loss of its session
    provoked: bool


def judge(
    clients: Mapping[str, Sequence[Line]],
    processes: Iterable[Process],
    witness: Sequence[Line],
    facts: Sequence[Line],
    followed: Mapping[int, str],
    render: Any,
    wall_minus_mono: float,
) -> Verdict:
    """Everything."""
    by_pid = {process.pid: process for process in processes}
    verdict = Verdict()
    verdict.lost += acknowledged(clients, facts)
    verdict.lost += unfollowed(followed, facts, render)
    verdict.violations += [f"the witness says: {line['why']}" for line in witness if line["event"] == "violation"]
    verdict.violations += two_on_a_gpu(witness, {pid: process.died for pid, process in by_pid.items()})
    verdict.violations += overlaps(stays(clients, by_pid, facts, wall_minus_mono))
    verdict.violations += journal(facts)
    verdict.violations += claims(facts)
    verdict.violations += fences(clients)
    verdict.violations += unprovoked(facts, by_pid)
    return verdict


# ---- lost ------------------------------------------------------------------------------------------------------------


def acknowledged(clients: Mapping[str, Sequence[Line]], facts: Sequence[Line]) -> list[str]:
    """What a client was told, and the journal does not know."""
    told = {
        "registered": {(fact["job"],) for fact in of(facts, "job_registered")},
        "session": {(fact["session"],) for fact in of(facts, "session_opened")},
        "granted": {(fact["slot"], fence_text(fact)) for fact in of(facts, "slot_granted")},
        "released": {(fact["slot"],) for fact in of(facts, "slot_released")},
        "queued": {(fact["slot"],) for fact in of(facts, "slot_queued")},
        "ended": {(fact["job"],) for fact in of(facts, "job_ended")},
    }
    found = []
    for name, lines in clients.items():
        for line in lines:
            match line["event"]:
                case "registered":
                    wanted = {"registered": (line["job"],), "session": (line["session"],)}
                case "granted":
                    wanted = {"granted": (line["slot"], line["fence"])}
                case "released" | "queued":
                    wanted = {line["event"]: (line["slot"],)}
                case "ended":
                    wanted = {"ended": (line["job"],)}
                case _:
                    wanted = {}
            found += [f"{name} was told {what} {key}" for what, key in wanted.items() if key not in told[what]]
    return found


def unfollowed(followed: Mapping[int, str], facts: Sequence[Line], render: Any) -> list[str]:
    """What the feed has shown, and is not there any more, or is another fact now."""
    now = {fact["seq"]: render(fact) for fact in facts}
    return [f"the feed showed fact {seq} as {text}" for seq, text in followed.items() if now.get(seq) != text]


# ---- violations ------------------------------------------------------------------------------------------------------


def two_on_a_gpu(witness: Sequence[Line], died: Mapping[int, float]) -> list[str]:
    """Loads onto a GPU with another job's bytes: by a reckoning of our own, beside the mock's.

    Bytes of a process that the storm has ended are no longer there: the daemon may have been killed between writing
    the witness's line and the hardware's memory.
    """
    there: dict[str, dict[tuple[str, int, str], tuple[int, int]]] = {}
    found = []
    for line in witness:
        if line["event"] == "boot":
            there.clear()
        if "job" not in line or line["event"] == "violation":
            continue
        mine = there.setdefault(line["gpu"], {})
        who = (line["job"], line["run"], line["pool"])
        if line["event"] == "load":
            alive = {one: pid for one, (_, pid) in mine.items() if died.get(pid, float("inf")) > line["mono"]}
            others = [one for one in alive if one[:2] != who[:2]]
            if others:
                found.append(f"{line['name']} was loaded onto {line['gpu']}, where {others} were")
        mine[who] = (line["mb"], line["pid"])
        if not line["mb"]:
            del mine[who]
    return found


def stays(
    clients: Mapping[str, Sequence[Line]],
    processes: Mapping[int, Process],
    facts: Sequence[Line],
    wall_minus_mono: float,
) -> list[tuple[str, float, float, str]]:
    """GPU, from, to, and who: from after the grant until before the release.

    A process that was killed, or whose slot was lost while it was stopped, holds until then.
    """
    taken = {fact["slot"]: fact["at"] / 1000 - wall_minus_mono - BESIDE_S for fact in of(facts, "slot_taken_away")}
    found = []
    for name, lines in clients.items():
        left = {(line["pid"], line["slot"]): line["at"] for line in lines if line["event"] == "leaving"}
        for line in lines:
            if line["event"] == "granted":
                process = processes.get(line["pid"])
                died = float("inf") if process is None else process.died
                until = min(
                    left.get((line["pid"], line["slot"]), float("inf")), died, taken.get(line["slot"], float("inf"))
                )
                found += [(gpu, line["at"], until, name) for gpu in line["gpus"]]
    return found


def overlaps(held: Iterable[tuple[str, float, float, str]]) -> list[str]:
    """Two at a time on a GPU, by the clients' own clocks (which are one: the machine's)."""
    found = []
    for (gpu, begin, end, name), (other_gpu, other_begin, _, other) in itertools.pairwise(sorted(held)):
        if gpu == other_gpu and other_begin < end and name != other:
            found.append(f"{gpu}: {name} held it from {begin:.3f} to {end:.3f}, and {other} from {other_begin:.3f}")
    return found


#: what may not come after what, for one slot
NEVER_AFTER = {
    "slot_granted": ("slot_granted", "slot_withdrawn", "slot_taken_away", "slot_released", "slot_over"),
    "slot_claimed": ("slot_claimed", "slot_withdrawn", "slot_taken_away", "slot_released", "slot_over"),
    "slot_released": ("slot_released", "slot_withdrawn", "slot_taken_away", "slot_over"),
    "slot_over": ("slot_over",),
}


def journal(facts: Sequence[Line]) -> list[str]:
    """Numbers without holes, fences that only grow, and no slot that comes back."""
    found = []
    seqs = [fact["seq"] for fact in facts]
    if seqs != list(range(1, len(seqs) + 1)):
        found.append(f"the journal has holes: {len(seqs)} facts, of which the last is {seqs[-1:]}")
    minted = [tuple(fact["fence"]) for fact in of(facts, "slot_granted") if fact.get("fence")]
    found += [f"fence {late} came after {early}" for early, late in itertools.pairwise(minted) if late <= early]
    found += [f"fact {late['seq']} is from before {early['seq']}" for early, late in itertools.pairwise(facts)
              if late["at"] < early["at"]]  # fmt: skip
    past: dict[str, list[str]] = {}
    for fact in facts:
        kind, slot = fact["fact"], fact.get("slot")
        if not isinstance(slot, str) or not kind.startswith("slot_"):
            continue
        before = past.setdefault(slot, [])
        found += [f"{slot}: {kind} after {one}" for one in before if one in NEVER_AFTER.get(kind, ())]
        if kind == "slot_granted" and "slot_claimed" not in before:
            found.append(f"{slot}: granted and never claimed")
        before.append(kind)
    return found


def claims(facts: Sequence[Line]) -> list[str]:
    """By the journal alone: a GPU is claimed by one slot until that is over."""
    holder: dict[str, str] = {}
    gpus: dict[str, tuple[str, ...]] = {}
    found = []
    for fact in facts:
        if fact["fact"] == "slot_claimed":
            gpus[fact["slot"]] = tuple(fact["gpus"])
            for gpu in fact["gpus"]:
                if gpu in holder:
                    found.append(f"{fact['slot']} claimed {gpu}, which {holder[gpu]} held (fact {fact['seq']})")
                holder[gpu] = fact["slot"]
        elif fact["fact"] == "slot_over":
            for gpu in gpus.get(fact["slot"], ()):
                if holder.get(gpu) == fact["slot"]:
                    del holder[gpu]
    return found


def fences(clients: Mapping[str, Sequence[Line]]) -> list[str]:
    """The fences that one client sees grow from slot to slot: what it writes to may rely on that."""
    found = []
    for name, lines in clients.items():
        seen = [
            (tuple(int(part) for part in line["fence"].split(".")), line["slot"])
            for line in lines
            if line["event"] == "granted"
        ]
        found += [
            f"{name} was given fence {late} after {early}"
            for (early, slot), (late, other) in itertools.pairwise(seen)
            if late <= early and slot != other
        ]
    return found


def unprovoked(facts: Sequence[Line], processes: Mapping[int, Process]) -> list[str]:
    """Sessions that were lost though nobody had touched their process for long."""
    opened = {fact["session"]: fact for fact in of(facts, "session_opened")}
    found = []
    for fact in of(facts, "session_lost"):
        process = processes.get(opened[fact["session"]]["pid"])
        if process is not None and not process.provoked:
            found.append(f"session {fact['session']} of {process.name}, pid {process.pid}, was lost for no reason")
    return found


# ---- faults that were injected ---------------------------------------------------------------------------------------

#: the facts of a driver that did not do it, of one of which there is no word, and of a host that cannot be seen
KNOWN = ("order_faulted", "order_contact_lost", "node_lost")


def faults_met(hardware: Iterable[Line]) -> Counter[str]:
    """How often a call met a fault, by what it was and did: by the mock's own count, which survives its daemon."""
    met: Counter[str] = Counter()
    for memory in hardware:
        for key, times in memory["fired"].items():
            fault = json.loads(key)
            met[f"{fault['method']} {fault['do']}"] += times
    return met


def faults_known(facts: Iterable[Line]) -> Counter[str]:
    """What the journal knows of them: orders and looks that failed for what was injected, or gave no answer."""
    known: Counter[str] = Counter()
    for fact in facts:
        why = str(fact.get("error") or fact.get("reason") or "")
        if fact["fact"] in KNOWN and ("was injected" in why or "no answer within" in why):
            known[fact["fact"]] += 1
    return known


# ---- reading ---------------------------------------------------------------------------------------------------------


def of(facts: Iterable[Line], *kinds: str) -> list[Line]:
    return [fact for fact in facts if fact["fact"] in kinds]


def fence_text(fact: Line) -> str:
    return ".".join(map(str, fact.get("fence") or ()))
