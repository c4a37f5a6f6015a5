"""``CudaCheckpointResidency``: lock, checkpoint; restore, unlock. Each with a time limit, and after each failure the
state in which each process is left is looked up and told.

    running --lock--> locked --checkpoint--> checkpointed --restore--> locked --unlock--> running

Failures are undone where possible. A process that could not be checkpointed is unlocked, and processes that were parked
before it are brought back. A restore that fails (usually out of memory) cannot be undone: NVIDIA's driver may leave
such a process stuck for ever (NVIDIA/cuda-checkpoint#44).
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Self

import anyio

from rollmuxd.spi import (
    Channel,
    ContactLost,
    DriverTraits,
    NotDone,
    OrderKind,
    PluginError,
    Probed,
    Ran,
    StateOrder,
    StateSpec,
    runs_commands,
)
from rollmuxd.spi import engines as shared
from rollmuxd.spi.options import Options, of_state

RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"
#: a question, and an unlock
_SHORT_S: Final = 15.0
#: on top of what the tool itself waits for
_SLACK_S: Final = 5.0
_OPTIONS: Final = ("list", "start", "stop", "end_wait_s")
_TOLD_KEPT: Final = 10_000


class CudaCheckpointResidency:
    """Moves whole processes.

    Options of ``[residency.cuda-checkpoint]``: ``enabled`` (default false), ``tool`` ("cuda-checkpoint", or a path to
    it). Also ``lock_s`` (10), and ``limit_s`` (180: of a checkpoint and of a restore, each process).

    Options of a job's state: without any, it is the process of the job's session. ``list`` is an argument vector that
    prints process ids, one a line (parked from first to last, loaded from last to first). ``start``, ``stop`` and
    ``end_wait_s`` are as for engines.
    """

    #: it looks at each process's state before it does anything
    traits = DriverTraits(idempotent=True, probes=True)
    admin_options: ClassVar[frozenset[str]] = frozenset({"list", "start", "stop"})

    def __init__(
        self, *, enabled: bool = True, tool: str = "cuda-checkpoint", lock_s: float = 10.0, limit_s: float = 180.0
    ) -> None:
        self._enabled = enabled
        self._tool = tool
        self._lock_s = lock_s
        self._limit_s = limit_s
        self._told: dict[str, None] = {}

    @classmethod
    async def open(cls, channel: Channel, options: Mapping[str, Any]) -> Self:
        """Make the driver. Raises ValueError for an option that it does not know."""
        given = Options("residency driver cuda-checkpoint", options, ("enabled", "tool", "lock_s", "limit_s"))
        return cls(
            enabled=given.flag("enabled", False),
            tool=given.text("tool", "cuda-checkpoint"),
            lock_s=given.seconds("lock_s", 10.0),
            limit_s=given.seconds("limit_s", 180.0),
        )

    async def close(self) -> None:
        """Nothing is kept open."""

    def check(self, state: StateSpec) -> None:
        """Raise ValueError where it is off, or for what an option cannot be."""
        if not self._enabled:
            raise ValueError(
                "driver cuda-checkpoint is off here: it freezes whole processes, and about one in twenty times that "
                "fails; an operator turns it on by [residency.cuda-checkpoint] enabled = true"
            )
        options = of_state(state, _OPTIONS)
        for key in ("list", "start", "stop"):
            options.argv(key)
        options.seconds("end_wait_s", 10.0)

    # ---- the verbs --------------------------------------------------------------------------------------------------

    async def load(self, order: StateOrder) -> None:
        """Restore and unlock, one process after the other."""
        self._begin(order)
        pids = await self._pids(order)
        if not pids and order.warm:
            raise NotDone(f"{_whose(order)} ended while it was parked: start the job again")
        if not pids and (start := of_state(order.state, _OPTIONS).argv("start")):
            await shared.run(order, start)
            await shared.until(lambda: self._pids(order))
            pids = await self._pids(order)
        for pid in reversed(pids):
            await self._restore(order, pid)

    async def park(self, order: StateOrder) -> None:
        """Lock and checkpoint, one process after the other; all of them or none, as far as it can be undone."""
        self._begin(order)
        pids = await self._pids(order)
        if not pids:
            raise NotDone(f"{_whose(order)} is not there")
        parked: list[int] = []
        for pid in pids:
            try:
                await self._checkpoint(order, pid)
            except PluginError as error:
                undone = await self._undo(order, parked)
                raise type(error)(f"{error}{undone}") from error
            parked.append(pid)

    async def discard(self, order: StateOrder) -> None:
        """Nothing of a process can be dropped but all of it: ``stop`` ends it, or it is waited for."""
        self._begin(order)
        options = of_state(order.state, _OPTIONS)
        if stop := options.argv("stop"):
            await shared.run(order, stop)
        wait_s = options.seconds("end_wait_s", 10.0)
        with anyio.move_on_after(wait_s):
            await shared.until(lambda: self._gone(order))
            return
        raise NotDone(f"{_whose(order)} still runs {wait_s:g} s after it was to end: end it")

    async def probe(self, order: StateOrder) -> Probed:
        """The processes' states; of an order that this daemon's process did not tell, nothing is known."""
        if order.order not in self._told:
            return Probed(known=False)
        try:
            pids = await self._pids(order)
            states = [(pid, await self._state(order, pid)) for pid in pids]
        except PluginError as error:
            return Probed(known=False, error=str(error))
        wanted = {OrderKind.LOAD: RUNNING, OrderKind.PARK: CHECKPOINTED}.get(order.kind, "")
        if (pids or order.kind is OrderKind.DISCARD) and all(state == wanted for _, state in states):
            return Probed(known=True, done=True)
        return Probed(known=True, error=_told_states(states) or f"{_whose(order)} is not there")

    # ---- one process ------------------------------------------------------------------------------------------------

    async def _checkpoint(self, order: StateOrder, pid: int) -> None:
        state = await self._state(order, pid)
        if state == CHECKPOINTED:
            return
        if state == RUNNING:
            timeout = ("--timeout", str(round(self._lock_s * 1000)))
            await self._act(order, pid, "lock", *timeout, limit_s=self._lock_s + _SLACK_S)
            state = LOCKED
        if state != LOCKED:
            raise NotDone(f"pid {pid} on {order.host} is {state}, which no checkpoint leads out of: end it")
        try:
            await self._act(order, pid, "checkpoint", limit_s=self._limit_s)
        except NotDone as error:
            raise NotDone(f"{error}{await self._unlocked(order, pid)}") from error

    async def _restore(self, order: StateOrder, pid: int) -> None:
        state = await self._state(order, pid)
        if state == CHECKPOINTED:
            try:
                await self._act(order, pid, "restore", limit_s=self._limit_s)
            except NotDone as error:
                raise NotDone(
                    f"{error}; a restore that failed cannot be counted on to succeed later: end it"
                ) from error
            state = LOCKED
        if state == LOCKED:
            await self._act(order, pid, "unlock", limit_s=_SHORT_S)
        elif state != RUNNING:
            raise NotDone(f"pid {pid} on {order.host} is {state}, which no restore leads out of: end it")

    async def _act(self, order: StateOrder, pid: int, action: str, *more: str, limit_s: float) -> None:
        """One action, believed only when the state that it leads to is seen. Every failure names the state."""
        leads_to = {"lock": LOCKED, "checkpoint": CHECKPOINTED, "restore": LOCKED, "unlock": RUNNING}[action]
        said = ""
        try:
            ran = await self._run(order, "--action", action, "--pid", str(pid), *more, limit_s=limit_s)
            said = "" if ran.exit_code == 0 else ran.in_words()
        except ContactLost as error:
            said = str(error)
        state = await self._state(order, pid)  # raises ContactLost where it is not known
        if said or state != leads_to:
            why = said or "the tool said that it was done"
            raise NotDone(f"{action} of pid {pid} on {order.host} failed: {why}; it is {state}")

    async def _unlocked(self, order: StateOrder, pid: int) -> str:
        with contextlib.suppress(PluginError):
            if await self._state(order, pid) == LOCKED:
                await self._act(order, pid, "unlock", limit_s=_SHORT_S)
                return ", and was unlocked again"
        return ""

    async def _undo(self, order: StateOrder, parked: Sequence[int]) -> str:
        """Bring back what was parked before one failed; what became of that, for people."""
        told = ""
        for pid in reversed(parked):
            try:
                await self._restore(order, pid)
                told += f"; pid {pid} was brought back"
            except PluginError as error:
                told += f"; {error}"
        return told

    async def _state(self, order: StateOrder, pid: int) -> str:
        ran = await self._run(order, "--get-state", "--pid", str(pid), limit_s=_SHORT_S)
        state = ran.stdout.decode(errors="replace").strip().lower()
        if ran.exit_code or state not in (RUNNING, LOCKED, CHECKPOINTED, FAILED):
            raise ContactLost(f"the state of pid {pid} on {order.host} cannot be told: {ran.in_words()}")
        return state

    async def _run(self, order: StateOrder, *args: str, limit_s: float) -> Ran:
        return await runs_commands(order.backend).run(order.host, (self._tool, *args), timeout_s=limit_s)

    # ---- which processes --------------------------------------------------------------------------------------------

    async def _pids(self, order: StateOrder) -> list[int]:
        """The processes that are there: those of ``list``, else the session's, if it is still that one."""
        if argv := of_state(order.state, _OPTIONS).argv("list"):
            words = (await shared.run(order, argv, limit_s=_SHORT_S)).split()
            if strange := [word for word in words if not word.isdecimal() or int(word) < 2]:
                raise NotDone(f"{argv[0]} on {order.host} printed {strange[0][:40]!r} for a process id")
            return [int(word) for word in words]
        if order.pid < 2:
            raise NotDone(f"{_whose(order)} is not known: the job has no session, and no list= says which processes")
        ran = await runs_commands(order.backend).run(order.host, ("cat", f"/proc/{order.pid}/stat"), timeout_s=_SHORT_S)
        # The name is in brackets and may have any; the state is field 3, the start time is field 22.
        fields = ran.stdout.decode(errors="replace").rpartition(")")[2].split()
        if ran.exit_code or len(fields) < 20 or fields[0] == "Z":
            return []
        if order.started and order.started != fields[19]:
            return []  # the number is another process's by now
        return [order.pid]

    async def _gone(self, order: StateOrder) -> bool:
        return not await self._pids(order)

    def _begin(self, order: StateOrder) -> None:
        if not self._enabled:
            raise NotDone("driver cuda-checkpoint is off here ([residency.cuda-checkpoint] enabled = true turns it on)")
        self._told[order.order] = None
        while len(self._told) > _TOLD_KEPT:
            del self._told[next(iter(self._told))]


def _whose(order: StateOrder) -> str:
    return f"the process of job {order.name!r} (pid {order.pid} on {order.host})"


def _told_states(states: Sequence[tuple[int, str]]) -> str:
    return ", ".join(f"pid {pid} is {state}" for pid, state in states)
