"""Random histories: small worlds in which much goes wrong at once, to find what nobody thought of.

A :class:`History` is everything that happens from outside: the jobs, the nodes, the policy, the faults, and what
operators do. It is drawn from a seed, runs in some tens of milliseconds, and is checked like every run. One that fails
is made smaller (:func:`shrink`) as long as the same promise is broken, and can be kept as JSON (a regression).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from random import Random
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.core import inputs as i
from rollmuxd.core.errors import BrokenInvariant, Rejected
from rollmuxd.core.facts import Fact
from rollmuxd.core.ids import Millis, NodeId
from rollmuxd.core.model import JobStatus, SlotStatus
from rollmuxd.core.spec import JobSpec, LaunchSpec, Movable, OnLoss, Park, PhaseSpec, StateSpec, Want
from rollmuxd.policies.observe import Watch
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.policies.thrift.policy import Thrift
from rollmuxd.sim.outcome import WORK
from rollmuxd.sim.policies import AS_OBSERVED, PolicyUnderTest, moving, policy_under_test
from rollmuxd.sim.workload import Pool, SimJob, Workload
from simkit.chaos_policy import UNPRUNED, chaos_policy
from simkit.checked import check
from simkit.faults import Faults
from simkit.faulty_world import DaemonDied, FaultyWorld

POLICIES: Final = ("rollmux", "rollmux-unpruned", "rollmux-artifact", "random", "most-idle")
#: moves jobs about; the share of histories that it has
RESTLESS: Final = "restless"
MOVED: Final = 0.3
#: those whose jobs go by credit under a guard
GUARDED: Final = ("rollmux-guarded", "thrift-guarded", "default")
#: and with them those that move jobs for a reason
WOVEN: Final = ("thrift", "thrift-eager", *GUARDED)
#: a daemon that only watches
OBSERVE: Final = "observe"
#: and the shares of histories that these have
WEAVES, WATCHES = 0.3, 0.05
#: iterations at least where a guard is to have its say: it judges from the eighth on
GUARDED_ITERATIONS: Final = 10
#: the share of histories in which phases grow or shrink, and plans follow
FOLLOWS: Final = 0.3
#: the share of histories in which a node is taken out of service, and stays out
RETIRES: Final = 0.15
#: the shares of histories with several nodes on each host, and of these those whose drivers fetch nothing from another;
#: with nodes of both pools; and with jobs on several rollout nodes, of which now one and now another is drained
SHARED_HOSTS, NEAR, BOTH_POOLS, WIDE = 0.25, 0.6, 0.2, 0.15
#: the share of histories in which backends start processes, and of their jobs those whose they start
LAUNCHES, LAUNCHED = 0.3, 0.7
#: the share of histories with fillers
FILLED: Final = 0.2
DRIVER: Final = "sim"
#: inputs between two looks whether the state is at rest; at each it would take as long as all the rest
REST_EVERY: Final = 3
#: attempts at making a failing history smaller
ATTEMPTS: Final = 400


class Act(Struct, frozen=True):
    """Something that an operator does: ``pause``, ``drain``, ``revoke``, ``observe``; undone after a while.

    ``retire`` is a drain that is not undone, where every job would have room without the node (:func:`_spared`).
    """

    at_ms: Millis
    what: str
    #: which of the jobs or nodes there are then
    which: int
    for_ms: Millis


class History(Struct, frozen=True):
    """Everything that comes from outside."""

    seed: int
    workload: Workload
    policy: str
    faults: Faults
    acts: tuple[Act, ...] = ()
    #: plans follow what phases are seen to take, and that soon
    follows: bool = False


#: what runs besides the policies that are scored; with settings that a daemon's configuration can have
OTHERS: Final[dict[str, PolicyUnderTest]] = {
    RESTLESS: chaos_policy(),
    OBSERVE: PolicyUnderTest(OBSERVE, "no job is placed, and none waits", lambda *_: Watch()),
    "rollmux-unpruned": UNPRUNED,
    "rollmux-guarded": moving("rollmux-guarded", "", lambda _: RollMux(promise="measured")),
    "thrift-guarded": moving(
        "thrift-guarded", "", lambda move_s: Thrift(objective="cost", warm_move_s=move_s, rounds=1, promise="measured")
    ),
    "thrift": moving("thrift", "", lambda move_s: Thrift(objective="cost", warm_move_s=move_s)),
    "thrift-eager": moving("thrift-eager", "", lambda move_s: Thrift(objective="cost", warm_move_s=move_s), move_s=0.1),
}


def draw(seed: int) -> History:
    """The history of a seed: a plain one, and what came to be added.

    Each addition has chances of its own, so that one more leaves the rest of a history as it was.
    """
    history = _plain(seed)
    for name, added in _ADDED.items():
        history = added(Random(f"swarm {name} {seed}"), history)
    return history


def _plain(seed: int) -> History:
    rng = Random(f"swarm {seed}")
    pools = (_pool(rng, "rollout", 3), _pool(rng, "train", 2))
    jobs = tuple(_job(rng, number, pools) for number in range(rng.randint(1, 5)))
    span = 600_000 + 2 * sum(job.lasts_ms for job in jobs)
    acts = tuple(
        Act(rng.randrange(span), rng.choice(("pause", "drain", "revoke", "observe")), rng.randrange(8), _s(rng, 1, 300))
        for _ in range(rng.choice((0, 0, 1, 2, 4, 8)))
    )
    return History(seed, Workload(f"swarm {seed}", jobs, pools), rng.choice(POLICIES), _faults(rng, span), acts)


def _with(history: History, jobs: Iterable[SimJob] = (), pools: Iterable[Pool] = ()) -> History:
    """The history with these in place of its jobs, or of its pools."""
    had = history.workload
    workload = replace(had, jobs=tuple(jobs) or had.jobs, pools=tuple(pools) or had.pools)
    return replace(history, workload=workload)


def _moves(rng: Random, history: History) -> History:
    return replace(history, policy=RESTLESS) if rng.random() < MOVED else history


def _plans(rng: Random, history: History) -> History:
    """Now and then a policy that plans, or none; and jobs that ask more of it."""
    drawn = rng.random()
    if drawn < WEAVES:
        history = replace(history, policy=rng.choice(WOVEN))
    elif drawn < WEAVES + WATCHES:
        history = replace(history, policy=OBSERVE)
    return _with(history, jobs=[_more(rng, job, history.policy) for job in history.workload.jobs])


def _drifts(rng: Random, history: History) -> History:
    if rng.random() >= FOLLOWS:
        return history
    return _with(replace(history, follows=True), jobs=[_drifting(rng, job) for job in history.workload.jobs])


def _launches(rng: Random, history: History) -> History:
    if rng.random() >= LAUNCHES or history.policy == OBSERVE:
        return history
    jobs = [_launched(rng, job) if rng.random() < LAUNCHED else job for job in history.workload.jobs]
    return _with(history, jobs=jobs)


def _retires(rng: Random, history: History) -> History:
    """Nodes that leave for good, with one more of each pool so that the jobs have room without."""
    if rng.random() >= RETIRES or history.policy == OBSERVE:
        return history
    times = [rng.randrange(history.faults.until_ms) for _ in range(rng.randint(1, 3))]
    acts = tuple(Act(at, "retire", rng.randrange(8), _s(rng, 1, 300)) for at in times)
    pools = [replace(pool, nodes=(pool.nodes or 0) + 1) for pool in history.workload.pools]
    return _with(replace(history, acts=history.acts + acts), pools=pools)


def _hosts(rng: Random, history: History) -> History:
    """Jobs on several nodes, several nodes on a host, and nodes of both pools."""
    observed, span = history.policy == OBSERVE, history.faults.until_ms
    if rng.random() < WIDE and not observed:
        rollout, train = history.workload.pools
        pools = [replace(rollout, nodes=rng.randint(4, 6)), train]
        span = min(span, 3_600_000)
        history = _with(history, [_wide(rng, job) for job in history.workload.jobs], pools)
        history = _drained(rng, history, span, times=8)
    if rng.random() < SHARED_HOSTS:
        pools = [replace(pool, per_host=rng.randint(2, 3)) for pool in history.workload.pools]
        if rng.random() < NEAR and not observed:  # with somewhere to go, and loads that fail there
            pools = [replace(pool, nodes=rng.randint(3, 5), per_host=2) for pool in pools]
            faults = replace(history.faults, near=True, orders_fail=rng.uniform(0.1, 0.3))
            history = _drained(rng, replace(history, policy=RESTLESS, faults=faults), span, times=4)
        history = _with(history, pools=pools)
    if rng.random() < BOTH_POOLS:
        rollout, train = history.workload.pools
        history = _with(history, pools=[replace(rollout, also=(train.name,)), replace(train, also=(rollout.name,))])
    return history


def _drained(rng: Random, history: History, span: Millis, *, times: int) -> History:
    acts = tuple(Act(rng.randrange(span), "drain", rng.randrange(8), _s(rng, 5, 300)) for _ in range(times))
    return replace(history, acts=history.acts + acts)


def _fillers(rng: Random, history: History) -> History:
    """Jobs that work on idle nodes, and give way or are made to."""
    if rng.random() >= FILLED or history.policy == OBSERVE:
        return history
    return replace(history, workload=replace(history.workload, fillers=rng.randint(1, 3)))


#: what is done to a plain history, in this order, each with the chances of its name
_ADDED: Final[dict[str, Callable[[Random, History], History]]] = {
    "moves": _moves,
    "more": _plans,
    "drift": _drifts,
    "launches": _launches,
    "retires": _retires,
    "hosts": _hosts,
    "fillers": _fillers,
}


def _wide(rng: Random, job: SimJob) -> SimJob:
    """The job on two or three rollout nodes, for longer."""
    width = rng.randint(2, 3)
    wants = tuple(replace(want, nodes=width) if want.pool == "rollout" else want for want in job.spec.wants)
    spec = replace(job.spec, wants=wants)
    footprint = {want.pool: want.nodes for want in wants}
    return replace(job, spec=spec, footprint=footprint, iterations=job.iterations + 4)


def _launched(rng: Random, job: SimJob) -> SimJob:
    """The job with a process that a backend starts, and starts again: where it is lost, or elsewhere."""
    spec = replace(job.spec, launch=LaunchSpec(("train.py",)))
    if rng.random() < 0.7:
        spec = replace(spec, movable=Movable.RELAUNCH)
    if rng.random() < 0.6:
        spec = replace(spec, on_loss=OnLoss.RELAUNCH)
    return replace(job, spec=spec)


def _drifting(rng: Random, job: SimJob) -> SimJob:
    """The job with phases that take another time from some iteration on."""
    by = rng.choice((0.4, 1.0, 1.5, 2.5))
    later = tuple(tuple(max(1, round(took * by)) for took in times) for times in job.series)
    return replace(job, series=(*job.series, *later, *later), iterations=max(4, job.iterations))


def _more(rng: Random, job: SimJob, policy: str) -> SimJob:
    """The job with side phases now and then, a tail that grows again, and times that a guard has to act upon."""
    spec = job.spec
    if policy in GUARDED:
        worse = rng.choice((1.0, 1.5, 3.0))
        series = tuple(tuple(round(took * rng.uniform(1, worse)) for took in times) for times in job.series)
        times = GUARDED_ITERATIONS + job.iterations
        job = replace(job, series=series, iterations=times, lasts_ms=job.lasts_ms * 2)
    if rng.random() < 0.25:
        said = spec.slo is not None or rng.random() < 0.5
        pools = tuple(want.pool for want in spec.wants)
        eval_, save = (
            PhaseSpec(name, (pool,), _s(rng, 0, 30) if said else None, every=rng.randint(1, 3) if said else 0)
            for name, pool in (("eval", pools[0]), ("save", pools[-1]))
        )
        side = rng.choice(((eval_,), (save,), (eval_, save)))
        job = replace(job, spec=replace(spec, side=(*spec.side, *side)), lasts_ms=job.lasts_ms + 120_000)
    return replace(job, grows=bool(job.tail_from) and rng.random() < 0.7)


def _s(rng: Random, least: float, most: float) -> Millis:
    return round(1000 * rng.uniform(least, most))


def _pool(rng: Random, name: str, most: int) -> Pool:
    return Pool(
        name,
        "any",
        1.0,
        gpus_per_node=rng.choice((1, 2, 4)),
        ram_mb=rng.choice((250_000, 1_000_000)),
        nodes=rng.randint(1, most),
    )


def _job(rng: Random, number: int, pools: tuple[Pool, ...]) -> SimJob:
    nodes = {pool.name: pool.nodes or 0 for pool in pools}
    shape = rng.choice(("pair", "pair", "pair", "sync", "alone"))
    known = rng.random() < 0.8
    stated = known and rng.random() < 0.9
    most = rng.choice((20, 200))
    times = [_s(rng, 1, most), _s(rng, 1, most)]
    gap = rng.choice((0, 0, _s(rng, 0, 20)))
    part = rng.choice((0, 0, 1))
    phases = [
        PhaseSpec("rollout", ("rollout",), times[0], min_gpus=part),
        PhaseSpec("train", ("train",), times[1], gap),
    ]
    if shape == "sync":
        times.append(_s(rng, 1, 10))
        phases.append(PhaseSpec("sync", ("rollout", "train"), times[2]))
    if shape == "alone":
        times, phases = times[:1], phases[:1]
    used = [pool for pool in nodes if any(pool in phase.pools for phase in phases)]
    wants = tuple(Want(pool, rng.randint(1, min(2, nodes[pool]))) for pool in used)
    moves = rng.choice((0, 2, 20))
    states = tuple(
        StateSpec(
            pool,
            gpu_mb=20_000,
            residual_mb=rng.choice((0, 0, 500)),
            ram_mb=rng.choice((10_000, 100_000)),
            driver=DRIVER,
            load_ms=_s(rng, 0, moves),
            park_ms=_s(rng, 0, moves),
        )
        for pool in used
        if rng.random() < 0.85
    )
    # who parks at every release moves its states in every iteration, which hardly any promise has room for
    park = rng.choice((Park.LAZY, Park.LAZY, Park.AT_RELEASE))
    promised = stated and park is Park.LAZY and rng.random() < 0.5
    init = (PhaseSpec("init", tuple(used), _s(rng, 0, 30)),) if rng.random() < 0.3 else ()
    spec = JobSpec(
        name=f"job{number}",
        phases=tuple(phases if stated else [replace(phase, planned_ms=None) for phase in phases]),
        wants=wants,
        side=init,
        states=states,
        slo=round(rng.uniform(1, 3), 2) if promised else None,
        priority=rng.choice((0, 0, 1)),
        on_loss=rng.choice((OnLoss.HOLD, OnLoss.KILL)),
        park=park,
    )
    series = tuple(tuple(max(1, round(took * rng.uniform(0.3, 1.2))) for took in times) for _ in range(3))
    return SimJob(
        name=spec.name,
        kind=shape,
        arrives_ms=_s(rng, 0, 600),
        lasts_ms=sum(times) * 6,
        spec=spec,
        series=series,
        footprint={want.pool: want.nodes for want in wants},
        tail_from=(0.6,) if part else (),
        iterations=rng.randint(1, 6),
    )


def _faults(rng: Random, span: Millis) -> Faults:
    """Some kinds of faults, and each often: these histories are minutes long. Then there is peace."""

    def per_hour(most: float) -> float:
        return rng.choice((0.0, 0.0, rng.uniform(0, most), most))

    def share(most: float) -> float:
        return rng.choice((0.0, 0.0, rng.uniform(0, most)))

    return Faults(
        deaths_per_hour=per_hour(12),
        hangs_per_hour=per_hour(6),
        stalls_per_hour=per_hour(3),
        detaches_per_hour=per_hour(20),
        restart_ms=_s(rng, 5, 200),
        hang_ms=_s(rng, 5, 300),
        operator_ms=_s(rng, 5, 300),
        orders_fail=share(0.2),
        orders_lost=share(0.2),
        order_limit_ms=_s(rng, 5, 120),
        lingers=share(0.5),
        linger_ms=_s(rng, 1, 100),
        outages_per_hour=per_hour(4),
        outage_ms=_s(rng, 1, 300),
        daemon_deaths_per_hour=per_hour(60),
        daemon_down_ms=_s(rng, 0, 120),
        until_ms=span,
    )


# ---- running one -----------------------------------------------------------------------------------------------------


def run(history: History, hear: Callable[[Fact], None] | None = None) -> FaultyWorld:
    """Play a history to its end, under all checkers. ``hear`` gets every fact.

    Raises:
        BrokenInvariant: a promise was broken, or a job waits for ever.
    """
    # operators count as a fault: without any, nothing would be excused
    faults = history.faults if history.faults.any else replace(history.faults, detaches_per_hour=1e-9)
    if history.acts:
        longest = max(act.for_ms for act in history.acts) + faults.operator_ms
        faults = replace(faults, operator_ms=max(faults.operator_ms, len(history.acts) * longest))
    under_test = OTHERS.get(history.policy) or policy_under_test(history.policy)
    if history.follows:
        soon = {**AS_OBSERVED, "min_samples": 2, "drift_window": 3, "replan_every_ms": 20_000}
        under_test = replace(under_test, estimates=soon)
    world = FaultyWorld(faults, history.workload, under_test, history.seed, WORK, hear=hear)
    check(world, rest_every=REST_EVERY)
    for act in history.acts:
        world.kernel.at(act.at_ms, _act, world, act)
    world.run()
    return world


def _says(world: FaultyWorld, given: i.Input) -> None:
    """An operator says it; where nobody hears it, or it makes no sense any more, he lets it be."""
    if world.up:
        with suppress(DaemonDied, Rejected):
            world.tell(given)


def _act(world: FaultyWorld, act: Act) -> None:
    state = world.core.state
    if act.what in ("drain", "retire"):
        node = list(state.nodes)[act.which % len(state.nodes)]
        lasts = act.what == "retire" and _spared(world, node)
        _says(world, i.DrainNode(node, "operator"))
        if not lasts:
            world.kernel.after(act.for_ms, _until_heard, world, i.UndrainNode(node, "operator"))
    elif act.what == "observe":
        host = list(state.hosts)[act.which % len(state.hosts)]
        world.kernel.after(0, world.observed, host)
    elif act.what == "pause":
        jobs = [job.id for job in state.jobs.values() if job.live and job.status is not JobStatus.QUARANTINED]
        if jobs:
            job = jobs[act.which % len(jobs)]
            _says(world, i.PauseJob(job, "operator"))
            world.kernel.after(act.for_ms, _until_heard, world, i.ResumeJob(job, "operator"))
    elif act.what == "revoke":
        held = [slot.id for slot in state.slots.values() if slot.status in (SlotStatus.RUNNING, SlotStatus.LOADING)]
        if held:
            _says(world, i.RevokeSlot(held[act.which % len(held)], "operator", "by chance"))


def _spared(world: FaultyWorld, name: NodeId) -> bool:
    """Whether every job comes to its end without the node: who sits there may leave, and the others are enough.

    A job has room on as many other nodes of its pools as it wants, sooner or later: when all others have ended. Who may
    not be moved, or not yet, or only as far as his promise allows, waits for an operator; he is no matter of liveness.
    """
    state = world.core.state
    node = state.nodes[name]
    near = any(not driver.copies for driver in world.config.drivers.values())
    if near or len(node.pools) > 1:  # whom nothing but certain nodes will do, or who takes another pool's
        return False
    for job in state.jobs.values():
        sits = any(name in nodes for pins in (job.pins, job.move.pins if job.move else {}) for nodes in pins.values())
        free_to_go = job.status is JobStatus.ADMITTED and job.spec.movable is not Movable.NO and job.spec.slo is None
        if sits and not free_to_go:
            return False
    for pool in node.pools:
        left = sum(it.id != name and pool in it.pools and not it.drain for it in state.nodes.values())
        if left < max((job.footprint.get(pool, 0) for job in world.jobs), default=0):
            return False
    return True


def _until_heard(world: FaultyWorld, given: i.Input) -> None:
    """What an operator has to undo he says again until it is heard, and can be: a lost node has to be back first."""
    try:
        if not world.up:
            raise DaemonDied
        world.tell(given)
    except DaemonDied:
        world.kernel.after(5_000, _until_heard, world, given)
    except Rejected:
        if isinstance(given, i.UndrainNode) and world.core.state.nodes[given.node].drain and world.waiting_to_end:
            world.kernel.after(30_000, _until_heard, world, given)


# ---- what fails ------------------------------------------------------------------------------------------------------


def broken(history: History) -> str:
    """What is wrong with it: the promise's name, or the error's; "" if nothing is."""
    try:
        run(history)
    except BrokenInvariant as no:
        return str(no).partition(":")[0]
    except Exception as no:
        return f"{type(no).__name__}: {no}"[:200]
    return ""


def shrink(history: History, attempts: int = ATTEMPTS) -> History:
    """A smaller history that breaks the same promise."""
    wrong = broken(history)
    assert wrong
    left = attempts
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _smaller(history):
            left -= 1
            if broken(candidate) == wrong:
                history, smaller = candidate, True
                break
            if left <= 0:
                break
    return history


def _smaller(history: History) -> Iterator[History]:
    jobs, faults = history.workload.jobs, history.faults
    for index in range(len(jobs)):
        if len(jobs) > 1:
            kept = (*jobs[:index], *jobs[index + 1 :])
            yield replace(history, workload=replace(history.workload, jobs=kept))
    if history.follows:
        yield replace(history, follows=False)
    if history.workload.fillers:
        yield replace(history, workload=replace(history.workload, fillers=0))
    for index in range(len(history.acts)):
        yield replace(history, acts=(*history.acts[:index], *history.acts[index + 1 :]))
    for name in _RATES:
        if getattr(faults, name):
            yield replace(history, faults=replace(faults, **{name: 0.0}))
    for index, job in enumerate(jobs):
        for other in _simpler(job):
            made = (*jobs[:index], other, *jobs[index + 1 :])
            yield replace(history, workload=replace(history.workload, jobs=made))


_RATES: Final = tuple(
    name
    for name in Faults.__struct_fields__
    if name.endswith("_per_hour") or name in ("orders_fail", "orders_lost", "lingers")
)


def _simpler(job: SimJob) -> Iterator[SimJob]:
    spec = job.spec
    if job.iterations > 1:
        yield replace(job, iterations=job.iterations - 1)
    if len(job.series) > 1:
        yield replace(job, series=job.series[:1])
    if spec.side:
        yield replace(job, spec=replace(spec, side=()))
    if spec.slo is not None:
        yield replace(job, spec=replace(spec, slo=None))
    if spec.launch is not None:
        yield replace(job, spec=replace(spec, launch=None, movable=Movable.NO, on_loss=OnLoss.HOLD))
    if spec.on_loss is OnLoss.RELAUNCH:
        yield replace(job, spec=replace(spec, on_loss=OnLoss.HOLD))
    if spec.movable is Movable.RELAUNCH:
        yield replace(job, spec=replace(spec, movable=Movable.NO))
    if spec.park is Park.AT_RELEASE:
        yield replace(job, spec=replace(spec, park=Park.LAZY))
    if job.tail_from:
        phases = tuple(replace(phase, min_gpus=0) for phase in spec.phases)
        yield replace(job, tail_from=(), spec=replace(spec, phases=phases))
    for index in range(len(spec.states)):
        yield replace(job, spec=replace(spec, states=(*spec.states[:index], *spec.states[index + 1 :])))


def encode(history: History) -> bytes:
    """As it is kept."""
    return msgspec.json.format(msgspec.json.encode(history), indent=1)


def decode(body: bytes) -> History:
    """As it was kept."""
    return msgspec.json.decode(body, type=History)
