"""One mock host's hardware: GPUs, host RAM, and the bytes of states on them. No waiting here, and no faults.

The count is pessimistic, as the scheduler must be. A state's bytes are on the GPU from the beginning of a load to the
end of a park. Its RAM is held from the beginning of the first park until it is discarded (the scheduler reserves it for
that time). Bytes belong to the job's process and go when that dies, as a driver would free them; bytes of an unknown
process (pid 0) stay.

    NotDone
      Violation        what no scheduler may let happen; written down
        DoubleHold     a job's bytes come onto a GPU where another's are, beyond the residual memory it agreed to
        RamOverfull    parked states need more RAM than the host has
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct, field

from rollmuxd.spi import GpuInfo, GpuObservation, HostConfig, Inventory, NotDone, Observation, StateOrder
from rollmuxd_backend_mock.options import MockOptions
from rollmuxd_backend_mock.witness import Witness

log = logging.getLogger(__name__)

#: Orders whose end is remembered, for probes. An order is probed soon after it was sent or never.
_ORDERS_KEPT: Final = 200

Place: TypeAlias = Literal["loading", "loaded", "parking", "parked"]


class Violation(NotDone):
    """A promise was broken in front of the witness."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"VIOLATION, THE SCHEDULER IS BROKEN: {sentence}")
        self.sentence = sentence


class DoubleHold(Violation):
    """Two jobs on one GPU."""

    def __init__(self, gpu: str, holder: "StateBytes", order: StateOrder, agreed_mb: int) -> None:
        super().__init__(
            f"double hold of {gpu}: job {order.name!r} run {order.run} (order {order.order}) loads "
            f"{order.state.gpu_mb} MB onto it, while job {holder.name!r} run {holder.run} ({holder.place} by order "
            f"{holder.order}) has {holder.gpus[gpu]} MB there, and {agreed_mb} MB were agreed"
        )


class RamOverfull(Violation):
    """More is parked than fits."""

    def __init__(self, order: StateOrder, held_mb: int, ram_mb: int) -> None:
        super().__init__(
            f"host RAM of {order.host} overfull: job {order.name!r} (order {order.order}) parks "
            f"{order.state.ram_mb} MB, and {held_mb} MB of {ram_mb} MB are held"
        )


class StateBytes(Struct):
    """Where the bytes of one job's state for one pool on one node are."""

    job: str
    run: int
    name: str
    pool: str
    node: str
    #: MB that may stay on each GPU while it is parked
    agreed_mb: int
    place: Place = "loading"
    #: MB on each GPU now
    gpus: dict[str, int] = field(default_factory=dict)
    #: MB of host RAM
    ram_mb: int = 0
    #: a copy lies in host RAM: the next load is warm
    copied: bool = False
    #: the order that moved it last
    order: str = ""
    pid: int = 0
    started: str = ""


class Hardware(Struct):
    """What a host does not forget while the daemon is away."""

    boot_id: str
    states: dict[str, StateBytes] = field(default_factory=dict)
    #: the latest orders that were done
    done: list[str] = field(default_factory=list)


