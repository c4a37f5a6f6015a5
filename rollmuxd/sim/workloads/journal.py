"""A daemon's own journal as a workload: what would another policy have done with these jobs on these nodes?

``file=PATH`` is what ``rollmuxd facts --json`` printed (as an operator, without ``--job``: the nodes must be in it).
What is taken from it:

- A job is one *run*. It arrives when it registered; in paper accounting it ends when it was lost or over (or when the
  journal ends). Its work is the iterations that it finished. Runs that finished no phase are left out.
- Its iterations are the recorded ones: each phase from its grant to its release. One that was broken off counts for
  nothing. Its own gaps are the median of what lay between a release and its next request, pauses left out.
- It registers as it did, with the means of its iterations as the planned times. Nodes that it wanted by name are so
  many nodes; GPUs that it wanted are as many nodes as hold them.
- Pools have the most nodes that were in them at once, and are fixed: nothing is bought. A host's RAM is divided among
  its nodes. Prices are the configuration's. A price given by GPU type has precedence; where none was configured
  those of RollMux's artifact are used.
- ``switch=table`` takes the times of loads, parks and ``init`` that were measured; ``none`` and a number are as always.
- SLOs are the jobs' own: ``slo`` is ignored, and so is ``ram_gb`` where hosts have a budget.

Every seed gives the same, but for which jobs stay if fewer jobs are wanted. How far tails had shrunk is not used. Where
single responses were done is not in a journal: no tail is released.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import HostId, JobId, Millis, NodeId, OrderId, PoolName, SlotId
from rollmuxd.core.model import HostSpec, NodeSpec, OrderKind
from rollmuxd.core.spec import JobSpec, Movable, OnLoss, PhaseSpec, StateSpec, Want
from rollmuxd.sim.workload import Durations, Malformed, Options, Pool, SimJob, Workload, by_arrival
from rollmuxd.sim.workloads.options import PRICES, check, thinned

INIT: Final = "init"
EXPECTED: Final = "expected what `rollmuxd facts --json` prints"


class Run(Struct):
    """What is known of one run of a job."""

    name: str
    owner: str
    spec: JobSpec
    arrived: Millis
    ended: Millis | None = None
    #: finished iterations, and the phases of the one at hand
    series: list[Durations] = field(default_factory=list)
    current: dict[str, Millis] = field(default_factory=dict)
    #: each time of each phase, side phases included
    times: dict[str, list[Millis]] = field(default_factory=dict)
    gaps: dict[str, list[Millis]] = field(default_factory=dict)
    #: since when it goes about its own business; None: it does not, or it is paused
    idle_from: Millis | None = None
    #: of loads and parks, per pool
    moves: dict[tuple[PoolName, OrderKind], list[Millis]] = field(default_factory=dict)

    def iteration_over(self) -> None:
        """Keep the iteration at hand if it has all of its phases."""
        names = [phase.name for phase in self.spec.phases]
        if all(name in self.current for name in names):
            self.series.append(tuple(self.current[name] for name in names))
        self.current = {}


class Asked(Struct):
    """A slot that was asked for."""

    run: Run
    phase: str
    side: bool
    granted: Millis | None = None


class Reading:
    """What the facts so far come to."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.hosts: dict[HostId, HostSpec] = {}
        #: all that ever were, as last configured
        self.nodes: dict[NodeId, NodeSpec] = {}
        #: the most nodes of a pool at once
        self.most: dict[PoolName, int] = {}
        self.last: Millis = 0
        self._there: dict[NodeId, NodeSpec] = {}
        self._named: dict[str, Run] = {}
        #: of each job, the run that may still be told of
        self._run_of: dict[JobId, Run] = {}
        self._slots: dict[SlotId, Asked] = {}
        self._orders: dict[OrderId, tuple[Run, PoolName, OrderKind, Millis]] = {}

    def hear(self, fact: Fact) -> None:
        """The next fact."""
        self.last = max(self.last, fact.at)
        match fact:
            case f.HostAdded():
                self.hosts[fact.host.id] = fact.host
            case f.NodeAdded():
                self.nodes[fact.node.id] = self._there[fact.node.id] = fact.node
                for pool in fact.node.pools:
                    now = sum(pool in node.pools for node in self._there.values())
                    self.most[pool] = max(self.most.get(pool, 0), now)
            case f.NodeRemoved():
                self._there.pop(fact.node, None)
            case f.JobRegistered():
                self._over(fact.job, fact.at)
                self._begins(fact)
            case f.JobLost() | f.JobEnded():
                self._over(fact.job, fact.at)
            case f.JobPaused() if fact.job in self._run_of:
                self._run_of[fact.job].idle_from = None
            case f.SlotQueued() if fact.job in self._run_of:
                self._asks(self._run_of[fact.job], fact)
            case f.SlotGranted() if fact.slot in self._slots:
                self._slots[fact.slot].granted = fact.at
            case f.SlotReleased() if fact.slot in self._slots:
                self._gives_back(self._slots.pop(fact.slot), fact.at)
            case f.OrderIssued() if fact.job in self._run_of:
                asked = self._slots.get(fact.slot or "")
                if asked is None or not asked.side:  # what is loaded for ``init`` is not there yet
                    self._orders[fact.order] = (self._run_of[fact.job], fact.pool, fact.kind, fact.at)
            case f.OrderEnded() if fact.order in self._orders:
                run, pool, kind, at = self._orders.pop(fact.order)
                run.moves.setdefault((pool, kind), []).append(fact.at - at)

    def finish(self) -> None:
        """The journal is over, and what still runs is over with it."""
        for job in list(self._run_of):
            self._over(job, self.last)

    def _begins(self, fact: f.JobRegistered) -> None:
        name = fact.spec.name if fact.run == 1 else f"{fact.spec.name}-run{fact.run}"
        if name in self._named:
            name = f"{name}-{fact.job}"
        run = self._named[name] = self._run_of[fact.job] = Run(name, fact.owner, fact.spec, fact.at)
        self.runs.append(run)

    def _over(self, job: JobId, at: Millis) -> None:
        run = self._run_of.pop(job, None)
        if run is not None:
            run.iteration_over()
            run.ended = at

    def _asks(self, run: Run, fact: f.SlotQueued) -> None:
        self._slots[fact.slot] = Asked(run, fact.phase, fact.side)
        if fact.iteration:
            run.iteration_over()
        if run.idle_from is not None and not fact.side:
            run.gaps.setdefault(fact.phase, []).append(fact.at - run.idle_from)
        run.idle_from = None

    def _gives_back(self, asked: Asked, at: Millis) -> None:
        if asked.granted is None:
            return
        took = max(1, at - asked.granted)
        asked.run.times.setdefault(asked.phase, []).append(took)
        if not asked.side:
            asked.run.current[asked.phase] = took
            asked.run.idle_from = at


