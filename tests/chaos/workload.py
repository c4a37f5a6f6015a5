"""One client of a storm: a training loop that writes down what was acknowledged to it, before it goes on.

    python workload.py NAME FOLDER URL KEY REPLACE SEED

Each line of FOLDER/NAME.jsonl is written in one call and unbuffered, so that it is there however the process ends.
With HOLD_S in its environment its phases take up to so many seconds, and it keeps bytes on its GPUs for certain.
FOLDER/finish, once it is there, says how many iterations are still to be done. Ends with 0 when they are done and the
job has ended, and with 3 when the daemon says that the job is over.
"""

import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import rollmuxd
from rollmuxd.client.errors import JobAlive, JobEnded, SlotFaulted, SlotLost

OVER = 3


class Log:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: str, **what: Any) -> None:
        line = {"at": time.monotonic(), "pid": os.getpid(), "event": event, **what}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def job_of(name: str, url: str, key: str, replace: bool, chance: random.Random) -> rollmuxd.Job:
    """Most keep bytes on the GPUs, which the mock's driver moves; a few keep none, some park before they release."""
    kind = chance.choice(("driver", "driver", "at release", *(() if "HOLD_S" in os.environ else ("bare",))))
    keeps = {} if kind == "bare" else {"gpu_gb": 2, "ram_gb": 1, "driver": "mock"}
    park = "at_release" if kind == "at release" else None
    return rollmuxd.job(
        name, url=url, rollout=keeps, train=keeps, init=False, park=park, idempotency_key=key, replace=replace
    )


def main(name: str, folder: Path, url: str, key: str, replace: bool, seed: str) -> int:
    log = Log(folder / f"{name}.jsonl")
    # What a job is must not change with its process: its name decides. What the process does is its own.
    job = job_of(name, url, key, replace, random.Random(f"{seed} {name}"))
    chance = random.Random(f"{seed} {name} {key} {os.getpid()}")
    try:
        while True:
            try:
                job.start()
                break
            except JobAlive:
                time.sleep(0.3)
        log.write("registered", job=job.id, session=job._runtime._session.session, key=key)
        work(job, log, folder / "finish", chance)
        job_id = job.id
        job.end()
        log.write("ended", job=job_id)
    except JobEnded as over:
        log.write("over", why=str(over))
        return OVER
    except BaseException:
        log.write("crashed", why=traceback.format_exc())
        raise
    return 0


def work(job: rollmuxd.Job, log: Log, finish: Path, chance: random.Random) -> None:
    more: int | None = None
    while more is None or more > 0:
        if more is None and finish.exists():
            more = int(finish.read_text())
        ahead = chance.random() < 0.7
        stay(job, log, "rollout", "train" if ahead else None, chance)
        stay(job, log, "train", "rollout" if ahead and more != 1 else None, chance)
        log.write("iteration")
        more = more if more is None else more - 1


def stay(job: rollmuxd.Job, log: Log, phase: str, then: str | None, chance: random.Random) -> None:
    while True:
        entered = job.phase(phase, then=then)
        try:
            slot = entered.__enter__()
            break
        except SlotFaulted as fault:  # its state could not be loaded; the next request waits for its reinstatement
            log.write("faulted", why=str(fault))
    log.write("granted", job=job.id, slot=slot.id, fence=slot.fence, gpus=slot.gpus, phase=phase)
    try:
        time.sleep(chance.uniform(0.0, float(os.environ.get("HOLD_S", "0.06"))))
        slot.progress(1, 2)
    finally:
        log.write("leaving", slot=slot.id)
    try:
        entered.__exit__(None, None, None)
    except SlotLost as lost:
        log.write("lost", slot=slot.id, why=str(lost))
        return
    log.write("released", job=job.id, slot=slot.id)
    coming = job._runtime._session._next
    if coming is not None and coming.view is not None:
        log.write("queued", job=job.id, slot=coming.view.slot)
    time.sleep(chance.uniform(0.0, 0.02))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5] == "replace", sys.argv[6]))
