"""A journal gives the jobs that the daemon ran, each phase as long as it ran, on the nodes that were there."""

import json
import pickle
from pathlib import Path

import pytest

from rollmuxd.core import facts as core_facts
from rollmuxd.core.config import Config, DriverTraits
from rollmuxd.core.effects import Observe, Perform
from rollmuxd.core.inputs import (
    EndJob,
    GpuObservation,
    HostObserved,
    HostSpec,
    Input,
    NodeSpec,
    OpenSession,
    OrderDone,
    RegisterJob,
    ReleaseSlot,
    RequestSlot,
    Start,
)
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.sim.workload import Malformed, Options, SimJob
from rollmuxd.sim.workloads import read


def wants(job: SimJob) -> dict[str, int]:
    return {want.pool: want.nodes for want in job.spec.wants}


class Daemon:
    """A scheduler on two rollout nodes and one of four GPUs for training, whose facts are kept.

    Moving a job's states takes 700 ms, one job works at a time, and backends see at once that GPUs are clean.
    """

    MOVE_MS = 700

    def __init__(self) -> None:
        self.core = Scheduler(Config(drivers={"mock": DriverTraits(idempotent=True, probes=True)}), RollMux())
        self.now = 1_700_000_000_000
        self.facts: list[core_facts.Fact] = []
        hosts = [("r0", "rollout", "H20", 8), ("r1", "rollout", "H20", 8), ("t0", "train", "H800", 4)]
        self.gpus = {name: tuple(f"{name}/gpu{n}" for n in range(count)) for name, _, _, count in hosts}
        self.tell(
            Start(
                tuple(HostSpec(name, "mock", 500_000) for name, *_ in hosts),
                tuple(NodeSpec(f"{h}/all", h, self.gpus[h], (pool,), kind, 80_000, 3.5) for h, pool, kind, _ in hosts),
            )
        )

    def tell(self, given: Input):
        decision = self.core.handle(given, self.now)
        self.facts += decision.facts
        moves = [effect for effect in decision.effects if isinstance(effect, Perform)]
        self.now += self.MOVE_MS if moves else 0
        for effect in decision.effects:
            if isinstance(effect, Observe):
                self.tell(HostObserved(effect.host, self.observe(effect.host), "boot"))
        for move in moves:
            host = self.core.state.nodes[self.core.state.orders[move.order].node].host
            self.tell(OrderDone(move.order, self.observe(host)))
        return decision.answer

    def observe(self, host: str) -> tuple[GpuObservation, ...]:
        return tuple(GpuObservation(gpu, 0) for gpu in self.gpus[host])

    def run(self, *steps: tuple[str, int], gap_ms: int, end: bool = True) -> None:
        """One run of a job: phases of so many milliseconds, and a gap of its own before each."""
        job = self.tell(RegisterJob("team", "someone", self.spec())).job
        session = self.tell(OpenSession(job, pid=1, host="box")).session
        for number, (phase, took) in enumerate(steps):
            self.now += gap_ms
            slot = self.core.state.slots[self.tell(RequestSlot(job, session, phase, f"{job}-{number}")).slot]
            self.now += took
            self.tell(ReleaseSlot(slot.id, slot.fence))
        if end:
            self.tell(EndJob(job, "someone"))

    @staticmethod
    def spec() -> JobSpec:
        return JobSpec(
            name="math",
            phases=(PhaseSpec("rollout", ("rollout",)), PhaseSpec("train", ("train",))),
            wants=(Want("rollout", gpus=9), Want("train", named=("t0/all",))),
            states=(StateSpec("rollout", ram_mb=90_000, driver="mock", load_ms=5), StateSpec("train", driver="mock")),
            side=(PhaseSpec("init", ("rollout", "train")),),
            slo=1.5,
        )


STEPS = (("rollout", 10_000), ("train", 4000), ("rollout", 30_000), ("train", 6000))


@pytest.fixture
def daemon() -> Daemon:
    daemon = Daemon()
    daemon.run(*STEPS, ("rollout", 99_000), gap_ms=1000)
    daemon.now += 60_000
    daemon.run(*STEPS[:2], gap_ms=0)
    return daemon


def printed(folder: Path, facts: list[core_facts.Fact]) -> Options:
    """Options that name what ``rollmuxd facts --json`` would have printed."""
    lines = [json.dumps({"seq": n, **json.loads(core_facts.encode(fact))}) for n, fact in enumerate(facts, 1)]
    (folder / "facts.jsonl").write_text("\n".join(lines) + "\n")
    return Options(more={"file": str(folder / "facts.jsonl")})


