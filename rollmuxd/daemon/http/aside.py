"""Questions that take long are asked of a copy of the scheduler, in a thread: the loop goes on meanwhile.

The copy is made of bytes between two inputs, and has a policy of its own: nothing of it can reach the live state.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio.lowlevel import RunVar

from rollmuxd.core.model import HostId, Millis
from rollmuxd.core.policy import Policy
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.state import State
from rollmuxd.daemon.http.glue import Call
from rollmuxd.daemon.settings import Settings
from rollmuxd.spi import discovery

T = TypeVar("T")

#: copies that are asked at once: each is as large as the state, and its thread takes time from the loop
AT_ONCE: Final = 1
_limiter: RunVar[anyio.CapacityLimiter | None] = RunVar("aside", None)


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


class Copy(NamedTuple):
    """What a scheduler in another thread is made of; nobody can write to it."""

    state: bytes
    looked_at: dict[HostId, Millis]

    @classmethod
    def of(cls, core: Scheduler) -> "Copy":
        """Of the live one, as it is now."""
        return cls(msgspec.msgpack.encode(core.state), core.looked_at)


async def ask_copy(call: Call, copy: Copy, question: Callable[[Scheduler], T]) -> T:
    """Ask a scheduler in this state. Of what is not journalled (leases, who attends what) it knows looks at hosts."""
    config, settings = call.services.driver.scheduler.config, call.services.settings

    def ask() -> T:
        state = msgspec.msgpack.decode(copy.state, type=State)
        return question(Scheduler(config, fresh_policy(settings), state, looked_at=copy.looked_at))

    return await aside(ask)
