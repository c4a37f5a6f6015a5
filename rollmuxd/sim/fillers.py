"""Fillers in a simulated world: processes that always have work, and give way when they are asked to.

They are no jobs of the workload: a run ends when its jobs have. What fillers had is a figure beside those of jobs.
"""

from typing import TYPE_CHECKING, Final

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.ids import JobId, Millis, NodeId, SlotId
from rollmuxd.core.model import Slot, SlotStatus
from rollmuxd.core.spec import FILLER, Filler, JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.sim.outcome import Harvest

if TYPE_CHECKING:
    from rollmuxd.sim.world import World

#: a driver that parks a filler's state without its process
DRIVER: Final = "sim-filler"
#: loading and parking what a filler has
MOVE_MS: Final = 5_000
#: how soon a filler has given its slot back, and how soon it says that it will
GIVES_WAY_MS: Final = 500
YIELD_MS: Final = 2_000


def specs(pools: dict[str, int], count: int) -> list[JobSpec]:
    """So many fillers, spread over pools by how many nodes these have."""
    names = [pool for pool, nodes in pools.items() for _ in range(nodes)]
    return [_spec(f"filler-{at + 1}", names[at * len(names) // count]) for at in range(count)]


def _spec(name: str, pool: str) -> JobSpec:
    return JobSpec(
        name=name,
        phases=(PhaseSpec(FILLER, (pool,)),),
        wants=(Want(pool),),
        states=(StateSpec(pool, driver=DRIVER, load_ms=MOVE_MS, park_ms=MOVE_MS),),
        filler=Filler(yield_ms=YIELD_MS),
    )


class Fillers:
    """The fillers of a world, and what they had of its nodes."""

    def __init__(self, world: "World", count: int) -> None:
        self._world, self._count = world, count
        self._sessions: dict[JobId, str] = {}
        self._asked = 0
        #: lent nodes on which a filler works: since when it is to be booked, and whether the node is in a group
        self._working: dict[NodeId, tuple[Millis, bool]] = {}
        self.harvest = Harvest()

    def begin(self) -> None:
        """Each registers, and asks for a loan."""
        pools: dict[str, int] = {}
        for name in self._world.inventory.pool_of.values():
            pools[name] = pools.get(name, 0) + 1
        for spec in specs(pools, self._count) if self._count else ():
            job = self._world.tell(i.RegisterJob("fillers", "sim", spec)).answer.job
            assert job is not None
            opened = self._world.tell(i.OpenSession(job, pid=1, host="sim", started="0")).answer.session
            assert opened is not None
            self._sessions[job] = opened
            self._ask(job)

    def end(self) -> None:
        """No job is left: the fillers end, too."""
        self.placed()
        self._working = {}
        for job in self._sessions:
            self._world.tell(i.EndJob(job, by="sim"))
        self._sessions = {}

    def beat(self) -> None:
        """Their sessions are renewed."""
        for session in self._sessions.values():
            self._world.tell(i.Heartbeat(session))

    def has(self, job: JobId) -> bool:
        """Whether the job is a filler."""
        return job in self._sessions

    def granted(self, slot: Slot) -> None:
        """It works until it is asked to give way."""
        self._world.machines.nobody_else_is_on(slot.gpus, slot.job, slot.run)
        state = self._world.core.state
        (node,) = (name for names in state.jobs[slot.job].pins.values() for name in names)
        self._working[node] = self._world.kernel.now, state.nodes[node].group is not None

    def _ask(self, job: JobId) -> None:
        self._asked += 1
        self._world.tell(i.RequestSlot(job, self._sessions[job], FILLER, f"filler-{self._asked}"))

    def placed(self) -> None:
        """Jobs came or left: time until now was in a group, or was not."""
        for node in self._working:
            self._book(node)

    def _book(self, node: NodeId) -> None:
        since, in_group = self._working[node]
        now, pool = self._world.kernel.now, self._world.inventory.pool_of[node]
        where = self.harvest.in_groups_ms if in_group else self.harvest.free_ms
        where[pool] = where.get(pool, 0) + now - since
        self._working[node] = now, self._world.core.state.nodes[node].group is not None

    def slot_ended(self, slot: Slot) -> None:
        """The filler works no longer."""
        for node in [name for names in self._world.core.state.jobs[slot.job].pins.values() for name in names]:
            if node in self._working:
                self._book(node)
                del self._working[node]

    def asked_back(self, fact: f.YieldAsked) -> None:
        """It gives its slot back."""
        reason = fact.reason.code
        self.harvest.yields[reason] = self.harvest.yields.get(reason, 0) + 1
        self._world.kernel.after(GIVES_WAY_MS, self._release, fact.slot)

    def _release(self, name: SlotId) -> None:
        slot = self._world.core.state.slots.get(name)
        if slot is not None and slot.fence is not None and slot.status is SlotStatus.RUNNING:
            self.slot_ended(slot)
            self._world.tell(i.ReleaseSlot(name, slot.fence))
            self._again(slot.job)

    def _again(self, job: JobId) -> None:
        if self.has(job) and self._world.core.state.jobs[job].queued is None:
            self._ask(job)

    def loan_ended(self, fact: f.LoanEnded) -> None:
        """A loan that was revoked while its state was loaded is followed by the next request."""
        self._world.kernel.after(0, self._again, fact.job)

    def claimed(self, fact: f.SlotClaimed) -> None:
        """One more loan; or a job has waited for a filler."""
        if fact.turn is None:
            self.harvest.loans += 1
        if fact.lent_ms:
            self.harvest.held_up_ms.append(fact.lent_ms)
