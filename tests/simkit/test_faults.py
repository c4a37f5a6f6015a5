"""Jobs, hosts, orders and the daemon fail, and every promise is kept: the checkers are always there.

That a run ends at all says much: each job's work was done or its trace was over, nothing was left on any GPU, no node
was left in a group, no order was open. ``small`` has the worlds; here are a few seeds of each (``make swarm`` has
as many as there is time for), and single faults in worlds so small that one can say what has to follow.
"""

from types import SimpleNamespace

import msgspec
import pytest

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import DriverTraits
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.spec import JobSpec, OnLoss, PhaseSpec, StateSpec, Want
from rollmuxd.sim import machines
from rollmuxd.sim.policies import policy_under_test
from rollmuxd.sim.workload import Pool, SimJob, Workload
from rollmuxd.sim.world import LEASE_MS, Listener
from simkit import checked, faults, small
from simkit.faults import PRESETS, Faults
from simkit.faulty_world import Fate, FaultyMachines, FaultyWorld

HOUR = 3_600_000


def job(name, iterations=10, *, on_loss=OnLoss.HOLD):
    phases = (PhaseSpec("rollout", ("rollout",), 100_000), PhaseSpec("train", ("train",), 50_000))
    states = tuple(StateSpec(pool, ram_mb=100_000, driver="sim", load_ms=5_000) for pool in ("rollout", "train"))
    spec = JobSpec(name, phases, (Want("rollout"), Want("train")), states=states, on_loss=on_loss)
    took = ((100_000, 50_000),)
    return SimJob(name, "made", 0, HOUR, spec, took, {"rollout": 1, "train": 1}, iterations=iterations)


class Small(Listener):
    """Two jobs on one node per pool; faults only where the test says so."""

    def __init__(self, *jobs, settings=None, idempotent=True, probes=True):
        pools = (Pool("rollout", "H20", 1.85, nodes=1), Pool("train", "H800", 5.28, nodes=1))
        # a rate that makes the world one of faults, and is too low for any to come
        settings = settings or Faults(deaths_per_hour=1e-9, restart_ms=300_000, operator_ms=60_000)
        self.heard = []
        self.world = FaultyWorld(
            settings, Workload("made", jobs or (job("X"), job("Y")), pools), policy_under_test("rollmux"), 0, "work",
        )  # fmt: skip
        self.world.listeners.append(self)
        checked.check(self.world)
        traits = DriverTraits(idempotent=idempotent, probes=probes)
        self.world.config = msgspec.structs.replace(self.world.config, drivers={"sim": traits})
        self.world.core = type(self.world.core)(self.world.config, self.world.policy_under_test.policy(0))

    def hear(self, now, given, decision, state):
        self.heard += [(now, given, fact) for fact in decision.facts] or [(now, given, None)]

    def at(self, seconds, what, *args):
        self.world.kernel.at(seconds * 1000, what, *args)

    def process(self, name):
        return next(process for process in self.world.processes.values() if process.job.name == name)

    def run(self):
        return self.world.run()

    def when(self, kind, **like):
        found = [(now, fact) for now, _, fact in self.heard if isinstance(fact, kind)]
        return [now / 1000 for now, fact in found if all(getattr(fact, key) == it for key, it in like.items())]


# ---- seeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_whatever_goes_wrong_no_promise_is_broken(preset, seed):
    outcome, counted = small.play(preset, seed)

    assert all(made.ended_ms is not None for made in outcome.jobs)
    assert bool(counted) is (preset != "none")


def test_the_presets_have_things_go_wrong_that_they_say():
    counted = {name: set(small.play(name, 3)[1]) for name in ("jobs", "hosts", "daemon", "all")}

    assert {"deaths", "detaches"} <= counted["jobs"]
    assert {"outages", "reboots"} <= counted["hosts"]
    assert {"daemon deaths"} <= counted["daemon"]
    assert {"deaths", "outages", "daemon deaths"} <= counted["all"]


# ---- one at a time ---------------------------------------------------------------------------------------------------


def test_nothing_fails_where_nothing_is_to():
    assert not Faults().any
    assert not PRESETS["none"].any
    quiet = checked.make(Faults(), small.small(0), policy_under_test("rollmux"), 0, "work")

    assert not isinstance(quiet, FaultyWorld)
    assert quiet.config.lease_ms == LEASE_MS


def test_a_process_that_dies_is_lost_within_its_lease_and_comes_again_as_a_new_run():
    small = Small(job("X"), job("Y", 20))
    small.at(250, lambda: small.world.dies(small.process("X")))
    outcome = small.run()

    heard_last = 240  # every process beats twice in 60 s
    assert small.when(f.SessionLost) == [heard_last + 60]
    assert [fact.run for _, _, fact in small.heard if isinstance(fact, f.JobRegistered) and fact.job == "j1"] == [1, 2]
    assert [made.iterations for made in outcome.jobs] == [10, 20]


def test_who_dies_in_an_iteration_begins_it_again():
    """X dies in the midst of its second iteration: of its ten iterations it has done one, and does nine more."""
    small = Small(job("X"))
    small.at(250, lambda: small.world.dies(small.process("X")))
    small.run()

    assert len(small.when(f.SlotReleased)) == 20
    assert len(small.when(f.SlotTakenAway)) == 1


