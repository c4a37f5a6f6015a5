"""The API for training loops: :func:`job`, its phases, and the slots that they run in.

A phase is one object: a context manager and, in a hat, a decorator. :class:`Job` and :class:`AsyncJob` differ in how
they run the flows of :class:`~rollmuxd.client.runtime.Runtime`, and in nothing else.
"""

import functools
import inspect
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast

import msgspec

from rollmuxd.client.channel import Hook
from rollmuxd.client.errors import beside
from rollmuxd.client.rank_group import Store
from rollmuxd.client.registration import call_with_known, registration
from rollmuxd.client.retry import Flow
from rollmuxd.client.runtime import Options, Runtime
from rollmuxd.client.session import Held
from rollmuxd.wire.requests import RegisterBody

P = ParamSpec("P")
T = TypeVar("T")

_MEASURE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
#: as many as a release may carry
_MEASURES = 32

# ---- slots -----------------------------------------------------------------------------------------------------------


class Slot(Held):
    """The GPUs of one phase, for as long as it runs. Without a daemon it holds nothing."""

    def __init__(self, runtime: Runtime[Any], id: str, phase: str, fence: str | None, gpus: Sequence[str]) -> None:
        super().__init__(id, phase, fence, gpus)
        self._runtime = runtime
        self.measured: dict[str, float] = {}
        #: seconds of the monotonic clock: when it was granted
        self.since = time.monotonic()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id or 'alone'} {self.phase} gpus={list(self.gpus)}>"

    @property
    def should_yield(self) -> bool:
        """Whether a filler is to leave its slot now: another job is due on the node, or the slot is lost."""
        return self.lost or self.yield_by is not None

    @property
    def yield_in_s(self) -> float | None:
        """Seconds until a slot that is to be left is revoked; None: it is not to be left."""
        return None if self.yield_by is None else max(0.0, self.yield_by - time.monotonic())

    def progress(self, done: int, total: int) -> None:
        """Say how far the work is. Cheap: it goes out with the next heartbeat."""
        self._runtime.progress(max(0, int(done)), max(0, int(total)))

    def measure(self, **figures: float) -> None:
        """Keep figures (tokens, reward, peak memory) with the record of this slot; the last of a name counts.

        Raises ValueError for more than 32 names. Figures that are no numbers (nan, inf) are left out: a bad reward
        must not keep the GPUs from being released.
        """
        for name, value in figures.items():
            if not _MEASURE.fullmatch(name):
                raise ValueError(f"measure({name!r}): a name has letters, digits and . _ -")
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise ValueError(f"measure({name}={value!r}): a figure is a number") from None
            if math.isfinite(number):
                self.measured[name] = number
        if len(self.measured) > _MEASURES:
            raise ValueError(f"measure(): {len(self.measured)} figures, and a slot keeps {_MEASURES}")

    def shrink(self, keep: Iterable[str]) -> None:
        """Give all GPUs back but ``keep``, after having cleared the others. Raises :class:`Refused`."""
        self._runtime.run(self._runtime.resizing(self, list(keep)))

    def grow(self) -> None:
        """Take all GPUs of the phase back, as a directive has offered. Raises :class:`Refused`."""
        self._runtime.run(self._runtime.resizing(self, None))


class AsyncSlot(Slot):
    """The same in an :class:`AsyncJob`."""

    async def shrink(self, keep: Iterable[str]) -> None:  # type: ignore[override]
        """Give all GPUs back but ``keep``, after having cleared the others. Raises :class:`Refused`."""
        await self._runtime.arun(self._runtime.resizing(self, list(keep)))

    async def grow(self) -> None:  # type: ignore[override]
        """Take all GPUs of the phase back, as a directive has offered. Raises :class:`Refused`."""
        await self._runtime.arun(self._runtime.resizing(self, None))


# ---- phases ----------------------------------------------------------------------------------------------------------


class _PhaseBase:
    def __init__(self, runtime: Runtime[Any], name: str, then: str | None) -> None:
        runtime.check_phase(name)
        if then is not None:
            runtime.check_phase(then)
        self._runtime = runtime
        self.name = name
        self._then = then

    def left(self, error: BaseException | None) -> Flow[None]:
        with beside(error, f"phase {self.name} was left"):
            yield from self._runtime.leaving(self._then, error)


