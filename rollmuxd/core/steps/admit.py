"""Admission: what a registration must be, and which waiting jobs fit now."""

from bisect import insort
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Final, TypeAlias

from msgspec.structs import asdict, replace

from rollmuxd.core import facts as f
from rollmuxd.core import shares
from rollmuxd.core.config import Config, OwnerLimits
from rollmuxd.core.context import Context
from rollmuxd.core.errors import Impossible, TooMany
from rollmuxd.core.ids import JobId, Millis
from rollmuxd.core.model import Job, NodeStatus
from rollmuxd.core.policy import Placed
from rollmuxd.core.shares import use_of
from rollmuxd.core.spec import CHANNEL, FILLER, PACE, JobSpec, Movable, OnLoss
from rollmuxd.core.state import State
from rollmuxd.core.steps.dispatch import go_to_turn
from rollmuxd.core.steps.launch import launch
from rollmuxd.core.timers import AdmissionPass

#: what one input may spend on trying waiting jobs; the rest is tried at the next tick, which is due at once
SPENT_AT_ONCE: Final = 600
#: waiting jobs are tried again after this time, although nothing has made room that they are known to wait for
AGAIN_MS: Final = 60_000
#: where more than this differ they are tried less often: a try takes some milliseconds, so these take 1 % of a core
TRIES_A_MINUTE: Final = 100
#: so many nodes of a pool are named to a job that names one that is not there
NODES_TOLD: Final = 8
#: what it takes to try a placement, and to look at a job and see that its like was refused
TRY, LOOK = 100, 1

#: of two jobs that wait, the one with the lower rank is next
Rank: TypeAlias = tuple[int, int, int, Millis]


def waiting_order(c: Context, now: Millis) -> list[JobId]:
    """Waiting jobs, the next first: those that have waited too long; then by priority raised with age.

    Of equals that one's job which has used least for its share, then the one that has waited longest.
    """
    return sorted(c.state.waiting, key=rank_at(c, now))


