"""A thousand clients may fall silent at once (a network, a login node): that is one decision, not a thousand.

Hundreds of jobs may wait: no decision tries them all.
"""

import msgspec

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import said
from rollmuxd.core.config import Config
from rollmuxd.core.model import Job, JobState, JobStatus, NodeStatus
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import Filler, JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.core.steps import admit, lend
from rollmuxd.core.steps.lend import PER_NODE, no_room
from rollmuxd.explain import explainer
from rollmuxd.policies.rollmux import RollMux

NODES, JOBS, WAITING = 12, 60, 6


class Counting(RollMux):
    """Tells how often it was asked for a place."""

    asked = 0

    def place(self, state, job):
        self.asked += 1
        return super().place(state, job)


def cluster(core):
    """Nodes of two pools, all seen; and a function that registers a job of its own shape."""
    nodes = [
        i.NodeSpec(f"{pool}{n}/gpu0", f"{pool}{n}", (f"{pool}{n}/gpu0",), (pool,))
        for pool in ("rollout", "train")
        for n in range(NODES)
    ]
    core.handle(i.Start(tuple(i.HostSpec(node.host, "mock", 0) for node in nodes), tuple(nodes)), 1)
    for node in nodes:
        core.handle(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)), 1)

    def register(number):
        phases = (PhaseSpec("rollout", ("rollout",), planned_ms=1_000 + number), PhaseSpec("train", ("train",)))
        spec = JobSpec(f"j{number}", phases, (Want("rollout"), Want("train")))
        job = core.handle(i.RegisterJob("team", "ann", spec), 2).answer.job
        return job, core.handle(i.OpenSession(job, "", pid=number, host="h"), 2).answer.session

    return register


def test_when_many_leases_run_out_at_once_each_waiting_job_is_tried_once():
    policy = Counting(max_group=5)
    core = Scheduler(Config(), policy)
    register = cluster(core)
    for number in range(JOBS):
        register(number)
    late = [register(number) for number in range(JOBS, JOBS + WAITING)]
    lease = Config().lease_ms
    for _, session in late:  # those that wait are heard of, and nobody else
        core.handle(i.Heartbeat(session), lease)
    assert len(core.state.waiting) == WAITING

    policy.asked = 0
    decision = core.handle(i.Tick(), lease + 3)

    assert sum(isinstance(fact, f.JobLost) for fact in decision.facts) == JOBS
    assert [fact.job for fact in decision.facts if isinstance(fact, f.JobPlaced)] == [job for job, _ in late]
    assert policy.asked <= WAITING


def test_a_departure_tries_each_waiting_job_once_and_a_few_with_each_input():
    policy = Counting(max_group=1)
    core = Scheduler(Config(), policy)
    register = cluster(core)
    placed = [register(number)[0] for number in range(NODES)]
    late = [register(number)[0] for number in range(NODES, NODES + 40)]
    policy.asked = 0

    core.handle(i.EndJob(placed[0], "ann"), 3)
    at_a_time = [policy.asked]
    while core.deadline() <= 3:
        policy.asked = 0
        core.handle(i.Tick(), 3)
        at_a_time.append(policy.asked)

    assert list(core.state.waiting) == late[1:]
    assert max(at_a_time) <= 6
    # the first takes nodes that no group had, so the others are tried once more
    assert sum(at_a_time) == len(late) + len(late) - 1


def test_a_newcomer_is_tried_alone_where_nothing_else_has_changed():
    policy = Counting(max_group=1)
    core = Scheduler(Config(), policy)
    register = cluster(core)
    for number in range(NODES + 40):
        register(number)
    policy.asked = 0
    register(1_000)
    assert policy.asked == 1
    register(1_000 + 10**6)
    assert policy.asked == 2
    assert core.deadline() > 2


