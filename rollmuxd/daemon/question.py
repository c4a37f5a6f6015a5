"""A question that takes long, and the process that answers it: ``python -m rollmuxd.daemon.question``.

The process reads one pickled question, writes its processor time and its answer as JSON, and ends. Both its processor
time and its memory are limited by the kernel, so that no question costs more than that, whatever a policy does.
"""

import contextlib
import gc
import pickle
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from rollmuxd.core.config import Config
from rollmuxd.core.policy import Policy
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.state import State
from rollmuxd.spi import discovery

T_co = TypeVar("T_co", covariant=True)

#: seconds of processor time that an answer may take
CPU_S: Final = 20
#: seconds that it may take: on a busy machine the process has little of a processor
LIMIT_S: Final = 60
#: bytes of memory
MEMORY: Final = 1_000_000_000
#: bytes of an answer
ANSWER: Final = 8_000_000
#: the exit status where the memory was not enough, or the answer is too large
TOO_LARGE: Final = 3
#: how much less than the daemon, which sets it, the process gets of a busy processor (see ``man nice``): a third. With
#: 15 an answer of a third of a second took most of a minute beside ten busy programs on two cores
NICE: Final = 5
#: where memory is short, the kernel ends this process before the daemon and its jobs (see ``man 5 proc``)
OOM_SCORE: Final = 1000


class Question(Protocol[T_co]):
    """What can be pickled and answered."""

    def answer(self) -> T_co:
        """The answer, which can be encoded as JSON."""


@dataclass(frozen=True)
class Copy:
    """A scheduler, without what is not in the journal: leases, and which calls attend which requests."""

    #: encoded with the journal's codec
    state: bytes
    config: Config
    #: the policy's name, and its keyword arguments
    policy: str
    options: Mapping[str, Any]

    def fresh_policy(self) -> Policy:
        """The policy, which has derived nothing yet."""
        policy: Policy = discovery.find("policy", self.policy)(**self.options)
        return policy

    def decoded(self) -> State:
        """The state."""
        return msgspec.json.decode(self.state, type=State)

    def scheduler(self) -> Scheduler:
        """A scheduler in this state."""
        return Scheduler(self.config, self.fresh_policy(), self.decoded())


def main() -> int:
    """Answer the question on stdin; the exit status."""
    with contextlib.suppress(OSError):  # only Linux has it
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    gc.disable()  # the process ends soon, and its memory is limited
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    packed = sys.stdin.buffer.read()
    try:
        answer = msgspec.json.encode(pickle.loads(packed).answer())  # noqa: S301  (the daemon's own)
    except MemoryError:
        return TOO_LARGE
    if len(answer) > ANSWER:
        return TOO_LARGE
    sys.stdout.buffer.write(b"%.3f %s" % (time.process_time(), answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