def test_a_hanging_process_keeps_its_gpus_until_it_is_gone():
    """It holds the rollout node; Y trains meanwhile, and rolls out again once somebody has killed X."""
    small = Small(job("X"), job("Y"))

    def hangs():
        process = small.process("X")
        process.silent = True
        small.world.later(process, 600_000, small.world.dies)

    small.at(50, hangs)
    small.run()

    assert small.when(f.SessionLost) == [90]  # heard of at 30 s
    grants = [at for at in small.when(f.SlotGranted) if 50 < at < 700]
    assert min(at for at in small.when(f.SlotOver) if at > 50) >= 650
    assert [at for at in grants if at < 650] == []


def test_on_loss_kill_ends_a_hanging_process_at_once():
    small = Small(job("X", on_loss=OnLoss.KILL), job("Y"))
    small.at(50, lambda: setattr(small.process("X"), "silent", True))
    small.run()

    assert small.when(f.SessionLost) == [90]
    assert 90 <= small.when(f.SlotOver)[0] < 93


def test_a_process_that_wakes_up_too_late_learns_that_it_is_lost():
    small = Small(job("X", 3), job("Y", 3))

    def hangs():
        process = small.process("X")
        process.silent = True
        small.world.later(process, 120_000, small.world._wakes)

    small.at(50, hangs)
    small.run()

    assert small.world.counted == {"told that it is lost": 1}


def test_an_order_without_a_word_is_asked_about_and_its_job_set_aside():
    small = Small(job("X"), job("Y"), settings=Faults(orders_lost=1e-9, operator_ms=60_000))
    small.world.draw_fate = lambda move: Fate.LOST if move.order == "o2" else Fate.DONE
    small.run()

    assert len(small.when(f.OrderContactLost, order="o2")) == 1
    assert len(small.when(f.JobQuarantined)) == len(small.when(f.JobResumed)) == 1


def test_bytes_that_linger_keep_their_gpus_from_the_next():
    small = Small(job("X", 2), job("Y", 2), settings=Faults(lingers=1.0, linger_ms=10_000))
    small.run()

    assert len(small.when(f.GpusNotClean)) > 0
    assert small.when(f.NodeQuarantined) == []


def test_a_host_that_comes_back_empty_has_lost_what_ran_there():
    small = Small(job("X"), job("Y"))
    small.world.chance.so = lambda share: share >= 0.5
    small.world.chance.about = lambda mean: mean
    small.at(60, small.world._outage)  # the first host in use: rollout1
    small.run()

    assert small.when(f.NodeLost) != []
    assert small.when(f.HostBooted, boot_id="boot-2") != []
    assert len(small.when(f.JobRegistered)) == 4  # both were there, and come again


def dies_of(small, kind, moment):
    """The daemon dies of the first such input: before it decides, before that is written, or before anybody hears."""
    dies, within = small.world.daemon_dies_of, small.world.chance.within
    small.world.crash_pending = True
    small.world.daemon_dies_of = lambda given: isinstance(given, kind) and dies(given)
    small.world.chance.within = lambda most: moment if most == 2 else within(most)


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_a_daemon_that_dies_forgets_nothing_that_it_said(moment):
    """It dies of X's release: before it decides, before that is written, or before X hears of it."""
    settings = Faults(daemon_deaths_per_hour=1e-9)
    small = Small(job("X", 3), job("Y", 3), settings=settings)
    dies_of(small, i.ReleaseSlot, moment)
    outcome = small.run()

    assert small.world.counted["daemon deaths"] == 1
    assert len(small.when(f.DaemonStarted)) == 2
    assert [made.iterations for made in outcome.jobs] == [3, 3]
    released = small.when(f.SlotReleased, slot="s1")
    assert len(released) == 1
    (granted,) = small.when(f.SlotGranted, slot="s1")
    assert (released[0] - granted < 101) is (moment == 2)  # its rollout takes 100 s; else X had to call again


def test_a_state_that_replay_does_not_give_again_is_caught():
    small = Small(settings=Faults(daemon_deaths_per_hour=1e-9))
    small.at(50, lambda: small.world.core.state.jobs["j1"].progress.__setattr__("parks", 77))
    dies_of(small, i.ReleaseSlot, moment=0)

    with pytest.raises(BrokenInvariant, match="replay_gives_the_very_state"):
        small.run()


def test_a_job_that_never_ends_is_caught():
    """Its process is alive, beats on, and does nothing more."""
    small = Small(job("X"), job("Y"))
    small.at(50, lambda: setattr(small.process("X"), "stuck", True))

    with pytest.raises(BrokenInvariant, match=r"every_job_ends: .*X"):
        small.run()


def test_chance_is_seeded_and_apart_from_any_other():
    one, same, another = (faults.Chance(PRESETS["all"], seed) for seed in (1, 1, 2))

    assert [one.about(1_000) for _ in range(9)] == [same.about(1_000) for _ in range(9)]
    assert one.until_next(0.0) is None
    assert one.about(1_000) != another.about(1_000)
    assert all(100 <= one.about(1_000) <= 10_000 for _ in range(1_000))


def test_what_lingers_of_a_park_leaves_nothing_by_itself_when_gpus_are_given_back():
    key = machines.key_of("j1", 1, "rollout", "r1")
    there = FaultyMachines(SimpleNamespace(gpus_of={"h1": ("h1/gpu0",)}))
    there.on_gpu["h1/gpu0"] = {key: 20_000, f"{key}|stays-1": 20_000}
    there.give_back("j1", 1, ["h1/gpu0"], {"rollout": 500})
    assert there.on_gpu["h1/gpu0"] == {f"{key}|left": 500}