def test_the_more_waiting_jobs_differ_the_later_they_are_tried_again(monkeypatch):
    monkeypatch.setattr(admit, "TRIES_A_MINUTE", 20)
    policy = Counting(max_group=1)
    core = Scheduler(Config(lease_ms=3_600_000), policy)
    register = cluster(core)
    for number in range(NODES + 50):
        register(number)

    def tried_by(at):
        policy.asked = 0
        while core.deadline() <= at:
            core.handle(i.Tick(), max(core.deadline(), 3))
        return policy.asked

    assert tried_by(60_003) == 50  # when the first began to wait, it was the only one
    assert tried_by(60_003 + 2 * 60_000) == 0
    assert tried_by(60_003 + 3 * 60_000) == 50


def test_a_job_beside_many_that_wait_is_told_how_often_it_is_tried(monkeypatch):
    monkeypatch.setattr(explainer, "TRIES_A_MINUTE", 20)
    core = Scheduler(Config(), Counting(max_group=1))
    register = cluster(core)
    for number in range(NODES + 20):
        job, _ = register(number)
    few = explainer.Explainer(core.context).explain(job, 2).sentences
    register(NODES + 20)
    many = explainer.Explainer(core.context).explain(job, 2).sentences

    assert not any("it is tried" in sentence for sentence in few)
    assert "As 21 jobs wait, it is tried every 2 min where nothing makes room." in many


def test_a_drain_sends_many_fillers_away_in_one_decision_and_each_node_has_a_few():
    core = Scheduler(Config(), RollMux())
    cluster(core)
    state = (StateSpec("rollout", driver="mock", gpu_mb=100),)
    spec = JobSpec(
        "f", (PhaseSpec("filler", ("rollout",)),), (Want("rollout"),), states=state, filler=Filler(2_000, 1_000)
    )
    for number in range(300):
        core.handle(i.RegisterJob("team", "ann", msgspec.structs.replace(spec, name=f"f{number}")), 2)
    homes = [len(node.fillers) for node in core.state.nodes.values() if "rollout" in node.pools]
    assert homes == [PER_NODE] * NODES

    core.handle(i.DrainNode("rollout0/gpu0", "ops"), 3)

    assert core.state.nodes["rollout0/gpu0"].fillers == []


def test_fillers_that_fit_nowhere_cost_one_input_a_few_looks_and_hold_up_none_that_fits(monkeypatch):
    looks = []
    monkeypatch.setattr(lend, "no_room", lambda c, job, node: looks.append(node) or no_room(c, job, node))
    core = Scheduler(Config(), RollMux())
    nodes = tuple(i.NodeSpec(f"h{n}/n0", f"h{n}", (f"h{n}/gpu0",), ("train",), gpu_mb=1_000) for n in range(200))
    core.handle(i.Start(tuple(i.HostSpec(node.host, "mock", 0) for node in nodes), nodes), 1)

    def register(number, gpu_mb, residual_mb):
        state = StateSpec("train", driver="mock", gpu_mb=gpu_mb, residual_mb=residual_mb)
        phases, wants = (PhaseSpec("filler", ("train",)),), (Want("train"),)
        spec = JobSpec(f"f{number}", phases, wants, states=(state,), filler=Filler(2_000, 1_000))
        return core.handle(i.RegisterJob("team", "ann", spec), 2).answer.job

    def see(*some):
        for node in some:
            core.handle(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)), 2)

    see(*nodes[:-1])
    for number in range(199):  # each node keeps one, and has no room for another
        register(number, 600, 600)
    late = [register(number, 401 + number, 401 + number) for number in range(199, 259)]
    fits = register(259, 400, 400)
    assert core.state.jobs[fits].pins

    # The last node comes: one of them has it, and the others are looked at in vain.
    looks.clear()
    see(nodes[-1])
    at_a_time = [len(looks)]
    while (now := core.deadline()) < 20_000:
        looks.clear()
        core.handle(i.Tick(), now)
        at_a_time.append(len(looks))
    assert sum(core.state.jobs[job].status is not JobStatus.WAITING for job in late) == 1
    assert sum(at_a_time) > 59 * 199
    assert max(at_a_time) <= 1_200