class Phase(_PhaseBase):
    """A phase of a :class:`Job`: ``with job.phase("rollout") as slot`` or ``@job.phase("rollout")``.

    Entering waits for the turn. Entered inside itself, it is the same stay. Leaving releases, whatever happened inside,
    and raises :class:`SlotLost` if the slot was lost meanwhile.
    """

    def __enter__(self) -> Slot:
        return cast("Slot", self._runtime.run(self._runtime.entering(self.name)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runtime.run(self.left(error))

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Run every call of a function in a slot. A coroutine function waits without blocking its loop."""
        if inspect.iscoroutinefunction(function):
            return cast("Callable[P, T]", AsyncPhase(self._runtime, self.name, self._then)(function))

        @functools.wraps(function)
        def in_slot(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return function(*args, **kwargs)

        return in_slot


class AsyncPhase(_PhaseBase):
    """A phase of an :class:`AsyncJob`: ``async with job.phase("rollout") as slot``, or a decorator.

    Cancelled, it releases. If its coroutine is dropped with its loop, nothing can be awaited. Then the slot stays held
    until the job enters its next phase, is ended, or ends with its process.
    """

    async def __aenter__(self) -> AsyncSlot:
        return cast("AsyncSlot", await self._runtime.arun(self._runtime.entering(self.name)))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _closed(error, trace):
            self._runtime.drop(self.left(error))
        else:
            await self._runtime.arun(self.left(error))

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Run every call of a coroutine function in a slot."""
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"{function.__qualname__} is not async; decorate it with a phase of rollmuxd.job(...)")

        @functools.wraps(function)
        async def in_slot(*args: P.args, **kwargs: P.kwargs) -> Any:
            async with self:
                return await function(*args, **kwargs)

        return cast("Callable[P, T]", in_slot)


def _closed(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether a coroutine is left because it is closed (dropped, with its loop): then nothing can be awaited any more.

    An async generator is closed by its loop, which waits for what it awaits; where there is one.
    """
    if not isinstance(error, GeneratorExit) or trace is None:
        return False
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return not trace.tb_frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR


# ---- jobs ------------------------------------------------------------------------------------------------------------


S = TypeVar("S", bound=Slot)


class _Base(Generic[S]):
    """What :class:`Job` and :class:`AsyncJob` share."""

    def __init__(
        self, describe: Callable[[Iterable[str], str], RegisterBody], slot_kind: type[S], options: Options
    ) -> None:
        self._runtime: Runtime[S] = Runtime(describe, slot_kind, options)
        self._describe, self._options = describe, options

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._runtime}>"

    @property
    def name(self) -> str:
        """The job's name."""
        return self._runtime.name

    @property
    def id(self) -> str:
        """The job's id with the daemon; empty before the start, and without a daemon."""
        return self._runtime.id

    @property
    def slot(self) -> S | None:
        """The slot that is held now: how a decorated function gets at its own."""
        return self._runtime.slot

    @property
    def alone(self) -> bool:
        """Whether there is no daemon, so that phases wait for nothing. Known once the job has started."""
        return self._runtime.alone

    @property
    def ends_at(self) -> float | None:
        """When the first of the job's nodes goes away, in seconds since 1970, as heartbeats tell; None: not known to.

        A Slurm allocation ends, for one, whatever runs in it.
        """
        return self._runtime.ends_at

    def ends_soon(self, within_s: float) -> bool:
        """Whether a node of the job goes away within so many seconds: time to write a checkpoint."""
        return self.ends_at is not None and self.ends_at - time.time() <= within_s

    def on_load(self, hook: Hook, *, pool: str | None = None) -> Hook:
        """Call ``hook(order)`` to bring state onto the GPUs (``order.pool``, ``order.gpus``, ``order.warm``).

        It runs in a thread of its own, while the training loop waits for its slot: set the CUDA device in it. When it
        raises, the load has failed. Returns the hook, so it can be a decorator.
        """
        return self._runtime.hook("load", pool, hook)

    def on_park(self, hook: Hook, *, pool: str | None = None) -> Hook:
        """Call ``hook(order)`` to move state off the GPUs into host memory; see :meth:`on_load`."""
        return self._runtime.hook("park", pool, hook)

    def on_discard(self, hook: Hook, *, pool: str | None = None) -> Hook:
        """Call ``hook(order)`` to drop state from GPUs and host memory; see :meth:`on_load`."""
        return self._runtime.hook("discard", pool, hook)


class Job(_Base[Slot]):
    """A job; see :func:`job`. Starts when it is entered, or at its first phase; ends when it is left, or at exit."""

    def phase(self, name: str, *, then: str | None = None) -> Phase:
        """Return a phase, as context manager and decorator.

        ``then`` names the phase that will be asked for next: it is requested in the same call that releases this one.
        """
        return Phase(self._runtime, name, then)

    def filler(self) -> Phase:
        """Return a filler's phase: entering it waits until a node is lent. Leave it when ``slot.should_yield`` is true.

        Of the same kind as :meth:`phase`; without a daemon it is one loan that is never asked back.
        """
        return Phase(self._runtime, "filler", None)

    def start(self) -> None:
        """Register with the daemon, unless that has been done.

        Raises :class:`JobAlive` when another process runs this job, :class:`Unprocessable` for what can never be met.
        """
        self._runtime.run(self._runtime.opening())

    def end(self, reason: str = "") -> None:
        """End the job, and free all it held. It has finished, unless a ``reason`` says why it has not."""
        self._finish(self._runtime.ending(reason or "finished", keep=False, finished=not reason))

    def leave(self) -> None:
        """Close this process's part in good order; the job stays, for a process with the same ``idempotency_key``."""
        self._finish(self._runtime.ending("", keep=True))

    def _finish(self, flow: Flow[None]) -> None:
        try:
            self._runtime.run(flow)
        finally:
            self._runtime.close()

    def __enter__(self) -> Self:
        self._runtime.run(self._runtime.opening())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(self._runtime.left(error))


class AsyncJob(_Base[AsyncSlot]):
    """A job on asyncio; see :func:`ajob`."""

    def phase(self, name: str, *, then: str | None = None) -> AsyncPhase:
        """Return a phase, as async context manager and decorator of coroutine functions; see :meth:`Job.phase`."""
        return AsyncPhase(self._runtime, name, then)

    def filler(self) -> AsyncPhase:
        """Return a filler's phase; see :meth:`Job.filler`."""
        return AsyncPhase(self._runtime, "filler", None)

    async def start(self) -> None:
        """Register with the daemon, unless that has been done; see :meth:`Job.start`."""
        await self._runtime.arun(self._runtime.opening())

    async def end(self, reason: str = "") -> None:
        """End the job, and free all it held. It has finished, unless a ``reason`` says why it has not."""
        await self._finish(self._runtime.ending(reason or "finished", keep=False, finished=not reason))

    async def leave(self) -> None:
        """Close this process's part in good order; see :meth:`Job.leave`."""
        await self._finish(self._runtime.ending("", keep=True))

    async def _finish(self, flow: Flow[None]) -> None:
        try:
            await self._runtime.arun(flow)
        except BaseException:
            await self._runtime.aclose()
            raise
        await self._runtime.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not _closed(error, trace):  # else it ends with its process
            await self._finish(self._runtime.left(error))


# ---- making them -----------------------------------------------------------------------------------------------------


def _hinting(make: Callable[P, T]) -> Callable[P, T]:
    """Have an unknown keyword answered with the nearest that there is; a mistake's traceback ends here."""
    known = list(inspect.signature(make).parameters)

    @functools.wraps(make)
    def hinting(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            call_with_known(kwargs, known)
            return make(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise error.with_traceback(None) from None

    return hinting


@_hinting
def job(
    name: str,
    *,
    rollout: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    pools: Mapping[str, Mapping[str, Any]] | None = None,
    phases: Mapping[str, Any] | Iterable[str] | None = None,
    side: Mapping[str, Any] | None = None,
    init: bool | str | Iterable[str] | Mapping[str, Any] | None = True,
    slo: float | None = None,
    priority: int = 0,
    park: str | None = None,
    on_loss: str | None = None,
    movable: str = "no",
    asynchronous: bool | Mapping[str, Any] | None = None,
    filler: bool | Mapping[str, Any] | None = None,
    if_unmet: str | None = None,
    colocate: bool = False,
    ranks: int = 1,
    rank: int = 0,
    store: Store | None = None,
    idempotency_key: str | None = None,
    replace: bool = False,
    keep: bool = False,
    url: str | None = None,
    api_key: str | None = None,
) -> Job:
    """Return a job as described; nothing is sent before it is entered, or has its first phase.

    ``rollout``, ``train`` and ``pools=dict(name=...)`` say what the job needs of each pool, and what is known. The
    nodes: ``nodes`` (whole nodes, default 1), ``gpus`` (at least so many), ``named`` (nodes by name). The phase of the
    same name: ``seconds`` (planned time in its slot; default: measured), ``gap_s``, ``min_gpus``. The state that the
    job keeps there: ``gpu_gb`` and ``residual_gb`` (on each GPU, loaded and parked), ``ram_gb`` (of each node's host),
    ``load_s``, ``park_s``. Also ``engine_gpus`` (several engines, each on so many GPUs) and ``driver`` (default
    ``channel``: this process's hooks). A pool with none of these has no state to be moved. Without any pool: one node
    of ``rollout`` and one of ``train``.

    The cycle is a phase per pool, in that order, unless ``phases`` says otherwise:
    ``phases=dict(rollout="rollout", train="train", sync=["rollout", "train"])``; a value may also be
    ``dict(pools=..., seconds=..., gap_s=..., min_gpus=...)``. Without ``pools`` that is the pool of the phase's name.
    ``init`` is a side phase over all pools, unless it is false or says something else. ``side`` has side phases of
    other names, such as ``eval=dict(pools="rollout", seconds=120, every=20)``: at worst so long, once in so many
    iterations at most.

    ``asynchronous=True`` says that the job's rollouts run on while it waits, on GPUs of its own. Such a job has one
    phase, ``train``. ``asynchronous=dict(pace_s=..., ahead=...)`` adds the time of a batch (default: measured), and how
    many batches begin beyond the one that is trained (default 1). With ``ahead=0`` the next is begun when the slot is
    granted.

    ``filler=dict(yield_s=..., min_run_s=...)``, or ``filler=True``, makes the job a filler. It names one pool, and
    works on one of its nodes while no other job is due there (:meth:`Job.filler`). Asked to, it gives its slot
    back within ``yield_s``.

    ``slo`` bounds the slowdown (2.0: at most twice the time the job would take alone); None is best effort.
    ``on_loss`` says what follows when this process is lost. ``hold`` waits until its GPUs are verified clean, ``kill``
    ends it where the daemon may, ``relaunch`` starts it again (only what the daemon has started). The default is the
    daemon's configuration. A process that the daemon has started joins the run that it was started for. ``ranks``,
    ``rank`` and ``store`` are for jobs of several processes: rank 0 talks to the daemon, the others follow it through
    the store. ``idempotency_key`` lets a restarted process join the run it had; ``replace`` ends a run that is still
    alive. ``keep`` leaves the job with the daemon when this process ends.

    Raises TypeError and ValueError for what cannot be meant, before anything is sent.
    """
    describe, options = _parts(locals())
    return Job(describe, Slot, options)


def ajob(name: str, **settings: Any) -> AsyncJob:
    """Return a job for asyncio, to be entered by ``async with``; the arguments are those of :func:`job`."""
    plain = job(name, **settings)
    return AsyncJob(plain._describe, AsyncSlot, plain._options)  # noqa: SLF001  (its twin)


def _parts(given: Mapping[str, Any]) -> tuple[Callable[[Iterable[str], str], RegisterBody], Options]:
    """From the arguments of :func:`job`: what makes the registration, and the rest."""
    options = Options(**{key: given[key] for key in Options.__struct_fields__ if key != "launched"})
    key, ours = os.environ.get("ROLLMUX_RUN_KEY") or None, os.environ.get("ROLLMUX_JOB", given["name"])
    if key is not None and ours != given["name"]:
        # Its visible GPUs are those of that job.
        raise ValueError(
            f"job {given['name']!r}: this process was started with the GPUs of job {ours!r}; give it that name, or "
            "start it outside of `rollmuxd run`"
        )
    if options.idempotency_key is None and "ROLLMUX_JOB" in os.environ:
        options = msgspec.structs.replace(options, idempotency_key=key, launched=key is not None)
    if given["pools"] is not None and not isinstance(given["pools"], Mapping):
        raise TypeError(f"pools={given['pools']!r}: say each pool with its nodes, as pools=dict(rollout=dict(nodes=1))")
    pools = {pool: given[pool] for pool in ("rollout", "train") if given[pool] is not None} | dict(given["pools"] or {})
    apart = {"name", "rollout", "train", "pools", *Options.__struct_fields__}
    described = {key: value for key, value in given.items() if key not in apart}

    def describe(hooked: Iterable[str], key: str) -> RegisterBody:
        return registration(
            given["name"],
            pools=pools,
            hooked=hooked,
            idempotency_key=key,
            ranks=options.ranks,
            **described,
        )

    return describe, options
