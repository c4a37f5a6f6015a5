"""Questions that take long are answered by a child process, from a copy of the state: the loop continues meanwhile.

The daemon makes the copy when it is the question's turn, between two inputs. It kills the process when the caller hangs
up, so that no work outlives its caller.
"""

import math
import pickle
import signal
import sys
import time
from collections.abc import Callable
from typing import Final, TypeVar, cast

import anyio
import msgspec
from msgspec.structs import replace

from rollmuxd.core.ids import Millis
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.daemon import question
from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.daemon.http.routing import Call, ClientGone, Parked
from rollmuxd.daemon.question import Copy, Question

T = TypeVar("T")

_COMMAND: Final = (sys.executable, "-P", "-m", question.__name__)


def copy_of(call: Call, core: Scheduler) -> Copy:
    """The scheduler as it is now."""
    settings, state = call.services.settings, core.state
    specs = call.shared.questions.specs_of(state)
    jobs = {name: replace(job, spec=specs[name]) for name, job in state.jobs.items()}
    encoded = msgspec.json.encode(replace(state, jobs=jobs))
    return Copy(encoded, core.config, settings.daemon.policy, settings.policy_options())


async def ask(call: Call, look: Callable[[Scheduler, Millis], Question[T]]) -> T:
    """Make the question when it is its turn, and answer it. The answer is encoded already.

    Raises:
        Refusal: too many questions of the owner wait, or the answer took too much time or memory.
        ClientGone: the caller has hung up.
    """
    answers: list[bytes] = []

    def make(core: Scheduler, now: Millis) -> Question[T]:
        began = time.perf_counter()
        asked = look(core, now)
        call.shared.questions.held(time.perf_counter() - began)
        return asked

    async def work() -> None:
        async with call.shared.questions.turn(call.caller.owner):
            answers.append(await _answered(await call.read(make)))

    if await call.park(work, math.inf) is Parked.GONE:
        raise ClientGone
    return cast("T", msgspec.Raw(answers[0]))


async def _answered(asked: Question[object]) -> bytes:
    """What a process answers. It is killed if this is cancelled."""
    done = await anyio.run_process(_COMMAND, input=pickle.dumps(asked), check=False)
    if done.returncode in (-signal.SIGKILL, -signal.SIGXCPU, question.TOO_LARGE):
        raise Refusal(
            problems.TOO_MUCH,
            f"the answer would take more than {question.CPU_S} s of processor time, {question.MEMORY // 1_000_000} MB "
            f"of memory or {question.ANSWER // 1_000_000} MB of text; ask about fewer jobs or nodes at a time",
        )
    if done.returncode:
        raise RuntimeError(f"a question failed with status {done.returncode}: {done.stderr.decode(errors='replace')}")
    return done.stdout
