"""What would become of jobs if they came: a scheduler of its own, on a copy of the state, is asked and thrown away.

It is the scheduler that will decide when they do come, with its own policy, so the plan is what would happen at this
moment. The copy is made of bytes: there is nothing by which the live state could be reached.

A plan also says how few nodes would do (*least*). The jobs are placed on ever fewer of the nodes, without any other
job. Scheduler, policy and order are the same.
"""

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.errors import Rejected
from rollmuxd.core.estimates import solo_ms
from rollmuxd.core.ids import JobId, Millis, NodeId
from rollmuxd.core.model import HostSpec, Job, JobStatus, NodeSpec, nodes_in
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import Caller
from rollmuxd.daemon.access.visibility import Visibility
from rollmuxd.daemon.least import kinds, least
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
        live = not self.pools and self.on == "live"
        play = Play(self, self.copy.scheduler() if live else _empty(self, *_inventory(self)))
        spent = time.process_time() - began
        jobs, state = play.view(), play.core.state
        return PlanView(
            on="pools" if self.pools else self.on,
            policy=play.core.policy.name,
            jobs=jobs,
            slowed=play.slowed(),
            pools=play.pools(),
            cost_per_hour_before=_cost(state, play.used_before),
            cost_per_hour_after=_cost(state, _used(state)),
            cost_alone_per_hour=round(sum(job.cost_alone_per_hour for job in jobs), 6),
            least=_least(self, spent),
        )


# ---- where it is played ----------------------------------------------------------------------------------------------


def _inventory(asked: PlanQuestion) -> tuple[Sequence[HostSpec], Sequence[NodeSpec]]:
    """The nodes that there are, or those that are made up."""
    if asked.pools:
        return _made_up(asked.pools)
    live = asked.copy.decoded()
    hosts = [HostSpec(host.id, host.backend, host.ram_mb) for host in live.hosts.values()]
    nodes = [
        NodeSpec(node.id, node.host, tuple(node.gpus), node.pools, node.gpu_type, node.gpu_mb, node.price_per_gpu_hour)
        for node in live.nodes.values()
    ]
    return hosts, nodes


def _made_up(pools: Mapping[str, PlanPool]) -> tuple[Sequence[HostSpec], Sequence[NodeSpec]]:
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
    return hosts, nodes


def _empty(asked: PlanQuestion, hosts: Sequence[HostSpec], nodes: Sequence[NodeSpec]) -> Scheduler:
    """A scheduler with these nodes, all clean, the hosts that have some of them, and no jobs."""
    there = {node.host for node in nodes}
    core = Scheduler(asked.copy.config, asked.copy.fresh_policy(), State())
    core.handle(i.Start(tuple(host for host in hosts if host.id in there), tuple(nodes)), asked.now)
    for host in core.state.hosts:
        gpus = tuple(i.GpuObservation(gpu, 0) for node in nodes if node.host == host for gpu in node.gpus)
        core.handle(i.HostObserved(host, gpus), asked.now)
    return core


