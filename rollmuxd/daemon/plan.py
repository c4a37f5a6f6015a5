"""What would become of jobs if they came: a scheduler of its own, on a copy of the state, is asked and thrown away.

It is the scheduler that will decide when they do come, with its own policy, so the plan is what would happen at this
moment. The copy is made of bytes: there is nothing by which the live state could be reached.

A plan also says how few nodes would do (*least*). The jobs are placed on ever fewer of the nodes, without any other
job. Scheduler, policy and order are the same.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.errors import Rejected
from rollmuxd.core.estimates import solo_ms
from rollmuxd.core.ids import JobId, Millis, PoolName
from rollmuxd.core.model import HostSpec, Job, JobStatus, NodeSpec, nodes_in
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import Caller
from rollmuxd.daemon.access.visibility import Visibility
from rollmuxd.daemon.least import Found, kinds, least
from rollmuxd.daemon.question import Copy
from rollmuxd.explain.causes import refusal
from rollmuxd.explain.forecast import iteration_ms
from rollmuxd.wire import answers as wire
from rollmuxd.wire.plan import LeastNodes, LeastView, PlannedJob, PlannedPool, PlanPool, PlanView, Slowed

#: waiting jobs for which the answer says what would let them in: each takes some hundredths of a second
WHAT_IFS_MOST = 10
#: processor time after which the search for the least inventory ends with its best result; the second, if it was asked
#: for. None is made if placing the jobs once takes a third of that
SEARCH_S: Final = 1.0
SEARCH_LONG_S: Final = 8.0
#: jobs for which the answer says why their promises do not hold
BROKEN_TOLD: Final = 5

#: jobs' names, and what each became
Came: TypeAlias = list[tuple[str, JobId | Rejected]]


@dataclass(frozen=True)
class PlanQuestion:
    """Everything that a plan is made of."""

    copy: Copy
    caller: Caller
    jobs: Sequence[JobSpec]
    #: those that registering would refuse before the scheduler sees them, by their places in ``jobs``
    refused: Mapping[int, Rejected]
    on: str
    pools: Mapping[str, PlanPool]
    #: whether to search the least inventory for long
    least: bool
    now: Millis

    def answer(self) -> PlanView:
        """The plan."""
        began = time.process_time()
        core = _core(self)
        before = _slowdowns(core)
        cost_before = _cost(core.state)
        used_before = {name: node.group is not None for name, node in core.state.nodes.items()}
        placed: dict[JobId, f.JobPlaced] = {}
        came = _come(core, self, placed)
        planned = {job for _, job in came if isinstance(job, str)}
        spent = time.process_time() - began
        after = _slowdowns(core)
        waiting = [job for _, job in came if isinstance(job, str) and core.state.jobs[job].status is JobStatus.WAITING]
        visibility = Visibility(core, self.caller)
        what_ifs = {job: visibility.explainer.what_ifs(job) for job in waiting[:WHAT_IFS_MOST]}
        jobs = [
            _refused(name, job)
            if isinstance(job, Rejected)
            else _planned(visibility, name, job, placed.get(job), visibility.reasons(what_ifs.get(job, ())), self)
            for name, job in came
        ]
        slowed = [
            Slowed(job, _name(core.state.jobs[job], self), core.state.jobs[job].spec.slo, before[job], slower)
            for job, slower in after.items()
            if job in before and before[job] != slower and job not in planned
        ]
        return PlanView(
            on="pools" if self.pools else self.on,
            policy=core.policy.name,
            jobs=jobs,
            slowed=slowed,
            pools=[PlannedPool(pool, *counts) for pool, counts in _pools(core.state, used_before).items()],
            cost_per_hour_before=cost_before,
            cost_per_hour_after=_cost(core.state),
            cost_alone_per_hour=round(sum(job.cost_alone_per_hour for job in jobs), 6),
            least=_least(self, spent),
        )


# ---- where it is played ----------------------------------------------------------------------------------------------


def _core(asked: PlanQuestion) -> Scheduler:
    """The scheduler that is asked."""
    if not asked.pools and asked.on == "live":
        return asked.copy.scheduler()
    return _empty(asked, *_inventory(asked))


def _inventory(asked: PlanQuestion) -> tuple[tuple[HostSpec, ...], tuple[NodeSpec, ...]]:
    """The nodes that there are, or those that are made up."""
    if asked.pools:
        return _made_up(asked.pools)
    live = asked.copy.decoded()
    hosts = tuple(HostSpec(host.id, host.backend, host.ram_mb) for host in live.hosts.values())
    nodes = tuple(
        NodeSpec(node.id, node.host, tuple(node.gpus), node.pools, node.gpu_type, node.gpu_mb, node.price_per_gpu_hour)
        for node in live.nodes.values()
    )
    return hosts, nodes


def _empty(asked: PlanQuestion, hosts: Sequence[HostSpec], nodes: Sequence[NodeSpec]) -> Scheduler:
    """A scheduler with these nodes, all clean, and no jobs."""
    core = Scheduler(asked.copy.config, asked.copy.fresh_policy(), State())
    core.handle(i.Start(tuple(hosts), tuple(nodes)), asked.now)
    for host in hosts:
        gpus = tuple(i.GpuObservation(gpu, 0) for node in nodes if node.host == host.id for gpu in node.gpus)
        core.handle(i.HostObserved(host.id, gpus), asked.now)
    return core


def _made_up(pools: Mapping[str, PlanPool]) -> tuple[tuple[HostSpec, ...], tuple[NodeSpec, ...]]:
    hosts, nodes = [], []
    for pool, like in pools.items():
        for number in range(1, like.nodes + 1):
            host = f"{pool}-{number}"
            hosts.append(HostSpec(host, "none", round(like.ram_gb * 1000)))
            nodes.append(
                NodeSpec(
                    f"{host}/gpu0-{like.gpus - 1}" if like.gpus > 1 else f"{host}/gpu0",
                    host,
                    tuple(f"{host}/gpu{gpu}" for gpu in range(like.gpus)),
                    (pool,),
                    like.gpu_type,
                    round(like.gpu_gb * 1000),
                    like.price_per_gpu_hour,
                )
            )
    return tuple(hosts), tuple(nodes)


def _come(core: Scheduler, asked: PlanQuestion, placed: dict[JobId, f.JobPlaced]) -> Came:
    """Let all jobs come, one after the other."""
    return [
        (spec.name, asked.refused.get(place) or _register(core, asked, spec, placed))
        for place, spec in enumerate(asked.jobs)
    ]


def _register(
    core: Scheduler, asked: PlanQuestion, spec: JobSpec, placed: dict[JobId, f.JobPlaced]
) -> JobId | Rejected:
    """Let one job come. A job of the same name that is there keeps running, and this is another."""
    name = spec.name
    while (known := core.state.job_named(asked.caller.owner, name)) is not None and known.live:
        name += "'"
    try:
        decision = core.handle(
            i.RegisterJob(asked.caller.owner, asked.caller.user, replace(spec, name=name)), asked.now
        )
    except Rejected as refused:
        return refused
    placed.update({fact.job: fact for fact in decision.facts if isinstance(fact, f.JobPlaced)})
    return core.state.names[f"{asked.caller.owner}/{name}"]


# ---- how few nodes would do ------------------------------------------------------------------------------------------


def _least(asked: PlanQuestion, spent: float) -> LeastView:
    """The least inventory on which every job is placed and every promise is kept.

    ``spent``: seconds of processor time that placing the jobs once took.
    """
    limit = SEARCH_LONG_S if asked.least else SEARCH_S
    if spent > limit / 3:
        longer = "" if spent > SEARCH_LONG_S / 3 or asked.least else ", or search longer (--least)"
        return LeastView(
            reason=f"they were not searched: placing these jobs once takes {spent:.1f} s of processor time. "
            f"Plan fewer jobs at a time{longer}"
        )
    unknown = [
        spec.name for spec in asked.jobs if spec.slo is not None and None in {phase.planned_ms for phase in spec.phases}
    ]
    if unknown:
        return LeastView(
            reason=f"jobs {_some(unknown)} state an slo, and not what their phases take: no promise can be judged. "
            "State the seconds of each phase"
        )
    hosts, nodes = _inventory(asked)
    end = time.process_time() + limit

    def does(some: Sequence[NodeSpec]) -> bool:
        kept = not _broken(asked, _played(asked, hosts, some))
        gc.collect()  # a try leaves cycles, and the process has collection off and its memory limited
        return kept

    found = least(nodes, does, lambda: time.process_time() < end)
    if found is None:
        pools = {pool for node in nodes for pool in node.pools}
        advice = "Plan with more nodes (tables [pools.NAME] in the file), or with looser values of slo"
        if any(want.pool not in pools for spec in asked.jobs for want in spec.wants):
            advice = "Name pools that there are, or plan with more of them (tables [pools.NAME] in the file)"
        there = " and ".join(f"{len(of)} {'+'.join(kind.pools)}" for kind, of in kinds(nodes).items()) or "no"
        return LeastView(
            reason=f"the promises do not hold on all of the {there} nodes: "
            f"{'; '.join(_broken(asked, _played(asked, hosts, nodes))[:BROKEN_TOLD])}. {advice}"
        )
    return _least_view(asked, found, hosts, nodes)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:BROKEN_TOLD]) + (" and others" if len(names) > BROKEN_TOLD else "")


def _played(asked: PlanQuestion, hosts: Sequence[HostSpec], nodes: Sequence[NodeSpec]) -> tuple[Scheduler, Came]:
    """All jobs come, one after the other, to these nodes, where no others are."""
    there = {node.host for node in nodes}
    core = _empty(asked, [host for host in hosts if host.id in there], nodes)
    return core, _come(core, asked, {})


def _broken(asked: PlanQuestion, played: tuple[Scheduler, Came]) -> list[str]:
    """What each job suffers that is not placed, or whose promise the plan does not keep."""
    core, came = played
    slowdowns, broken = _slowdowns(core), []
    for name, job in came:
        if isinstance(job, Rejected):
            broken.append(f"{name} would be refused ({job})")
            continue
        there = core.state.jobs[job]
        if there.group is None:
            broken.append(f"{name} would wait")
        elif there.spec.slo is not None and not (there.promised and (slowdowns[job] or 1.0) <= there.spec.slo):
            took = slowdowns[job]
            runs = "have no promise" if took is None else f"run {took:g} times slower than alone"
            broken.append(f"{name} would {runs}, and its slo is {there.spec.slo:g}")
    return broken


def _least_view(asked: PlanQuestion, found: Found, hosts: Sequence[HostSpec], nodes: Sequence[NodeSpec]) -> LeastView:
    of = kinds(nodes)
    core, came = _played(asked, hosts, [node for kind, count in found.nodes.items() for node in of[kind][:count]])
    slowdowns = _slowdowns(core)
    return LeastView(
        nodes=[
            LeastNodes(list(kind.pools), kind.gpu_type, kind.gpus, count, len(of[kind]), kind.price_per_gpu_hour)
            for kind, count in found.nodes.items()
        ],
        gpus=sum(kind.gpus * count for kind, count in found.nodes.items()),
        cost_per_hour=round(sum(kind.price * count for kind, count in found.nodes.items()), 6),
        cost_alone_per_hour=round(
            sum(
                _price(core.state, node)
                for _, job in came
                if isinstance(job, str)
                for node in nodes_in(core.state.jobs[job].pins)
            ),
            6,
        ),
        slowdowns={name: slowdowns.get(job) for name, job in came if isinstance(job, str)},
        complete=found.complete,
    )


# ---- what came of it -------------------------------------------------------------------------------------------------


def _refused(name: str, why: Rejected) -> PlannedJob:
    return PlannedJob(name=name, status="refused", reasons=[wire.Reason(type(why).__name__.lower(), refusal(why))])


def _planned(
    visibility: Visibility,
    name: str,
    id: JobId,
    placed: f.JobPlaced | None,
    what_ifs: list[wire.Reason],
    asked: PlanQuestion,
) -> PlannedJob:
    core, state = visibility.core, visibility.core.state
    job = state.jobs[id]
    solo = solo_ms(job)
    took = _iteration_ms(core, job)
    waits = job.status is JobStatus.WAITING
    group = state.groups.get(job.group or "")
    beside = [] if group is None else [state.jobs[other] for other in group.jobs if other != id]
    return PlannedJob(
        name=name,
        status=str(job.status),
        reasons=visibility.reasons(visibility.explainer.why_job_waits(id, asked.now).reasons) if waits else [],
        wishes=what_ifs,
        beside=[_name(other, asked) or None for other in beside],
        pins={pool: list(names) for pool, names in job.pins.items()},
        admission=job.admission,
        slo=job.spec.slo,
        promised=job.promised,
        solo_s=None if solo is None else solo / 1000,
        iteration_s=None if took is None else took / 1000,
        slowdown=_ratio(took, solo),
        cost_per_hour=0.0 if placed is None else round(placed.cost_per_hour, 6),
        cost_alone_per_hour=round(sum(_price(state, node) for node in nodes_in(job.pins)), 6),
    )


def _name(job: Job, asked: PlanQuestion) -> str:
    return job.spec.name if asked.caller.may_read(job) else ""


def _iteration_ms(core: Scheduler, job: Job) -> Millis | None:
    """What its group's plan gives it: a rotation, by how often it goes round in it."""
    period = core.policy.period_ms(core.state, job.group) if job.group is not None else None
    if period is None or job.group is None:
        return None
    return iteration_ms(period, core.state.groups[job.group], job)


def _slowdowns(core: Scheduler) -> dict[JobId, float | None]:
    """The planned slowdown of every placed job."""
    placed = [job for job in core.state.jobs.values() if job.group is not None]
    return {job.id: _ratio(_iteration_ms(core, job), solo_ms(job)) for job in placed}


def _ratio(took: Millis | None, solo: Millis | None) -> float | None:
    return None if took is None or not solo else round(took / solo, 4)


def _price(state: State, node: str) -> float:
    return state.nodes[node].price_per_gpu_hour * len(state.nodes[node].gpus)


def _cost(state: State) -> float:
    return round(sum(_price(state, name) for name, node in state.nodes.items() if node.group is not None), 6)


def _pools(state: State, used_before: Mapping[str, bool]) -> dict[PoolName, tuple[int, int, int]]:
    """Of each pool its nodes, those in groups before, and after."""
    found: dict[PoolName, list[str]] = {}
    for name, node in state.nodes.items():
        for pool in node.pools:
            found.setdefault(pool, []).append(name)
    return {
        pool: (
            len(names),
            sum(used_before[name] for name in names),
            sum(state.nodes[name].group is not None for name in names),
        )
        for pool, names in sorted(found.items())
    }