def test_fillers_that_can_go_nowhere_hold_up_none_that_can_have_an_emptier_node():
    core = Scheduler(Config(), RollMux())
    large, small = 50, 50
    nodes = tuple(
        i.NodeSpec(f"h{n}/n0", f"h{n}", (f"h{n}/gpu0",), ("train",), gpu_mb=1_000 if n < large else 400)
        for n in range(large + small)
    )
    core.handle(i.Start(tuple(i.HostSpec(node.host, "mock", 0) for node in nodes), nodes), 1)

    def see(some):
        for node in some:
            core.handle(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)), 2)

    def register(name, gpu_mb):
        state = StateSpec("train", driver="mock", gpu_mb=gpu_mb)
        phases, wants = (PhaseSpec("filler", ("train",)),), (Want("train"),)
        core.handle(
            i.RegisterJob("team", "ann", JobSpec(name, phases, wants, states=(state,), filler=Filler(2_000, 1_000))), 2
        )

    see(nodes[:large])
    for number in range(large):
        register(f"large{number}", 500 + number)
    for number in range(large):
        register(f"small{number}", 10)

    see(nodes[large:])
    while (now := core.deadline()) < 20_000:
        core.handle(i.Tick(), now)
    assert [len(core.state.nodes[node.id].fillers) for node in nodes] == [1] * (large + small)


def test_one_input_moves_some_fillers_and_the_next_ones_move_the_others():
    core = Scheduler(Config(), RollMux())
    nodes = tuple(i.NodeSpec(f"h{n}/n0", f"h{n}", (f"h{n}/gpu0",), ("train",), gpu_mb=1_000) for n in range(100))
    core.handle(i.Start(tuple(i.HostSpec(node.host, "mock", 0) for node in nodes), nodes), 1)

    def see(some):
        for node in some:
            core.handle(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)), 2)

    see(nodes[:25])
    for number in range(400):
        state = StateSpec("train", driver="mock", gpu_mb=10)
        phases, wants = (PhaseSpec("filler", ("train",)),), (Want("train"),)
        spec = JobSpec(f"f{number}", phases, wants, states=(state,), filler=Filler(2_000, 1_000))
        core.handle(i.RegisterJob("team", "ann", spec), 2)
    moved = []

    def hand(given, now):
        moved.append(sum(isinstance(fact, f.JobUnplaced) for fact in core.handle(given, now).facts))

    for node in nodes[25:]:
        hand(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)), 2)
    while (now := core.deadline()) < 20_000:
        hand(i.Tick(), now)

    assert [len(core.state.nodes[node.id].fillers) for node in nodes] == [4] * 100
    assert 250 < sum(moved) < 400
    assert max(moved) <= 150, "more take the daemon's only thread for too long"


def test_a_search_that_one_input_cannot_end_spreads_those_that_it_had_passed_too():
    core = Scheduler(Config(), RollMux())
    many = 200
    gpus = tuple(f"late/gpu{n}" for n in range(many))
    nodes = (
        i.NodeSpec("first/n0", "first", ("first/gpu0",), ("train",), gpu_mb=1_000),
        *(i.NodeSpec(f"late/n{n}", "late", (gpu,), ("train",), gpu_mb=1_000) for n, gpu in enumerate(gpus)),
    )
    core.handle(i.Start((i.HostSpec("first", "mock", 0), i.HostSpec("late", "mock", 0)), nodes), 1)
    core.handle(i.HostObserved("first", (i.GpuObservation("first/gpu0", 0),)), 2)

    def register(name, gpu_mb):
        state = StateSpec("train", driver="mock", gpu_mb=gpu_mb, residual_mb=gpu_mb)
        phases, wants = (PhaseSpec("filler", ("train",)),), (Want("train"),)
        spec = JobSpec(name, phases, wants, states=(state,), filler=Filler(2_000, 1_000))
        core.handle(i.RegisterJob("team", "ann", spec), 2)

    for number in range(10):
        register(f"small{number}", 10)
    for number in range(many):
        register(f"large{number}", 950)
    assert len(core.state.nodes["first/n0"].fillers) == 10

    core.handle(i.HostObserved("late", tuple(i.GpuObservation(gpu, 0) for gpu in gpus)), 3)
    while (now := core.deadline()) < 20_000:
        core.handle(i.Tick(), now)
    assert len(core.state.nodes["first/n0"].fillers) <= 2