def test_a_journals_runs_are_jobs_with_the_phases_that_were_recorded(tmp_path, daemon):
    workload = read("journal", printed(tmp_path, daemon.facts)).draw(0)
    first, second = workload.jobs
    assert (first.name, second.name, first.kind) == ("math", "math-run2", "team")
    assert first.series == ((10_000, 4000), (30_000, 6000)), "the iteration that was broken off is none"
    assert second.series == ((10_000, 4000),)
    assert (first.planned, first.work, second.work) == ((20_000, 5000), 2, 1)
    assert [phase.gap_ms for phase in first.spec.phases] == [1000, 1000]
    assert [phase.gap_ms for phase in second.spec.phases] == [0, 0]
    assert first.spec.slo == 1.5
    # a load on either pool, five gaps, and the phases; then its states are discarded
    assert (first.arrives_ms, first.lasts_ms) == (0, 2 * 700 + 5 * 1000 + 149_000)
    assert second.arrives_ms == first.lasts_ms + 700 + 60_000


def test_a_journals_nodes_are_the_inventory(tmp_path, daemon):
    workload = read("journal", printed(tmp_path, daemon.facts)).draw(0)
    workload.check()
    assert [(p.name, p.gpu_type, p.gpus_per_node, p.nodes, p.ram_mb) for p in workload.pools] == [
        ("rollout", "H20", 8, 2, 500_000),
        ("train", "H800", 4, 1, 500_000),
    ]
    assert {p.price_per_gpu_hour for p in workload.pools} == {3.5}
    assert wants(workload.jobs[0]) == {"rollout": 2, "train": 1}, "nine GPUs are two nodes, and one by name is one"


def test_a_journals_switches_are_measured_none_or_as_given(tmp_path, daemon):
    options = printed(tmp_path, daemon.facts)
    took = {}
    for switch in ("none", "table", 2500):
        job = read("journal", Options(more=options.more, switch=switch)).draw(0).jobs[0]
        took[switch] = [(state.load_ms, state.park_ms) for state in job.spec.states]
        assert {state.driver for state in job.spec.states} == {"sim"}
    assert took == {"none": [(0, 0), (0, 0)], "table": [(700, 0), (700, 0)], 2500: [(2500, 0), (2500, 0)]}


def test_a_journals_init_is_as_long_as_it_was_and_what_is_loaded_for_it_is_no_warm_start(tmp_path):
    daemon = Daemon()
    daemon.run(("init", 5000), *STEPS, gap_ms=0)
    options = printed(tmp_path, daemon.facts)
    job = read("journal", Options(more=options.more, switch="table")).draw(0).jobs[0]
    assert [(phase.name, phase.planned_ms) for phase in job.spec.side] == [("init", 5000)]
    assert set(job.cold_ms.values()) == {5000}
    assert [state.load_ms for state in job.spec.states] == [5, 0], "as registered, since none was measured"
    assert read("journal", Options(more=options.more, switch="none")).draw(0).jobs[0].spec.side == ()


def test_a_run_that_is_not_over_ends_with_the_journal_and_one_that_did_nothing_is_left_out(tmp_path):
    daemon = Daemon()
    daemon.run(*STEPS, gap_ms=0)
    daemon.run(gap_ms=0)
    daemon.run(*STEPS[:2], gap_ms=0, end=False)
    workload = read("journal", printed(tmp_path, daemon.facts)).draw(0)
    assert [job.name for job in workload.jobs] == ["math", "math-run3"]
    began = next(fact.at for fact in daemon.facts if isinstance(fact, core_facts.JobRegistered))
    assert workload.jobs[1].arrives_ms + workload.jobs[1].lasts_ms == daemon.facts[-1].at - began


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2, column 'fact': no JSON"),
        ("job_id,submit_s", "line 2, column 'fact': no JSON"),
        ('{"at":1,"fact":"slot_eaten"}', "line 2, column 'fact': no fact that this version knows: .*slot_eaten"),
        ('{"at":1,"fact":"slot_over"}', "no fact that this version knows: .*missing required field `slot`"),
    ],
)
def test_a_broken_journal_line_is_named(tmp_path, daemon, line, said):
    options = printed(tmp_path, daemon.facts)
    path = Path(options.more["file"])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]))
    with pytest.raises(Malformed, match=said) as caught:
        read("journal", options)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "it may have to cross processes"


def test_a_journal_that_cannot_be_replayed_says_why(tmp_path, daemon):
    with pytest.raises(ValueError, match="a journal is needed: file=PATH"):
        read("journal")
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl is no file"):
        read("journal", Options(more={"file": str(tmp_path / "no.jsonl")}))
    only_jobs = [fact for fact in daemon.facts if not isinstance(fact, core_facts.NodeAdded)]
    with pytest.raises(ValueError, match="tells of no nodes: print the facts as an operator"):
        read("journal", printed(tmp_path, only_jobs))
    nobody = [fact for fact in daemon.facts if not isinstance(fact, core_facts.SlotReleased)]
    with pytest.raises(ValueError, match="has 2 runs of jobs, and none that finished each of its phases"):
        read("journal", printed(tmp_path, nobody))
