"""A fidelity says when a phase ends, and may say it again: the world follows, by hand-worked times."""

from simkit import checked
from simkit.chaos_policy import UNPRUNED

from rollmuxd.core import facts as f
from rollmuxd.core.spec import JobSpec, PhaseSpec, Want
from rollmuxd.sim.execution import NEVER, Durations, Execution
from rollmuxd.sim.workload import Pool, SimJob, Workload

POOLS = (Pool("rollout", "H20", 1.85, nodes=1), Pool("train", "H800", 5.28, nodes=1))


def workload(iterations=2):
    phases = tuple(PhaseSpec(name, (name,), planned_ms=100_000) for name in ("rollout", "train"))
    spec = JobSpec("X", phases, (Want("rollout"), Want("train")))
    job = SimJob("X", "made", 0, 1, spec, ((100_000, 100_000),), {"rollout": 1, "train": 1}, iterations=iterations)
    return Workload("made", (job,), POOLS)


def released(executions):
    found = []
    checked.run(workload(), UNPRUNED, seed=0, accounting="work", hear=found.append, executions=executions)
    return [fact.at / 1000 for fact in found if isinstance(fact, f.SlotReleased)]


class Told(Durations):
    """Rollouts say ``first`` when they begin, and ``then`` after 10 s; seconds, None: not known."""

    def __init__(self, first, then):
        self.first, self.then = first, then

    def begin(self, begun, changed):
        if begun.phase.name != "rollout":
            return super().begin(begun, changed)
        now = self._kernel.now
        made = Execution(100_000, NEVER if self.first is None else now + self.first * 1000)

        def later():
            made.ends_ms = now + self.then * 1000
            changed()

        self._kernel.after(10_000, later)
        return made


def test_a_phase_ends_when_its_series_says():
    assert released(Durations()) == [100, 200, 300, 400]


def test_an_end_that_comes_later_than_was_said_is_waited_for():
    assert released(Told(50, 80)) == [80, 180, 260, 360]


def test_an_end_that_comes_earlier_than_was_said_is_taken():
    assert released(Told(500, 30)) == [30, 130, 160, 260]


def test_a_phase_whose_end_is_not_known_at_first_runs_until_it_is():
    assert released(Told(None, 70)) == [70, 170, 240, 340]