def test_a_lost_filler_whose_host_is_away_keeps_no_other_from_an_emptier_node():
    core = Scheduler(Config(), RollMux())
    nodes = tuple(i.NodeSpec(f"h{n}/n0", f"h{n}", (f"h{n}/gpu0",), ("train",), gpu_mb=1_000) for n in range(3))
    core.handle(i.Start(tuple(i.HostSpec(node.host, "mock", 0) for node in nodes), nodes), 1)

    def see(node):
        core.handle(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)), 2)

    def register(name):
        state = StateSpec("train", driver="mock", gpu_mb=10)
        phases, wants = (PhaseSpec("filler", ("train",)),), (Want("train"),)
        spec = JobSpec(name, phases, wants, states=(state,), filler=Filler(2_000, 1_000))
        job = core.handle(i.RegisterJob("team", "ann", spec), 2).answer.job
        return job, core.handle(i.OpenSession(job, "", 1, "box", "then"), 2).answer.session

    see(nodes[0])
    lost, session = register("lost")
    (order,) = core.handle(i.RequestSlot(lost, session, "filler", "q"), 2).effects
    core.handle(i.OrderDone(order.order), 2)
    core.handle(i.HostObserved("h0", unreachable=said("no route to it")), 2)
    core.handle(i.ProcessGone(session, 1, "then"), 2)
    assert core.state.jobs[lost].status is JobStatus.LOST
    assert core.state.jobs[lost].pins

    see(nodes[1])
    for name in ("a", "b"):
        register(name)
    see(nodes[2])
    while (now := core.deadline()) < 20_000:
        core.handle(i.Tick(), now)
    assert [len(core.state.nodes[node.id].fillers) for node in nodes] == [1, 1, 1]


def test_lost_fillers_that_can_go_nowhere_do_not_keep_a_search_without_end(monkeypatch):
    core = Scheduler(Config(), RollMux())
    nodes = tuple(i.NodeSpec(f"h{n}/n0", f"h{n}", (f"h{n}/gpu0",), ("train",), gpu_mb=1_000) for n in range(40))
    core.handle(i.Start(tuple(i.HostSpec(node.host, "mock", 0) for node in nodes), nodes), 1)

    def see(*some):
        for node in some:
            core.handle(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)), 2)

    see(*nodes[:-1])
    state = StateSpec("train", driver="mock", gpu_mb=600, residual_mb=600)
    for number in range(39):
        phases, wants = (PhaseSpec("filler", ("train",)),), (Want("train"),)
        spec = JobSpec(f"f{number}", phases, wants, states=(state,), filler=Filler(2_000, 1_000))
        core.handle(i.RegisterJob("team", "ann", spec), 2)
    monkeypatch.setattr(lend, "LOOKS", 60)
    for job in list(core.state.jobs.values())[:8]:  # their hosts cannot be reached
        job.status = JobStatus.LOST
        (home,) = job.pins["train"]
        core.state.nodes[home].status = NodeStatus.LOST
    see(nodes[-1])

    ticks = 0
    while core.deadline() < 4_000 and ticks < 100:
        core.handle(i.Tick(), max(core.deadline(), 2))
        ticks += 1
    assert ticks < 10


def test_a_fillers_start_counts_as_stated_where_one_took_longer():
    spec = StateSpec("train", load_ms=60_000)
    filler = Job("f", "team", "ann", JobSpec("f", (PhaseSpec("filler", ("train",)),), (Want("train"),)), 0)
    kept = JobState("f", "train", "n", spec)
    for took, expected in ((None, 60_000), (20_000, 20_000), (900_000, 60_000)):
        filler.progress.start_ms = took
        assert lend.wake_ms(filler, kept) == expected