# ---- the file --------------------------------------------------------------------------------------------------------


def read_facts(path: Path) -> Iterator[Fact]:
    """Every fact of a file, in order. Raises ``Malformed`` for what is none."""
    for line, body in _lines(path):
        try:
            yield f.decode(body)
        except msgspec.ValidationError as error:
            raise Malformed(str(path), line, "fact", f"no fact that this version knows: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed(str(path), line, "fact", f"no JSON ({error}), {EXPECTED}") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _path(options: Options) -> Path:
    given = options.more.get("file", "")
    if not given:
        raise ValueError(f"a journal is needed: file=PATH, {EXPECTED}")
    path = Path(given).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; {EXPECTED}")
    return path


# ---- the workload ----------------------------------------------------------------------------------------------------


class Journal:
    """The runs of a journal on its nodes."""

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self._options = options
        check(replace(options, nodes={}), ("file",), ())
        if options.sync != "none":
            raise ValueError(f"sync is {options.sync!r}: a journal's jobs have the phases that they had")
        path = _path(options)
        reading = Reading()
        for fact in read_facts(path):
            reading.hear(fact)
        reading.finish()
        if not reading.nodes:
            raise ValueError(f"{path} tells of no nodes: print the facts as an operator, without --job or --after")
        check(options, ("file",), tuple(reading.most))
        self._pools = tuple(_pool(pool, reading, options) for pool in reading.most)
        ran = [run for run in reading.runs if _steps(run)]
        if not ran:
            raise ValueError(f"{path} has {len(reading.runs)} runs of jobs, and none that finished each of its phases")
        begin = min(run.arrived for run in ran)
        gpus = {pool.name: pool.gpus_per_node for pool in self._pools}
        self._jobs = by_arrival([_job(run, begin, gpus, options.switch) for run in ran])

    def draw(self, seed: int) -> Workload:
        """The journal's runs; a seed draws which jobs stay."""
        jobs = tuple(thinned(self._jobs, self._options.jobs, seed))
        return Workload(self.name, jobs, self._pools)


def _pool(name: PoolName, reading: Reading, options: Options) -> Pool:
    nodes = [node for node in reading.nodes.values() if name in node.pools]
    for node in nodes:
        if len(node.pools) > 1:
            raise ValueError(f"node {node.id} is in pools {', '.join(node.pools)}: a simulated node is in one")
    widths = sorted({len(node.gpus) for node in nodes})
    if len(widths) > 1:
        text = " and ".join(map(str, widths))
        raise ValueError(f"pool {name} has nodes of {text} GPUs: the simulated nodes of a pool are alike")
    on_host: dict[HostId, int] = {}
    for node in reading.nodes.values():
        on_host[node.host] = on_host.get(node.host, 0) + 1
    ram = [reading.hosts[node.host].ram_mb // on_host[node.host] for node in nodes if node.host in reading.hosts]
    kinds = list(dict.fromkeys(node.gpu_type for node in nodes if node.gpu_type))
    return Pool(
        name=name,
        gpu_type="+".join(kinds) or name,
        price_per_gpu_hour=statistics.fmean(_price(node, options.prices) for node in nodes),
        gpus_per_node=widths[0],
        ram_mb=min(ram, default=round(options.ram_gb * 1000)),
        gpu_mb=min(node.gpu_mb for node in nodes),
        nodes=options.nodes.get(name, reading.most[name]),
    )


def _price(node: NodeSpec, given: Mapping[str, float]) -> float:
    """$ per GPU-hour."""
    return given.get(node.gpu_type, node.price_per_gpu_hour or PRICES.get(node.gpu_type, 0.0))


def _steps(run: Run) -> list[Durations]:
    """Its iterations. A run that finished none has one, of its phases' means, if it finished each once."""
    if run.series:
        return run.series
    known = [run.times.get(phase.name, []) for phase in run.spec.phases]
    return [tuple(_mean(times) for times in known)] if all(known) else []


def _mean(values: Sequence[Millis]) -> Millis:
    return round(statistics.fmean(values)) if values else 0


def _job(run: Run, begin: Millis, gpus: Mapping[PoolName, int], switch: str | Millis) -> SimJob:
    steps = _steps(run)
    means = [_mean(times) for times in zip(*steps, strict=True)]
    cold = _mean(run.times.get(INIT, [])) if switch == "table" else 0
    wants = tuple(_in_nodes(want, gpus.get(want.pool, 1)) for want in run.spec.wants)
    spec = replace(
        run.spec,
        name=run.name,
        phases=tuple(
            replace(phase, planned_ms=mean, gap_ms=_own_gap(run, phase))
            for phase, mean in zip(run.spec.phases, means, strict=True)
        ),
        wants=wants,
        side=tuple(replace(phase, planned_ms=cold) for phase in run.spec.side if phase.name == INIT and cold),
        states=tuple(_state(run, kept, switch) for kept in run.spec.states),
        on_loss=OnLoss.HOLD,
        movable=Movable.NO,
        colocate=False,
        ranks=1,
    )
    return SimJob(
        name=run.name,
        kind=run.owner,
        arrives_ms=run.arrived - begin,
        lasts_ms=max(1, (run.ended or run.arrived) - run.arrived),
        spec=spec,
        series=tuple(steps),
        footprint={want.pool: want.nodes for want in wants},
        cold_ms={want.pool: cold for want in wants} if cold else {},
        iterations=len(steps),
    )


def _in_nodes(want: Want, per_node: int) -> Want:
    """Nodes by name are so many nodes; GPUs are as many nodes as hold them."""
    nodes = len(want.named) or -(-want.gpus // per_node) or want.nodes
    return Want(want.pool, nodes=nodes)


def _own_gap(run: Run, phase: PhaseSpec) -> Millis:
    gaps = run.gaps.get(phase.name)
    return round(statistics.median(gaps)) if gaps else phase.gap_ms


def _moved(run: Run, kept: StateSpec, kind: OrderKind, switch: str | Millis) -> Millis:
    """What a load or a park of a state takes: nothing, measured (else as it was registered), or as given."""
    if switch == "table":
        registered = kept.load_ms if kind is OrderKind.LOAD else kept.park_ms
        return _mean(run.moves.get((kept.pool, kind), [])) or registered
    return switch if isinstance(switch, int) and kind is OrderKind.LOAD else 0


def _state(run: Run, kept: StateSpec, switch: str | Millis) -> StateSpec:
    load, park = (_moved(run, kept, kind, switch) for kind in (OrderKind.LOAD, OrderKind.PARK))
    return replace(kept, driver="sim", load_ms=load, park_ms=park)