def rank_at(c: Context, now: Millis) -> Callable[[JobId], Rank]:
    """What the waiting order is by."""
    jobs, aging, longest = c.state.jobs, c.config.aging_ms, c.config.bounded_wait_ms
    used: dict[str, int] = {}

    def rank(name: JobId) -> Rank:
        job = jobs[name]
        waited = now - job.registered_at
        if waited >= longest:
            return 0, 0, 0, job.registered_at
        if job.owner not in used:
            use = use_of(c.state.owners.get(job.owner), now)
            used[job.owner] = use // limits_of(c, job.owner).share
        return 1, -(job.spec.priority + waited // aging), used[job.owner], job.registered_at

    return rank


def limits_of(c: Context, owner: str) -> OwnerLimits:
    return c.config.owners.get(owner, c.config.others)


def admit(c: Context) -> None:
    """Place every waiting job that fits. One that has waited too long is not overtaken on the pools it wants.

    Without new room only newcomers are tried: the others were, and still do not fit. Measured times and earned credit
    make room that nothing marks. For that, all are tried again now and then.
    """
    dirty, round_ = c.dirty, c.timers.round
    newcomers, room, again, under_way = dirty.newcomers, dirty.room, dirty.again, bool(round_.names)
    dirty.newcomers, dirty.room, dirty.again = {}, False, False
    if room and under_way:
        round_.grew = True
    elif room or (again and not under_way):
        c.timers.round = AdmissionPass(waiting_order(c, c.now))
    elif newcomers:  # each takes its place among the jobs that are still to be tried
        round_.names = [name for name in round_.names if name in c.state.waiting]
        for newcomer in newcomers:
            insort(round_.names, newcomer, key=rank_at(c, c.now))
    if room or again or (newcomers and not under_way):  # else each is tried in its turn, at the next tick
        _continue_pass(c)


def _continue_pass(c: Context) -> None:
    """Try the jobs that were not tried yet in this pass, as many as one input may."""
    while (round_ := c.timers.round).names and c.spent < SPENT_AT_ONCE:
        _try_next(c, round_)
        if not round_.names and round_.grew:
            c.timers.round = AdmissionPass(waiting_order(c, c.now))
    if round_.names:
        c.timers.at(c.now, "admit", "")
    elif c.state.waiting:
        c.timers.at(c.now + AGAIN_MS * (1 + len(round_.refused) // TRIES_A_MINUTE), "admit", "")


def _try_next(c: Context, round_: AdmissionPass) -> None:
    name = round_.names.pop(0)
    c.spent += LOOK
    if name not in c.state.waiting:
        return
    job = c.state.jobs[name]
    if job.pins or job.left:  # of its run before
        return
    pools = {want.pool for want in job.spec.wants}
    if not round_.kept.isdisjoint(pools):
        return
    shape, slo = _shape_of(c, job), job.spec.slo or float("inf")
    if round_.refused.get(shape, 0.0) < slo:
        c.spent += TRY
        placed = c.policy.place(c.state, job)
        if placed is not None and over_its_nodes(c, job, placed):
            return
        if placed is not None:
            _place(c, job, placed)
            round_.grew = round_.grew or placed.admission != "packing"
            return
        round_.refused[shape] = slo
    if c.now - job.registered_at >= c.config.bounded_wait_ms:
        c.spent += TRY
        if _others_are_in_the_way(c, job):
            round_.kept |= pools


def over_its_nodes(c: Context, job: Job, placed: Placed) -> str:
    """Why the job's owner may not have that placement; empty: it may."""
    most = limits_of(c, job.owner).max_nodes
    return shares.over_its_nodes(job.owner, c.state.owners.get(job.owner), placed.pins, most)


def _others_are_in_the_way(c: Context, job: Job) -> bool:
    """Whether the nodes it wants are there, so that keeping them from newcomers lets it in one day.

    A job may wait for a node that is lost or drained, or for its owner to give some back. It would otherwise keep every
    other job out for as long.
    """
    most, owner = limits_of(c, job.owner).max_nodes, c.state.owners.get(job.owner)
    if most and owner is not None and len(owner.nodes) + _wanted(job.spec) > most:
        return False
    up = [node for node in c.state.nodes.values() if node.status is NodeStatus.UP]
    return all(
        sum(want.pool in node.pools and (not want.named or node.id in want.named) for node in up)
        >= max(want.nodes, len(want.named))
        for want in job.spec.wants
    )


def _place(c: Context, job: Job, placed: Placed) -> None:
    placed = replace(placed, group=placed.group or c.state.next_id("g"))
    c.fact(f.JobPlaced(c.now, job.id, **asdict(placed)))
    launch(c, job)
    go_to_turn(c, job)


def _shape_of(c: Context, job: Job) -> object:
    """What placement looks at of a job, for not trying the like again in one round."""
    spec = job.spec
    asks = (spec.wants, spec.phases, spec.asynchronous, spec.states, spec.park, spec.colocate)
    times = tuple((name, kept.count and kept.total_ms // kept.count) for name, kept in job.times.items())
    limited = job.owner if limits_of(c, job.owner).max_nodes else ""
    before = tuple(job.last_pins.items())
    return (limited, *asks, times, before)


def _wanted(spec: JobSpec) -> int:
    """The nodes that a job wants, at least."""
    counts = [max(want.nodes, len(want.named)) for want in spec.wants]
    return max(counts) if spec.colocate else sum(counts)


def check_owner(c: Context, owner: str, spec: JobSpec, known: Job | None) -> None:
    """What an owner may not have, is refused at once: told how much it has, and how much it may have."""
    limits = limits_of(c, owner)
    if limits.max_priority is not None and spec.priority > limits.max_priority:
        raise Impossible(
            f"priority {spec.priority}: jobs of owner {owner} have {limits.max_priority} at most "
            f"(owners.{owner}.max_priority); register it with that"
        )
    wanted = _wanted(spec)
    if limits.max_nodes and wanted > limits.max_nodes:
        raise Impossible(
            f"{wanted} nodes are wanted, and owner {owner} has {limits.max_nodes} at most (owners.{owner}.max_nodes)"
        )
    if limits.max_jobs:
        theirs = [job for job in c.state.jobs.values() if job.owner == owner]
        live = sum(job.live for job in theirs if job is not known)
        if live >= limits.max_jobs:
            raise TooMany(
                f"owner {owner} has {live} live jobs, and its limit is {limits.max_jobs} (owners.{owner}.max_jobs); "
                "end one, or have the limit raised"
            )


def check_spec(spec: JobSpec, state: State, config: Config) -> None:
    """What could never be met is refused at once, and says what is short.

    A body of :mod:`rollmuxd.wire` has each number in its range before, and names nothing twice in a list.
    """
    wanted = [want.pool for want in spec.wants]
    names = [phase.name for phase in (*spec.phases, *spec.side)]
    if len(set(names)) != len(names):
        raise Impossible("a job names each of its phases once")
    used = {pool for phase in (*spec.phases, *spec.side) for pool in phase.pools}
    for want in spec.wants:
        if want.pool not in used:
            raise Impossible(f"nodes of pool {want.pool} are wanted, and no phase uses them")
    for phase in (*spec.phases, *spec.side):
        for pool in phase.pools:
            if pool not in wanted:
                raise Impossible(
                    f"phase {phase.name} uses pool {pool}, of which nothing is wanted ({', '.join(wanted)})"
                )
    _check_side(spec)
    _check_asynchronous(spec)
    _check_filler(spec)
    for key, value, instead in (
        ("movable", spec.movable, "warm, where the process can load its state on other GPUs, or no"),
        ("on_loss", spec.on_loss, "hold or kill"),
    ):
        if value == "relaunch" and spec.launch is None:
            raise Impossible(
                f"{key}=relaunch is for jobs whose process rollmuxd itself starts, and this one does not say what to "
                f"start (launch); say {key} {instead}"
            )
    _check_launch(spec, state, config)
    for kept in spec.states:
        if kept.gpu_mb and kept.residual_mb > kept.gpu_mb:  # (of one whose size is not known, all may be left)
            raise Impossible(
                f"its {kept.pool} state leaves {kept.residual_mb / 1000:g} GB on a GPU while parked, "
                f"and takes {kept.gpu_mb / 1000:g} GB there while loaded"
            )
        if kept.pool not in wanted:
            raise Impossible(f"a state is declared for pool {kept.pool}, of which nothing is wanted")
        if config.drivers and kept.driver not in config.drivers:
            known = ", ".join(sorted(config.drivers))
            raise Impossible(f"residency driver {kept.driver!r} is not installed (installed: {known})")
    _check_wants(spec, state)


def _check_asynchronous(spec: JobSpec) -> None:
    """An asynchronous job has one phase, on all GPUs that it wants; the time of its rollouts is its pace."""
    if spec.asynchronous is None:
        return
    phase = spec.phases[0]
    if len(spec.phases) > 1:
        raise Impossible(
            f"asynchronous: the job has {len(spec.phases)} phases, and an asynchronous job has the one phase train; "
            "its rollouts are its own: leave their pool and phase out"
        )
    if phase.gap_ms or phase.min_gpus:
        stray = "gap_s" if phase.gap_ms else "min_gpus"
        raise Impossible(
            f"asynchronous: phase {phase.name} says {stray}; leave it out, and say the time of a batch as pace_s"
        )
    if any(phase.name == PACE for phase in (phase, *spec.side)):
        raise Impossible(f"asynchronous: no phase may be named {PACE}, as the time of a batch is; rename it")


def _check_filler(spec: JobSpec) -> None:
    """A filler has one node and no promise, and its GPUs can be had back without its help."""
    if spec.filler is None:
        return
    stray = {
        "slo": spec.slo is not None,
        "asynchronous": spec.asynchronous is not None,
        "phases of its own": [phase.name for phase in (*spec.phases, *spec.side)] != [FILLER],
        "movable": spec.movable is not Movable.NO,
        "more than one node": len(spec.wants) > 1 or spec.wants[0].nodes > 1,
    }
    if any(stray.values()):
        said = " and ".join(name for name, there in stray.items() if there)
        raise Impossible(f"a filler has no promise and works on one node, and this one says {said}: leave that out")
    if not moves_without_its_process(spec) and spec.launch is None and spec.on_loss is not OnLoss.KILL:
        raise Impossible(
            "a filler that rollmuxd cannot stop may hold up other jobs: have its state moved by a driver (driver), "
            "have its process started by rollmuxd (launch), or let it be ended (on_loss kill)"
        )


def moves_without_its_process(spec: JobSpec) -> bool:
    """Whether a driver can park what the job has loaded while its process does not answer."""
    return bool(spec.states) and all(kept.driver != CHANNEL for kept in spec.states)


def _check_side(spec: JobSpec) -> None:
    """A side phase is planned as load by how often and how long. Where the job states neither, it stands by no
    promise.
    """
    for phase in (*spec.phases, spec.phase("init")):
        if phase.every:
            raise Impossible(f"phase {phase.name}: every is for side phases that come again, such as eval and save")
    for phase in spec.side:
        if phase.every and phase.planned_ms is None:
            raise Impossible(
                f"side phase {phase.name} comes once in {phase.every} iterations: say, too, how long it takes at worst "
                "(seconds), or neither"
            )
        if phase.name != "init" and not phase.every and spec.slo is not None:
            raise Impossible(
                f"side phase {phase.name}: nothing says how often it comes and how long it takes at worst (every, "
                "seconds), so no job beside it can get a promise; say both, or register without slo"
            )


def _check_launch(spec: JobSpec, state: State, config: Config) -> None:
    """Only what a backend has started can be started again, and every node that it may get must have such a backend."""
    if spec.launch is None:
        return
    if not any(spec.launch.argv[:1]):
        raise Impossible("launch: argv is empty; its first part is the program")
    pools = {want.pool for want in spec.wants}
    for node in state.nodes.values():
        if node.host not in config.launch_hosts and pools.intersection(node.pools):
            able = ", ".join(config.launch_hosts) or "none"
            raise Impossible(
                f"launch: node {node.id} may be its place, and on host {node.host} no processes are started "
                f"(hosts where they are: {able}); start the process yourself, with on_loss hold or kill"
            )


def _check_wants(spec: JobSpec, state: State) -> None:
    for want in spec.wants:
        there = [node for node in state.nodes.values() if want.pool in node.pools]
        if not there:
            pools = sorted({pool for node in state.nodes.values() for pool in node.pools})
            there_are = f"the pools are {', '.join(pools)}" if pools else "the daemon has no hosts: `rollmuxd init`"
            raise Impossible(f"there is no pool {want.pool!r}; {there_are}")
        if want.nodes > len(there) or (want.gpus and want.gpus > sum(len(node.gpus) for node in there)):
            gpus = sum(len(node.gpus) for node in there)
            needed = f"{want.gpus} GPUs" if want.gpus else f"{want.nodes} nodes"
            nodes = "1 node" if len(there) == 1 else f"{len(there)} nodes"
            raise Impossible(
                f"pool {want.pool} has {nodes} with {gpus} GPUs, and {needed} are wanted; ask for no more than it has"
            )
        for name in want.named:
            if not spec.colocate and any(name in other.named for other in spec.wants if other is not want):
                raise Impossible(f"node {name} is named for two pools; that takes colocate")
            if name not in state.nodes or want.pool not in state.nodes[name].pools:
                known = ", ".join(str(node.id) for node in there[:NODES_TOLD]) + ", ..." * (len(there) > NODES_TOLD)
                raise Impossible(f"there is no node {name!r} in pool {want.pool}; its nodes are {known}")
        ram = spec.ram_mb_of(want.pool)
        if all(state.hosts[node.host].ram_mb < ram for node in there):
            most = max(state.hosts[node.host].ram_mb for node in there)
            raise Impossible(
                f"its {want.pool} state parks {ram / 1000:g} GB on a host, and the largest budget is {most / 1000:g} "
                "GB; lower the state's ram_gb, or raise a host's"
            )
        for kept in spec.states:
            if kept.pool == want.pool and all(node.gpu_mb and kept.gpu_mb > node.gpu_mb for node in there):
                needs, has = kept.gpu_mb / 1000, max(node.gpu_mb for node in there) / 1000
                raise Impossible(
                    f"its {want.pool} state needs {needs:g} GB of a GPU that has {has:g} GB; lower its gpu_gb"
                )
    _check_together(spec, state)
    _check_ram_together(spec, state)


def _check_ram_together(spec: JobSpec, state: State) -> None:
    """States of several pools may be parked on one host, and each is small enough for it."""
    hosts = {node.host for want in spec.wants for node in state.nodes.values() if want.pool in node.pools}
    budgets = [state.hosts[host].ram_mb for host in hosts]
    parked = sum(want.nodes * spec.ram_mb_of(want.pool) for want in spec.wants)
    if all(budgets) and parked > sum(budgets):  # of a host that was not observed yet, none is known
        raise Impossible(
            f"its parked states take {parked / 1000:g} GB, and the hosts of its pools have {sum(budgets) / 1000:g} GB "
            "for those in all; lower the states' ram_gb, or raise a host's"
        )


def _check_together(spec: JobSpec, state: State) -> None:
    """Pools may share nodes: together they must have as many as are wanted, each node once unless colocated."""
    nodes = Counter([node.pools for node in state.nodes.values()])
    if spec.colocate:
        pools = [want.pool for want in spec.wants]
        most = max(want.nodes for want in spec.wants)
        there = sum(count for serves, count in nodes.items() if all(pool in serves for pool in pools))
        if there < most:
            raise Impossible(f"colocate: {there} nodes are in all of {', '.join(pools)}, and {most} are wanted")
        return
    for count in range(2, len(spec.wants) + 1):  # Hall's condition; a job wants of a few pools only
        for wants in combinations(spec.wants, count):
            pools = [want.pool for want in wants]
            needed = sum(want.nodes for want in wants)
            there = sum(number for serves, number in nodes.items() if any(pool in serves for pool in pools))
            if there < needed:
                raise Impossible(
                    f"{' and '.join(pools)} need {needed} different nodes, and there are {there}; "
                    "with colocate one node serves several pools"
                )
