"""What a waiting job is told would let it in, does let it in: each what_if is granted for real, through the front door.

"It would start now with slo=1.34" is tried by registering just that; "with one more node" by starting the daemon with
one more node; "once A has ended" by ending A. And telling it changes nothing: neither the state, nor what the policy
decides afterwards.
"""

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.policy import Refusal
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.core.state import State
from rollmuxd.explain.explainer import Explainer
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.policies.thrift.policy import Thrift

GPUS = 4


class Place:
    """A scheduler, its nodes, and what goes in."""

    def __init__(self, rollout, train, *, ram_gb=1000, policy=None, state=None):
        self.core = Scheduler(Config(), policy or RollMux(), state)
        self.ram_gb, self.hosts, self.nodes = ram_gb, [], []
        for pool, count in (("rollout", rollout), ("train", train)):
            for _ in range(count):
                self.add(pool)
        if state is None:
            self.start()

    def add(self, pool):
        host = f"{pool}{len(self.hosts)}"
        gpus = tuple(f"{host}/gpu{gpu}" for gpu in range(GPUS))
        self.hosts.append(i.HostSpec(host, "mock", round(self.ram_gb * 1000)))
        self.nodes.append(i.NodeSpec(f"{host}/gpu0-3", host, gpus, (pool,), gpu_mb=80_000, price_per_gpu_hour=2))

    def start(self):
        self.hand(i.Start(tuple(self.hosts), tuple(self.nodes)))
        for host in self.hosts:
            gpus = tuple(i.GpuObservation(gpu, 0) for node in self.nodes if node.host == host.id for gpu in node.gpus)
            self.hand(i.HostObserved(host.id, gpus))

    def hand(self, given_):
        return self.core.handle(given_, self.core.state.at).facts

    def arrives(self, spec):
        self.hand(i.RegisterJob("team", "ann", spec))
        return self.core.state.names[f"team/{spec.name}"]

    def what_ifs(self, job):
        return {what_if.code: what_if for what_if in Explainer(self.core.context).what_ifs(job)}

    def again(self):
        """Another scheduler in the same state, with a policy that has derived nothing yet."""
        state = msgspec.json.decode(msgspec.json.encode(self.core.state), type=State)
        other = Place(0, 0, ram_gb=self.ram_gb, state=state, policy=type(self.core.policy)())
        other.hosts, other.nodes = list(self.hosts), list(self.nodes)
        return other

    def has_placed(self, job):
        return self.core.state.jobs[job].group is not None

    def alone_in_line(self, job):
        """The same, without the other jobs that wait: one of these might take the place first.

        A policy that has derived nothing yet may find a place for the job as soon as these have ended.
        """
        other = self.again()
        for name in list(other.core.state.waiting):
            if name != job:
                other.hand(i.EndJob(name, by="ann"))
        return other


def spec(name, rollout_s, train_s, *, slo=None, ram_gb=0.0, width=1):
    return JobSpec(
        name=name,
        phases=(
            PhaseSpec("rollout", ("rollout",), planned_ms=round(rollout_s * 1000)),
            PhaseSpec("train", ("train",), planned_ms=round(train_s * 1000)),
        ),
        wants=(Want("rollout", nodes=width), Want("train")),
        states=(StateSpec("rollout", gpu_mb=1000, ram_mb=round(ram_gb * 1000)),) if ram_gb else (),
        slo=slo,
    )


def placed(facts, job):
    return any(isinstance(fact, f.JobPlaced) and fact.job == job for fact in facts)


def test_the_slo_is_the_tightest_one_that_would_do():
    place = Place(1, 1)
    place.arrives(spec("a", 10, 10, slo=3))
    late = place.arrives(spec("b", 8, 8, slo=1.05))

    what_if = place.what_ifs(late)["slo"]

    assert what_if.data == {"slo": 1.25, "was": 1.05}  # 20 s in the group, 16 s alone
    for slo, does in ((1.24, False), (1.25, True)):
        other = place.again()
        facts = other.hand(i.RegisterJob("team", "ann", spec("b", 8, 8, slo=slo), replace=True))
        assert placed(facts, late) is does


def test_a_members_bound_is_loosened_by_nobody_elses_but_its_end_helps():
    place = Place(1, 1)
    first = place.arrives(spec("a", 10, 10, slo=1.2))
    late = place.arrives(spec("b", 10, 40, slo=3))

    what_ifs = place.what_ifs(late)

    assert "slo" not in what_ifs
    assert what_ifs["departure"].data == {"jobs": [first]}
    assert placed(place.hand(i.EndJob(first, by="ann")), late)


def test_of_a_group_of_two_it_is_told_of_each_whose_end_would_do():
    place = Place(1, 1)
    both = [place.arrives(spec(name, 10, 10)) for name in ("a", "b")]
    late = place.arrives(spec("c", 10, 10, slo=1.0))

    assert sorted(place.what_ifs(late)["departure"].data["jobs"]) == both
    for leaver in both:
        assert placed(place.again().hand(i.EndJob(leaver, by="ann")), late)