class Machine:
    """A mock host.

    ``changed`` is called after each change of ``hardware``; ``alive`` tells whether a process lives.
    """

    def __init__(
        self,
        host: HostConfig,
        options: MockOptions,
        hardware: Hardware,
        witness: Witness,
        *,
        changed: Callable[[], None],
        alive: Callable[[int, str], bool],
    ) -> None:
        self.id = host.id
        self.options = options
        self.hardware = hardware
        self.witness = witness
        self.gpu_mb = options.gpu_mb(host)
        self.ram_mb = options.ram_mb(host)
        self.gpus = tuple(dict.fromkeys((*host.gpus, *(f"{host.id}/gpu{i}" for i in range(options.gpus)))))
        self._changed = changed
        self._alive = alive

    # ---- looking ----------------------------------------------------------------------------------------------------

    def inventory(self) -> Inventory:
        """All GPUs, and RAM."""
        infos = tuple(GpuInfo(gpu=gpu, type=self.options.gpu_type, memory_mb=self.gpu_mb) for gpu in self.gpus)
        return Inventory(gpus=infos, ram_mb=self.ram_mb)

    def observe(self, strangers: Sequence[tuple[str, int, str]] = ()) -> Observation:
        """What is on each GPU now, once the dead were buried. ``strangers``: GPU, MB, process."""
        self.bury()
        used = dict.fromkeys(self.gpus, 0)
        processes: dict[str, tuple[str, ...]] = dict.fromkeys(self.gpus, ())
        for gpu, mb, process in (*strangers, *self._there()):
            if gpu in used:
                used[gpu] += mb
                processes[gpu] += (process,)
        return Observation(
            gpus=tuple(GpuObservation(gpu=gpu, used_mb=mb, processes=processes[gpu]) for gpu, mb in used.items()),
            boot_id=self.hardware.boot_id,
        )

    def _there(self) -> Iterator[tuple[str, int, str]]:
        """The bytes of states: GPU, MB, process."""
        for state in self.hardware.states.values():
            if any(state.gpus.values()):
                process = f"pid {state.pid or '?'} {state.name} ({state.pool}, {state.place})"
                for gpu, mb in state.gpus.items():
                    if mb:
                        yield gpu, mb, process

    def of(self, order: StateOrder) -> StateBytes | None:
        """The state that an order is about, if anything of it is here."""
        return self.hardware.states.get(_key(order))

    # ---- moving -----------------------------------------------------------------------------------------------------

    def begin_load(self, order: StateOrder, strangers: Sequence[tuple[str, int, str]] = ()) -> StateBytes:
        """Put the state's bytes on the order's GPUs; what was parked is still to be copied.

        Raises:
            DoubleHold: another job's bytes are on one of them. Nothing was changed.
            NotDone: the job's process is dead, a GPU is not this host's, or its memory is too small.
        """
        self.bury()
        self._check_gpus(order)
        if order.pid and not self._alive(order.pid, order.started):
            raise NotDone(f"{_about(order)}: its process (pid {order.pid}) has died")
        key = _key(order)
        others = [state for other, state in self.hardware.states.items() if other != key and any(state.gpus.values())]
        for gpu in order.gpus:
            self._check_room(order, gpu, others, strangers)
        state = self.hardware.states.get(key)
        if state is None:
            state = StateBytes(order.job, order.run, order.name, order.pool, order.node, order.state.residual_mb)
            self.hardware.states[key] = state
        state.place, state.order = "loading", order.order
        if order.pid:
            state.pid, state.started = order.pid, order.started
        state.gpus |= dict.fromkeys(order.gpus, order.state.gpu_mb)
        self._tell("load", state, order.gpus, warm=state.copied)
        self._changed()
        return state

    def end_load(self, order: StateOrder, state: StateBytes) -> None:
        """All bytes have arrived. Raises NotDone when the process died over it."""
        self._check_there(order, state)
        state.place = "loaded"
        self._tell("loaded", state, state.gpus)
        self._done(order)

    def begin_park(self, order: StateOrder) -> StateBytes:
        """Take the RAM for it.

        Raises:
            RamOverfull: the host has less. Nothing was changed.
            NotDone: nothing of it is here.
        """
        self.bury()
        state = self.of(order)
        if state is None:
            raise NotDone(f"{_about(order)}: nothing of it is on {order.node}; load it first")
        held = sum(other.ram_mb for other in self.hardware.states.values() if other is not state)
        if held + order.state.ram_mb > self.ram_mb:
            raise self._violation(RamOverfull(order, held, self.ram_mb), order, gpu="")
        state.place, state.order, state.ram_mb = "parking", order.order, order.state.ram_mb
        self._changed()
        return state

    def end_park(self, order: StateOrder, state: StateBytes) -> None:
        """All bytes but the residual memory have left the GPUs. Raises NotDone when the process died over it."""
        self._check_there(order, state)
        state.place, state.copied = "parked", True
        state.gpus = {gpu: min(mb, self.options.stays_mb(state.agreed_mb)) for gpu, mb in state.gpus.items()}
        self._tell("park", state, state.gpus)
        self._report_clean(state.gpus)
        self._done(order)

    def discard(self, order: StateOrder) -> None:
        """Nothing of the state is left. Of one that is not here: done."""
        self.bury()
        state = self.hardware.states.pop(_key(order), None)
        if state is not None:
            state.order = order.order
            self._freed("discard", state)
        self._done(order)

    def bury(self) -> None:
        """Free what belongs to processes that have died."""
        gone = [
            key
            for key, state in self.hardware.states.items()
            if state.pid and not self._alive(state.pid, state.started)
        ]
        for key in gone:
            self._freed("dead", self.hardware.states.pop(key))
        if gone:
            self._changed()

    def is_done(self, order: StateOrder) -> bool:
        """Whether this very order is known to have been done."""
        return _order_key(order) in self.hardware.done

    # ---- rules ------------------------------------------------------------------------------------------------------

    def _check_gpus(self, order: StateOrder) -> None:
        if strange := [gpu for gpu in order.gpus if gpu not in self.gpus]:
            raise NotDone(
                f"{_about(order)}: {', '.join(strange)} is no GPU of {self.id} (it has {', '.join(self.gpus)})"
            )

    def _check_room(
        self, order: StateOrder, gpu: str, others: Sequence[StateBytes], strangers: Sequence[tuple[str, int, str]]
    ) -> None:
        others = [state for state in others if state.gpus.get(gpu)]
        left = sum(state.gpus[gpu] for state in others if state.place == "parked" and state.job != order.job)
        for state in others:
            # Two states of one run (its engine and its trainer) may meet, for as long as the memory lasts.
            if (state.job, state.run) == (order.job, order.run):
                continue
            agreed = state.agreed_mb if state.place == "parked" else 0
            # More than was agreed may have been let since, but then the side that lets the next one in has to know.
            if state.gpus[gpu] > agreed and not (state.place == "parked" and left <= order.beside_mb):
                raise self._violation(DoubleHold(gpu, state, order, agreed), order, gpu)
        used = sum(state.gpus[gpu] for state in others) + sum(mb for where, mb, _ in strangers if where == gpu)
        if used + order.state.gpu_mb > self.gpu_mb:
            raise NotDone(
                f"{_about(order)}: out of memory on {gpu}: {order.state.gpu_mb} MB are needed, "
                f"{max(0, self.gpu_mb - used)} of {self.gpu_mb} MB are free"
            )

    def _check_there(self, order: StateOrder, state: StateBytes) -> None:
        self.bury()
        if self.of(order) is not state:
            raise NotDone(
                f"{_about(order)}: its process (pid {state.pid}) has died meanwhile, or the machine restarted"
            )

    # ---- telling ----------------------------------------------------------------------------------------------------

    def _done(self, order: StateOrder) -> None:
        done = self.hardware.done
        done.append(_order_key(order))
        del done[:-_ORDERS_KEPT]
        self._changed()

    def _freed(self, event: str, state: StateBytes) -> None:
        gpus, state.gpus = tuple(state.gpus), {}
        self._tell(event, state, gpus)
        self._report_clean(gpus)

    def _tell(self, event: str, state: StateBytes, gpus: Iterable[str], **more: Any) -> None:
        self.witness.write_each(
            event,
            self.id,
            {gpu: state.gpus.get(gpu, 0) for gpu in gpus},
            job=state.job,
            name=state.name,
            run=state.run,
            pool=state.pool,
            order=state.order,
            pid=state.pid,
            **more,
        )

    def _report_clean(self, gpus: Iterable[str]) -> None:
        """Those GPUs are clean on which everything was agreed to."""
        clean = dict.fromkeys(gpus, 0)
        for state in self.hardware.states.values():
            for gpu, mb in state.gpus.items():
                if mb and gpu in clean:
                    if state.place == "parked" and mb <= state.agreed_mb:
                        clean[gpu] += mb
                    else:
                        del clean[gpu]
        self.witness.write_each("clean", self.id, clean)

    def _violation(self, violation: Violation, order: StateOrder, gpu: str) -> Violation:
        self.witness.write(
            "violation",
            self.id,
            kind=type(violation).__name__,
            why=violation.sentence,
            gpu=gpu,
            job=order.job,
            name=order.name,
            run=order.run,
            pool=order.pool,
            mb=order.state.gpu_mb,
            order=order.order,
        )
        log.critical("%s", violation)
        return violation


def _key(order: StateOrder) -> str:
    return f"{order.job} run {order.run} {order.pool} {order.node}"


def _order_key(order: StateOrder) -> str:
    # Not the order's id alone: a new daemon's journal counts from one again, while the hardware remembers.
    return f"{order.order} {order.kind.value} {_key(order)}"


def _about(order: StateOrder) -> str:
    return f"{order.kind.value} of job {order.name!r} for pool {order.pool} on {order.node}"