class Play:
    """All jobs come, one after the other, to a scheduler of their own; and what came of it."""

    def __init__(self, asked: PlanQuestion, core: Scheduler) -> None:
        self.asked, self.core, self._visibility = asked, core, Visibility(core, asked.caller)
        self.used_before, self._before = _used(core.state), self.slowdowns()
        #: of each job that was placed at once: what the nodes cost an hour that no job used before
        self._more: dict[JobId, float] = {}
        #: jobs' names, and what each became
        self.came = [
            (spec.name, asked.refused.get(place) or self._register(spec)) for place, spec in enumerate(asked.jobs)
        ]

    def _register(self, spec: JobSpec) -> JobId | Rejected:
        """Let one job come. A job of the same name that is there keeps running, and this is another."""
        caller, name = self.asked.caller, spec.name
        while (known := self.core.state.job_named(caller.owner, name)) is not None and known.live:
            name += "'"
        try:
            given = i.RegisterJob(caller.owner, caller.user, replace(spec, name=name))
            decision = self.core.handle(given, self.asked.now)
        except Rejected as refused:
            return refused
        self._more |= {fact.job: fact.cost_per_hour for fact in decision.facts if isinstance(fact, f.JobPlaced)}
        return self.core.state.names[f"{caller.owner}/{name}"]

    def registered(self) -> list[tuple[str, Job]]:
        """The jobs that were not refused, and the names under which they were asked about."""
        return [(name, self.core.state.jobs[job]) for name, job in self.came if isinstance(job, str)]

    def slowdowns(self) -> dict[JobId, float | None]:
        """The planned slowdown of every placed job."""
        placed = [job for job in self.core.state.jobs.values() if job.group is not None]
        return {job.id: _ratio(self._iteration_ms(job), solo_ms(job)) for job in placed}

    def broken(self) -> list[str]:
        """What each job suffers that is not placed, or whose promise the plan does not keep."""
        slowdowns, broken = self.slowdowns(), []
        for name, id_ in self.came:
            if isinstance(id_, Rejected):
                broken.append(f"{name} would be refused ({id_})")
                continue
            job, took = self.core.state.jobs[id_], slowdowns.get(id_)
            slo = job.spec.slo
            if job.group is None:
                broken.append(f"{name} would wait")
            elif slo is not None and not (job.promised and (took or 1.0) <= slo):
                runs = "have no promise" if took is None else f"run {took:g} times slower than alone"
                broken.append(f"{name} would {runs}, and its slo is {slo:g}")
        return broken

    def view(self) -> list[PlannedJob]:
        """What each job became; of the first that wait, also what would let them in."""
        visibility = self._visibility
        waiting = [job.id for _, job in self.registered() if job.status is JobStatus.WAITING]
        what_ifs = {job: visibility.reasons(visibility.explainer.what_ifs(job)) for job in waiting[:WHAT_IFS_MOST]}
        return [
            PlannedJob(name, "refused", [wire.Reason(type(job).__name__.lower(), refusal(job))])
            if isinstance(job, Rejected)
            else self._planned(name, self.core.state.jobs[job], what_ifs.get(job, []))
            for name, job in self.came
        ]

    def _planned(self, name: str, job: Job, what_ifs: list[wire.Reason]) -> PlannedJob:
        state, visibility, solo, took = self.core.state, self._visibility, solo_ms(job), self._iteration_ms(job)
        waits = job.status is JobStatus.WAITING
        group = state.groups.get(job.group or "")
        beside = [] if group is None else [other for other in group.jobs if other != job.id]
        now = self.asked.now
        return PlannedJob(
            name=name,
            status=str(job.status),
            reasons=visibility.reasons(visibility.explainer.why_job_waits(job.id, now).reasons) if waits else [],
            wishes=what_ifs,
            beside=[visibility.name_of(other) or None for other in beside],
            pins={pool: list(names) for pool, names in job.pins.items()},
            admission=job.admission,
            slo=job.spec.slo,
            promised=job.promised,
            solo_s=None if solo is None else solo / 1000,
            iteration_s=None if took is None else took / 1000,
            slowdown=_ratio(took, solo),
            cost_per_hour=round(self._more.get(job.id, 0.0), 6),
            cost_alone_per_hour=_cost(state, nodes_in(job.pins)),
        )

    def slowed(self) -> list[Slowed]:
        """The jobs that were there already and will take longer, or less long."""
        jobs, after = self.core.state.jobs, self.slowdowns()
        return [
            Slowed(job, self._visibility.name_of(job), jobs[job].spec.slo, before, after[job])
            for job, before in self._before.items()
            if job in after and before != after[job]
        ]

    def pools(self) -> list[PlannedPool]:
        """Of each pool its nodes, those in groups before, and after."""
        nodes, after = self.core.state.nodes.values(), _used(self.core.state)
        there = {pool: {node.id for node in nodes if pool in node.pools} for node in nodes for pool in node.pools}
        return [
            PlannedPool(pool, len(names), len(names & self.used_before), len(names & after))
            for pool, names in sorted(there.items())
        ]

    def _iteration_ms(self, job: Job) -> Millis | None:
        """What its group's plan gives it: a rotation, by how often it goes round in it."""
        state = self.core.state
        period = self.core.policy.period_ms(state, job.group) if job.group is not None else None
        return None if period is None else iteration_ms(period, state.groups[job.group or ""], job)


def _used(state: State) -> set[NodeId]:
    """The nodes that are in groups."""
    return {name for name, node in state.nodes.items() if node.group is not None}


def _cost(state: State, nodes: Iterable[NodeId]) -> float:
    """What these nodes cost an hour."""
    return round(sum(state.nodes[name].price_per_gpu_hour * len(state.nodes[name].gpus) for name in nodes), 6)


def _ratio(took: Millis | None, solo: Millis | None) -> float | None:
    return None if took is None or not solo else round(took / solo, 4)


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
        some = ", ".join(unknown[:BROKEN_TOLD]) + (" and others" if len(unknown) > BROKEN_TOLD else "")
        return LeastView(
            reason=f"jobs {some} state an slo, and not what their phases take: no promise can be judged. "
            "State the seconds of each phase"
        )
    hosts, nodes = _inventory(asked)
    end = time.process_time() + limit

    def played(some: Sequence[NodeSpec]) -> Play:
        gc.collect()  # a try leaves cycles, and the process has collection off and its memory limited
        return Play(asked, _empty(asked, hosts, some))

    found = least(nodes, lambda some: not played(some).broken(), lambda: time.process_time() < end)
    if found is None:
        pools = {pool for node in nodes for pool in node.pools}
        advice = "Plan with more nodes (tables [pools.NAME] in the file), or with looser values of slo"
        if any(want.pool not in pools for spec in asked.jobs for want in spec.wants):
            advice = "Name pools that there are, or plan with more of them (tables [pools.NAME] in the file)"
        there = " and ".join(f"{len(of)} {'+'.join(kind.pools)}" for kind, of in kinds(nodes).items()) or "no"
        return LeastView(
            reason=f"the promises do not hold on all of the {there} nodes: "
            f"{'; '.join(played(nodes).broken()[:BROKEN_TOLD])}. {advice}"
        )
    of = kinds(nodes)
    play = played([node for kind, count in found.nodes.items() for node in of[kind][:count]])
    slowdowns = play.slowdowns()
    return LeastView(
        nodes=[
            LeastNodes(list(kind.pools), kind.gpu_type, kind.gpus, count, len(of[kind]), kind.price_per_gpu_hour)
            for kind, count in found.nodes.items()
        ],
        gpus=sum(kind.gpus * count for kind, count in found.nodes.items()),
        cost_per_hour=round(sum(kind.price * count for kind, count in found.nodes.items()), 6),
        cost_alone_per_hour=round(sum(_cost(play.core.state, nodes_in(job.pins)) for _, job in play.registered()), 6),
        slowdowns={name: slowdowns.get(job.id) for name, job in play.registered()},
        complete=found.complete,
    )
