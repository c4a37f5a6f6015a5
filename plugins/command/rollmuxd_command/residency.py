"""``CommandResidency``: load, park, discard and probe are commands; their exit codes are the answers.

of load, park, discard                          of probe
    0          done                                 0         it was done
    75         not known (EX_TEMPFAIL)              1         it was not done
    others     not done; the last of stderr is      2         nothing of it was begun, nor will be
               the reason                           others    not known
    a signal, or over its time limit: not known

Where the connection to the host breaks, ``probe`` is asked until it knows: while the command runs it says "not known".

A command gets the order in its environment: ROLLMUX_ORDER, _KIND, _JOB (its id), _NAME, _OWNER, _RUN, _POOL, _NODE,
_HOST. Also _GPUS (numbers, with commas), _WARM (0 or 1), _PHASE, _PID (of the job's session), _RESIDUAL_MB (what may
stay on each GPU). Also _STAMP (two numbers, with a point) and _ISSUED_AT (milliseconds since 1970).

A command continues when its daemon has ended, and none can refuse it any more if it comes late. If that could do harm,
it has to check that its stamp is not less than that of the last order about its state.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

import anyio

from rollmuxd.spi import (
    Channel,
    ContactLost,
    DriverTraits,
    NotDone,
    Probed,
    Ran,
    StateOrder,
    StateSpec,
    runs_commands,
)
from rollmuxd.spi.options import Options, filled, of_state

VERBS: Final = ("load", "park", "discard", "probe")
#: as in sysexits.h
NOT_KNOWN: Final = 75
#: between two probes of a command whose connection broke
ASK_AGAIN_S: Final = 1.0
_PROBED_DONE, _PROBED_NOT_DONE, _PROBED_NOT_BEGUN = 0, 1, 2


class CommandResidency:
    """Runs commands.

    Options of ``[residency.command]``: ``idempotent`` (default false; true if running any of them twice does it once)
    and ``limit_s`` (86400: the longest time of a command). Also ``[residency.command.sets.NAME]``: ``load``, ``park``,
    ``discard``, ``probe``, argument vectors that any job may name.

    Options of a job's state: ``set``, one of these names; or ``load``, ``park``, ``discard`` and ``probe`` themselves,
    which only admins may give. A verb without a command is done at once; of ``park`` there has to be one.
    """

    #: of one that is not configured otherwise; a state without a probe is answered with "not known", which is honest
    traits = DriverTraits(idempotent=False, probes=True)
    admin_options: ClassVar[frozenset[str]] = frozenset(VERBS)

    def __init__(
        self,
        *,
        idempotent: bool = False,
        limit_s: float = 86_400.0,
        sets: Mapping[str, Mapping[str, tuple[str, ...]]] | None = None,
    ) -> None:
        self._sets = dict(sets or {})
        self._limit_s = limit_s
        self.traits = DriverTraits(idempotent=idempotent, probes=True)

    @classmethod
    async def open(cls, channel: Channel, options: Mapping[str, Any]) -> Self:
        """Make the driver. Raises ValueError for an option that it does not know."""
        given = Options("residency driver command", options, ("idempotent", "limit_s", "sets"))
        sets = {}
        for name, table in given.table("sets").items():
            where = f"set {name} of residency driver command"
            if not isinstance(table, Mapping):
                raise ValueError(f"{where} is {table!r}; it must be a table of argument vectors")  # noqa: TRY004
            sets[name] = _commands(where, Options(where, table, VERBS))
        return cls(idempotent=given.flag("idempotent", False), limit_s=given.seconds("limit_s", 86_400.0), sets=sets)

    async def close(self) -> None:
        """Nothing is kept open."""

    def check(self, state: StateSpec) -> None:
        """Raise ValueError for a state that there are no commands for."""
        self._commands_of(state)

    async def load(self, order: StateOrder) -> None:
        """Run ``load``."""
        await self._tell(order)

    async def park(self, order: StateOrder) -> None:
        """Run ``park``."""
        await self._tell(order)

    async def discard(self, order: StateOrder) -> None:
        """Run ``discard``."""
        await self._tell(order)

    async def probe(self, order: StateOrder) -> Probed:
        """Run ``probe``."""
        argv = self._commands_of(order.state).get("probe", ())
        if not argv:
            return Probed(known=False)
        try:
            ran = await self._run(order, argv)
        except (NotDone, ContactLost) as error:
            return Probed(known=False, error=str(error))
        if ran.exit_code == _PROBED_DONE:
            return Probed(known=True, done=True)
        if ran.exit_code in (_PROBED_NOT_DONE, _PROBED_NOT_BEGUN):
            return Probed(known=True, error=ran.in_words(), begun=ran.exit_code != _PROBED_NOT_BEGUN)
        return Probed(known=False, error=ran.in_words())

    async def _tell(self, order: StateOrder) -> None:
        argv = self._commands_of(order.state).get(order.kind.value, ())
        ran = await self._ran(order, argv) if argv else None
        if ran is None or ran.exit_code == 0:
            return
        text = f"{order.kind.value} of job {order.name!r} on {order.host}: {argv[0]}: {ran.in_words()}"
        if ran.exit_code < 0:
            raise ContactLost(f"{text} (ended by signal {-ran.exit_code})")
        if ran.exit_code == NOT_KNOWN:
            raise ContactLost(text)
        raise NotDone(text)

    async def _ran(self, order: StateOrder, argv: tuple[str, ...]) -> Ran | None:
        """How a command ended; None: its connection broke, and its probe says that it was done."""
        while True:
            try:
                return await self._run(order, argv)
            except ContactLost as error:
                if not self._commands_of(order.state).get("probe"):
                    raise
                if await self._is_done(order, error):
                    return None

    async def _is_done(self, order: StateOrder, error: ContactLost) -> bool:
        """Ask what became of a command until that is known, as it continues where its connection broke.

        False: it was not begun. The time limit of the order ends this, as it would have ended the wait for the command.
        """
        found = Probed(known=False)
        while not found.known:
            await anyio.sleep(ASK_AGAIN_S)
            found = await self.probe(order)
        if found.begun and not found.done:
            raise NotDone(f"{order.kind.value} of job {order.name!r}: {error}; its probe says not done: {found.error}")
        return found.done

    async def _run(self, order: StateOrder, argv: tuple[str, ...]) -> Ran:
        backend = runs_commands(order.backend)
        filled_in = [filled(text, order) for text in argv]
        return await backend.run(order.host, filled_in, env=_environment(order), timeout_s=self._limit_s)

    def _commands_of(self, state: StateSpec) -> Mapping[str, tuple[str, ...]]:
        options = of_state(state, ("set", *VERBS))
        if "set" not in options:
            return _commands("driver command", options)
        name = options.text("set", "")
        if own := [verb for verb in VERBS if verb in options]:
            raise ValueError(f"driver command is given set {name!r} and {own[0]}: say the one or the other")
        if name not in self._sets:
            there = ", ".join(self._sets) or "none"
            raise ValueError(f"set {name!r} of driver command is not there ([residency.command.sets.*] has {there})")
        return self._sets[name]


def _commands(where: str, options: Options) -> dict[str, tuple[str, ...]]:
    commands = {verb: options.argv(verb) for verb in VERBS if verb in options}
    if "park" not in commands:
        raise ValueError(f"{where} has no park: nothing would ever make its GPUs clean")
    return commands


def _environment(order: StateOrder) -> dict[str, str]:
    numbers = ",".join(gpu.rpartition("/gpu")[2] for gpu in order.gpus)
    told = {
        "order": order.order, "kind": order.kind.value, "job": order.job, "name": order.name, "owner": order.owner,
        "run": order.run, "pool": order.pool, "node": order.node, "host": order.host, "gpus": numbers,
        "warm": int(order.warm), "phase": order.phase, "pid": order.pid, "residual_mb": order.state.residual_mb,
        "stamp": f"{order.stamp.incarnation}.{order.stamp.number}", "issued_at": order.issued_at,
    }  # fmt: skip
    return {f"ROLLMUX_{name.upper()}": str(value) for name, value in told.items()}
