"""Who gets in: what a registration must be, and which waiting jobs fit now."""

from itertools import combinations

from rollmuxd.core import facts as f
from rollmuxd.core.config import Config
from rollmuxd.core.cycle import Cycle
from rollmuxd.core.errors import Impossible
from rollmuxd.core.model import Job, JobId, JobSpec, Millis, Movable, OnLoss
from rollmuxd.core.policy import Placed
from rollmuxd.core.state import State
from rollmuxd.core.turns import dispatch, take_place


def waiting_order(c: Cycle, now: Millis) -> list[JobId]:
    """Waiting jobs, the next first: by priority raised with age, then by age."""
    jobs, aging = c.state.jobs, c.config.aging_ms

    def rank(name: JobId) -> tuple[int, Millis]:
        job = jobs[name]
        return -(job.spec.priority + (now - job.registered_at) // aging), job.registered_at

    return sorted(c.state.waiting, key=rank)


def admit(c: Cycle, only: JobId | None = None) -> None:
    """Place every waiting job that fits. One that has waited too long is not overtaken on the pools it wants.

    ``only`` a newcomer need be tried where nothing else has changed: the others have been, and still do not fit.
    """
    if not c.state.waiting:
        return
    reserved: set[str] = set()
    refused: dict[object, float] = {}  # the loosest SLO that was refused: with a tighter one it fits even less
    for name in waiting_order(c, c.now):
        job = c.state.jobs[name]
        pools = {want.pool for want in job.spec.wants}
        if job.pins or (pools & reserved and name != only):  # something of its run before is still there
            continue
        shape, slo = _shape_of(job), job.spec.slo or float("inf")
        fits_not = refused.get(shape, 0.0) >= slo or (only is not None and name != only)
        placed = None if fits_not or pools & reserved else c.policy.place(c.state, job)
        if placed is not None:
            _seat(c, job, placed)
            continue
        refused[shape] = max(slo, refused.get(shape, 0.0))
        if c.now - job.registered_at >= c.config.bounded_wait_ms:
            reserved |= pools


def _seat(c: Cycle, job: Job, placed: Placed) -> None:
    group = placed.group or c.state.next_id("g")
    c.fact(
        f.JobPlaced(
            c.now,
            job.id,
            group,
            placed.pins,
            placed.wheel,
            placed.status,
            placed.admission,
            placed.promised,
            placed.period_ms,
            placed.cost_per_hour,
            placed.dispatch,
        )
    )
    if job.queued is not None:
        slot = c.state.slots[job.queued]
        take_place(c, job, slot.phase, side=slot.side)
        dispatch(c, group)


def _shape_of(job: Job) -> object:
    """What placement looks at of a job, for not trying the like again in one round."""
    spec = job.spec
    times = tuple((name, kept.count and kept.total_ms // kept.count) for name, kept in job.times.items())
    return (spec.phases, spec.wants, spec.states, spec.park, spec.colocate, times, tuple(job.last_pins.items()))


def check_spec(spec: JobSpec, state: State, config: Config) -> None:
    """What could never be met is refused at once, and says what is short."""
    wanted = [want.pool for want in spec.wants]
    names = [phase.name for phase in (*spec.phases, *spec.side)]
    if not spec.phases or len(set(names)) != len(names) or len(set(wanted)) != len(wanted):
        raise Impossible("a job has at least one cycle phase, and names each phase and each pool once")
    used = {pool for phase in (*spec.phases, *spec.side) for pool in phase.pools}
    for want in spec.wants:
        if want.pool not in used:
            raise Impossible(f"nodes of pool {want.pool} are wanted, and no phase uses them")
    for phase in (*spec.phases, *spec.side):
        if len(set(phase.pools)) != len(phase.pools):
            raise Impossible(f"phase {phase.name} names a pool twice ({', '.join(phase.pools)})")
        for pool in phase.pools:
            if pool not in wanted:
                raise Impossible(
                    f"phase {phase.name} uses pool {pool}, of which nothing is wanted ({', '.join(wanted)})"
                )
    for phase in spec.side:
        if phase.name != "init":
            raise Impossible(f"side phase {phase.name} is not to be had yet; only init is")
    if spec.on_loss is OnLoss.RELAUNCH or spec.movable is not Movable.NO:
        raise Impossible("on_loss=relaunch and movable are not to be had yet; on_loss is hold or kill, movable is no")
    for kept in spec.states:
        if kept.leftover_mb > kept.gpu_mb:
            raise Impossible(
                f"its {kept.pool} state leaves {kept.leftover_mb / 1000:g} GB on a GPU while parked, "
                f"and takes {kept.gpu_mb / 1000:g} GB there while loaded"
            )
        if kept.pool not in wanted:
            raise Impossible(f"a state is declared for pool {kept.pool}, of which nothing is wanted")
        if config.drivers and kept.driver not in config.drivers:
            known = ", ".join(sorted(config.drivers))
            raise Impossible(f"residency driver {kept.driver!r} is not installed (installed: {known})")
    if spec.slo is not None and not 1 <= spec.slo < float("inf"):
        raise Impossible(f"slo is {spec.slo:g}: nobody is faster shared than alone, so it is at least 1, and finite")
    _check_numbers(spec)
    _check_wants(spec, state)


def _check_numbers(spec: JobSpec) -> None:
    phases = [
        (f"{field} of phase {phase.name}", value, 0)
        for phase in (*spec.phases, *spec.side)
        for field, value in (("time", phase.planned_ms or 0), ("gap", phase.gap_ms), ("min_gpus", phase.min_gpus))
    ]
    wants = [
        (f"{field} wanted of pool {want.pool}", value, least)
        for want in spec.wants
        for field, value, least in (("nodes", want.nodes, 1), ("GPUs", want.gpus, 0))
    ]
    states = [
        (f"{field} of the {kept.pool} state", value, 0)
        for kept in spec.states
        for field, value in (
            ("GPU memory", kept.gpu_mb),
            ("left-over", kept.leftover_mb),
            ("RAM", kept.ram_mb),
            ("load time", kept.load_ms),
            ("park time", kept.park_ms),
        )
    ]
    for what, value, least in (*phases, *wants, *states, ("ranks", spec.ranks, 1)):
        if value < least:
            raise Impossible(f"{what}: {value}, and it is at least {least}")


def _check_wants(spec: JobSpec, state: State) -> None:
    for want in spec.wants:
        there = [node for node in state.nodes.values() if want.pool in node.pools]
        if not there:
            pools = sorted({pool for node in state.nodes.values() for pool in node.pools})
            raise Impossible(f"there is no pool {want.pool!r}; the pools are {', '.join(pools) or 'none'}")
        gpus = sum(len(node.gpus) for node in there)
        if want.gpus > gpus or want.nodes > len(there):
            needed = f"{want.gpus} GPUs" if want.gpus else f"{want.nodes} nodes"
            raise Impossible(f"pool {want.pool} has {len(there)} nodes with {gpus} GPUs, and {needed} are wanted")
        for name in want.named:
            if not spec.colocate and any(name in other.named for other in spec.wants if other is not want):
                raise Impossible(f"node {name} is named for two pools; that takes colocate")
            if name not in state.nodes or want.pool not in state.nodes[name].pools:
                raise Impossible(f"there is no node {name!r} in pool {want.pool}")
        ram = sum(kept.ram_mb for kept in spec.states if kept.pool == want.pool)
        most = max((state.hosts[node.host].ram_mb for node in there), default=0)
        if ram > most:
            raise Impossible(
                f"its {want.pool} state parks {ram / 1000:g} GB on a host, and the largest budget is {most / 1000:g} GB"
            )
        for kept in spec.states:
            if kept.pool == want.pool and all(node.gpu_mb and kept.gpu_mb > node.gpu_mb for node in there):
                largest = max(node.gpu_mb for node in there)
                needs, has = kept.gpu_mb / 1000, largest / 1000
                raise Impossible(f"its {want.pool} state needs {needs:g} GB of a GPU that has {has:g} GB")
    _check_together(spec, state)


def _check_together(spec: JobSpec, state: State) -> None:
    """Pools may share nodes: together they must have as many as are wanted, each node once unless colocated."""
    for want in spec.wants:
        if len(set(want.named)) != len(want.named):
            raise Impossible(f"a node is named twice for pool {want.pool} ({', '.join(want.named)})")
    if spec.colocate:
        pools = [want.pool for want in spec.wants]
        most = max(want.nodes for want in spec.wants)
        there = sum(all(pool in node.pools for pool in pools) for node in state.nodes.values())
        if there < most:
            raise Impossible(f"colocate: {there} nodes are in all of {', '.join(pools)}, and {most} are wanted")
        return
    for count in range(2, len(spec.wants) + 1):  # Hall's condition; a job wants of a few pools only
        for wants in combinations(spec.wants, count):
            pools = [want.pool for want in wants]
            needed = sum(want.nodes for want in wants)
            there = sum(any(pool in node.pools for pool in pools) for node in state.nodes.values())
            if there < needed:
                raise Impossible(
                    f"{' and '.join(pools)} need {needed} different nodes, and there are {there}; "
                    "with colocate one node serves several pools"
                )
