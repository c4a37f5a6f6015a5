"""Questions that take long are answered by a child process, from a copy of the state: the loop continues meanwhile.

The daemon makes the copy when it is the question's turn, between two inputs. It kills the process when the caller hangs
up, so that no work outlives its caller.
"""

import asyncio
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, cast

import anyio
import msgspec
from msgspec.structs import replace

from rollmuxd.core.ids import Millis
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, LaunchSpec
from rollmuxd.daemon import question
from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.daemon.http.routing import Call
from rollmuxd.daemon.question import Copy, Question

T = TypeVar("T")

_COMMAND: Final = (sys.executable, "-P", "-m", question.__name__)


def copy_of(call: Call, core: Scheduler) -> Copy:
    """The scheduler as it is now, but for what no question needs and is most of a large spec: see ``_asked_about``."""
    settings, state = call.services.settings, core.state
    jobs = {
        name: replace(job, spec=_asked_about(job.spec))
        if job.spec.launch or any(it.options for it in job.spec.states)
        else job
        for name, job in state.jobs.items()
    }
    encoded = msgspec.json.encode(replace(state, jobs=jobs))
    return Copy(encoded, core.config, settings.daemon.policy, settings.policy_options())


def _asked_about(spec: JobSpec) -> JobSpec:
    """A spec without the options of its drivers, and without what its process is started with."""
    states = tuple(replace(state, options=()) for state in spec.states)
    return replace(spec, states=states, launch=spec.launch and LaunchSpec(spec.launch.argv[:1]))


async def ask(call: Call, look: Callable[[Scheduler, Millis], Question[T]]) -> T:
    """Make the question when it is its turn, and answer it. The answer is encoded already.

    Raises:
        Refusal: too many questions of the owner wait, or the answer took too much time or memory.
        ClientGone: the caller has hung up.
    """
    questions, owner = call.shared.questions, call.caller.owner

    async def work() -> bytes:
        async with questions.turn(owner):
            asked = await call.read(look)
            return await _answered(asked, partial(questions.account.charge, owner))

    return cast("T", msgspec.Raw(await call.park(work, math.inf) or b""))


class _Process(subprocess.Popen[bytes]):
    """A process that answers a question."""

    def run(self, packed: bytes) -> tuple[bytes, bytes]:
        """What it answers, and writes beside. It has ended then, in ``LIMIT_S`` or by SIGKILL."""
        try:
            return self.communicate(packed, question.LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.communicate()


def _started() -> _Process:
    # Python's own way lends this process's memory to the new one, for a millisecond. uvloop's copies the page tables,
    # which takes the loop several milliseconds and makes it slower afterwards.
    # Linux shares a processor between sessions first (see autogroup in ``man 7 sched``). In the daemon's session this
    # process gave way to the daemon alone: the kernel's own work for the journal's disk waited for it.
    process = _Process(
        _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    # At once: what it imports, before it could say so itself, takes it half a second.
    os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + question.NICE)
    with suppress(OSError):  # the kernel has no sessions of that kind, or was asked too often
        Path(f"/proc/{process.pid}/autogroup").write_text(str(question.NICE))
    return process


async def _answered(asked: Question[object], charge: Callable[[float], None]) -> bytes:
    """What a process answers; ``charge`` gets its processor time. It is killed if this is cancelled.

    One that could not say its processor time is charged for as long as it ran.
    """
    packed, used_s = pickle.dumps(asked), b""
    began, process = anyio.current_time(), _started()
    ended = asyncio.get_running_loop().run_in_executor(None, process.run, packed)
    try:
        printed, errors = await asyncio.shield(ended)
        used_s, _, answer = printed.partition(b" ")
    finally:
        process.kill()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([ended])
        charge(float(used_s or anyio.current_time() - began))
    if process.returncode in (-signal.SIGKILL, -signal.SIGXCPU, question.TOO_LARGE):
        raise Refusal(
            problems.TOO_MUCH,
            f"the answer would take more than {question.CPU_S} s of processor time, {question.LIMIT_S} s in all, "
            f"{question.MEMORY // 1_000_000} MB of memory or {question.ANSWER // 1_000_000} MB of text; ask about "
            "fewer jobs or nodes at a time",
        )
    if process.returncode:
        raise RuntimeError(f"a question failed with status {process.returncode}: {errors.decode(errors='replace')}")
    return answer