def test_more_nodes_are_told_by_pool_where_one_pools_would_do():
    place = Place(1, 1)
    place.arrives(spec("a", 10, 2, slo=1.1))
    late = place.arrives(spec("b", 10, 2, slo=1.1))

    assert place.what_ifs(late)["nodes"].data == {"nodes": {"rollout": 1}}
    other = place.again()
    other.add("rollout")
    other.hand(i.Start(tuple(other.hosts), tuple(other.nodes)))
    gpus = tuple(i.GpuObservation(gpu, 0) for node in other.nodes for gpu in node.gpus)
    facts = [
        fact
        for host in other.hosts
        for fact in other.hand(i.HostObserved(host.id, tuple(gpu for gpu in gpus if gpu.gpu.startswith(f"{host.id}/"))))
    ]
    assert placed(facts, late)


def test_less_ram_is_told_in_gigabytes_and_is_all_that_there_is():
    place = Place(1, 1, ram_gb=100)
    place.arrives(spec("a", 10, 10, ram_gb=60))
    late = place.arrives(spec("b", 10, 10, ram_gb=50))

    assert place.what_ifs(late)["ram"].data == {"ram_gb": {"rollout": 40.0}}
    for ram_gb, does in ((40, True), (40.2, False)):
        other = place.again()
        assert (
            placed(other.hand(i.RegisterJob("team", "ann", spec("b", 10, 10, ram_gb=ram_gb), replace=True)), late)
            is does
        )


def test_it_works_through_any_policy():
    class OneByOne:
        """One job at a time on the whole inventory, and none with a bound under 4."""

        name = "one-by-one"

        def place(self, state, job):
            busy = any(group.jobs for group in state.groups.values())
            return None if busy and (job.spec.slo or 9) < 4 else RollMux().place(state, job)

        def why_not(self, state, job):
            return Refusal(())

        def __getattr__(self, name):
            return getattr(RollMux(), name)

    place = Place(2, 2, policy=OneByOne())
    first = place.arrives(spec("a", 10, 10))
    late = place.arrives(spec("b", 10, 10, slo=2))

    assert place.what_ifs(late)["slo"].data["slo"] == 4
    assert place.what_ifs(late)["departure"].data["jobs"] == [first]


@pytest.mark.parametrize("paused", [False, True])
def test_a_job_that_does_not_wait_has_no_wishes(paused):
    place = Place(1, 1)
    job = place.arrives(spec("a", 1, 1))
    if paused:
        place.hand(i.PauseJob(job, by="ann"))
    assert Explainer(place.core.context).what_ifs(job) == ()


jobs = st.lists(
    st.builds(
        lambda rollout, train, slo, ram, width: (rollout, train, slo, ram, width),
        st.integers(1, 20),
        st.integers(1, 20),
        st.sampled_from([None, 1.0, 1.1, 1.5, 2.0, 4.0]),
        st.sampled_from([0, 0, 20, 45]),
        st.sampled_from([1, 1, 2]),
    ),
    min_size=2,
    max_size=7,
)


@pytest.mark.parametrize("policy", [RollMux, Thrift])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(given_=jobs)
@example([(1, 1, None, 0, 1), (6, 17, None, 0, 1), (20, 17, 1.1, 0, 1), (1, 1, None, 0, 1), (20, 17, 1.1, 0, 1)])
def test_every_wish_comes_true_and_telling_it_changes_nothing(policy, given_):
    place, untold = Place(2, 1, ram_gb=100, policy=policy()), Place(2, 1, ram_gb=100, policy=policy())
    for number, (rollout, train, slo, ram, width) in enumerate(given_):
        one = spec(f"job-{number}", rollout, train, slo=slo, ram_gb=ram, width=width)
        job = place.arrives(one)
        untold.arrives(one)
        before = msgspec.json.encode(place.core.state)
        what_ifs = place.what_ifs(job)
        assert msgspec.json.encode(place.core.state) == before
        if "slo" in what_ifs and what_ifs["slo"].data["slo"] is not None:
            eased = spec(one.name, rollout, train, slo=what_ifs["slo"].data["slo"], ram_gb=ram, width=width)
            other = place.alone_in_line(job)
            other.hand(i.RegisterJob("team", "ann", eased, replace=True))
            assert other.has_placed(job)
        for leaver in what_ifs["departure"].data["jobs"] if "departure" in what_ifs else ():
            other = place.alone_in_line(job)
            other.hand(i.EndJob(leaver, by="ann"))
            assert other.has_placed(job)
    # What the policy decides after all these questions is what one decides that was never asked.
    assert msgspec.json.encode(place.core.state) == msgspec.json.encode(untold.core.state)
