"""Questions that take long are asked of a copy of the scheduler, in a thread: the loop goes on meanwhile.

The copy is made of bytes between two inputs, and has a policy of its own: nothing of it can reach the live state.
"""

from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio.lowlevel import RunVar

from rollmuxd.core.policy import Policy
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.state import State
from rollmuxd.daemon.http.glue import Call
from rollmuxd.daemon.owners import scheduler_of
from rollmuxd.daemon.settings import Settings
from rollmuxd.spi import discovery

T = TypeVar("T")

#: copies that are asked at once: each is as large as the state, and its thread takes time from the loop
AT_ONCE: Final = 1
_limiter: RunVar[anyio.CapacityLimiter | None] = RunVar("aside", None)


def packed(state: State) -> bytes:
    """A copy of the state that nobody can write to."""
    return msgspec.msgpack.encode(state)


def fresh_policy(settings: Settings) -> Policy:
    """The policy that the settings name, which has derived nothing yet."""
    policy: Policy = discovery.find_policy(settings.daemon.policy)(**settings.policy_options())
    return policy


async def aside(work: Callable[[], T]) -> T:
    """Do it in a thread, when it is its turn."""
    limiter = _limiter.get()
    if limiter is None:
        limiter = anyio.CapacityLimiter(AT_ONCE)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(work, limiter=limiter)


async def ask_copy(call: Call, state: bytes, question: Callable[[Scheduler], T]) -> T:
    """Ask a scheduler in this state. What is not journalled (leases, who attends what) it does not know."""
    config, settings = call.services.driver.scheduler.config, call.services.settings

    def ask() -> T:
        return question(scheduler_of(config, fresh_policy(settings), msgspec.msgpack.decode(state, type=State)))

    return await aside(ask)
