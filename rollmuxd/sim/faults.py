"""What goes wrong in a simulated world, how often, when, and what follows: seeded, apart from every other chance.

Rates are per hour of simulated time and per thing that can fail; shares are of one. Faults end with the last job, so
that what is left can be cleared away.

What follows is what follows live. A process that dies is silent and its memory is gone; a new run registers after a
while and goes on from the last finished iteration (RollMux: a recovered job is a new arrival; research: rollmux.md
1.14). An order of which no word comes is out of contact after its limit. A daemon that dies takes its soft memory, its
unanswered calls and its drivers' reports with it, at any of three moments: before it decides, after that but before
anything is durable, or when all is durable and nobody has heard. Whoever called calls again. It comes back from the
journal, which must give the very state that it had. Operators look after what needs a person, and take their time.

The presets are meant to find bugs, so they are about a thousand times harsher than a good cluster. For comparison:

- hosts: 419 unexpected interruptions in 54 days on 16,384 GPUs (the Llama 3 report, section 3.3.4), that is one in
  6,300 hours for a host of eight. The preset ``hosts`` has one in ten hours.
- jobs: RollMux' own failure run kills one job and resubmits it 2,300 s later (research: rollmux.md 1.14). The preset
  ``jobs`` kills a job every two hours, and resubmits it after ten minutes in the mean, never below one minute.
- moves: about one in twenty checkpoints or restores of ``cuda-checkpoint`` failed without a way back (research:
  peers.md, section on residency drivers). The presets fail one order in two hundred, since each costs a quarantine.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.apply import apply
from rollmuxd.core.config import DriverTraits
from rollmuxd.core.decision import Answer
from rollmuxd.core.effects import Kill, Launch
from rollmuxd.core.errors import BrokenInvariant, Rejected
from rollmuxd.core.model import (
    HostId,
    JobStatus,
    LaunchId,
    Millis,
    Node,
    NodeStatus,
    OrderId,
    OrderKind,
    SessionStatus,
    Slot,
    SlotStatus,
)
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.state import State
from rollmuxd.sim.machines import Fate, Move

if TYPE_CHECKING:
    from rollmuxd.sim.world import Process, Then, World

HOUR_MS: Final = 3_600_000
#: a caller that was refused, or got no answer, tries again within this (client: back-off up to it)
RETRY_MS: Final = 15_000
#: a look at a host takes up to this; what it saw is of its beginning
LOOK_MS: Final = 1_500
#: a poll notices within this that a host is out of reach, or back
POLL_MS: Final = 30_000
#: a process that is told to go is gone after this
EXIT_MS: Final = 60_000


class Faults(Struct, frozen=True):
    """How often what goes wrong. All zero: nothing does."""

    # ---- jobs' processes
    #: a process ends without a word; its memory goes with it
    deaths_per_hour: float = 0.0
    #: a process falls silent, and what it has on GPUs stays; half of them come back after a while
    hangs_per_hour: float = 0.0
    #: a phase never ends although its process beats on, until somebody revokes the slot
    stalls_per_hour: float = 0.0
    #: nobody attends a request for a while
    detaches_per_hour: float = 0.0
    #: from a process' end to the registration of its next run, in the mean; at least a tenth of it
    restart_ms: Millis = 600_000
    #: how long a hanging process is left alone, in the mean
    hang_ms: Millis = 600_000
    #: after what time an operator looks after a stalled slot or a quarantined job
    operator_ms: Millis = 600_000
    # ---- orders
    #: share of orders that fail, with nothing done
    orders_fail: float = 0.0
    #: share of orders of which no word comes within their limit; half of them are done all the same
    orders_lost: float = 0.0
    #: after what time no word is no word (the daemon's ``order_s``)
    order_limit_ms: Millis = 120_000
    #: share of parks and discards after which bytes stay for a while, and for how long in the mean
    lingers: float = 0.0
    linger_ms: Millis = 20_000
    #: no driver fetches what is parked on another host
    near: bool = False
    # ---- hosts
    #: a host is out of reach; ``reboots`` of these times it comes back with another boot id, and empty
    outages_per_hour: float = 0.0
    outage_ms: Millis = 300_000
    reboots: float = 0.5
    # ---- the daemon
    #: it dies, sometimes between making facts durable and answering
    daemon_deaths_per_hour: float = 0.0
    daemon_down_ms: Millis = 20_000
    #: from when on nothing more begins to go wrong; 0: until the last job has ended
    until_ms: Millis = 0

    @property
    def any(self) -> bool:
        """Whether anything can go wrong."""
        return any(
            (
                self.deaths_per_hour,
                self.hangs_per_hour,
                self.stalls_per_hour,
                self.detaches_per_hour,
                self.orders_fail,
                self.orders_lost,
                self.lingers,
                self.outages_per_hour,
                self.daemon_deaths_per_hour,
            )
        )

    @property
    def longest_ms(self) -> Millis:
        """What may be out of order for this long, by these faults: chance is cut off at ten times the mean."""
        hosts = self.outage_ms if self.outages_per_hour else 0
        bytes_left = self.linger_ms if self.lingers else 0
        hung = self.hang_ms if self.hangs_per_hour else 0
        daemon = self.daemon_down_ms if self.daemon_deaths_per_hour else 0
        orders = self.order_limit_ms if self.orders_lost or self.orders_fail else 0
        return 10 * (hosts + bytes_left + hung + daemon) + 2 * orders + (3 * self.operator_ms if self.any else 0)


_JOBS: Final = Faults(deaths_per_hour=0.5, hangs_per_hour=0.25, stalls_per_hour=0.1, detaches_per_hour=2.0)
_HOSTS: Final = Faults(outages_per_hour=0.1, orders_fail=0.005, orders_lost=0.005, lingers=0.05)
_DAEMON: Final = Faults(daemon_deaths_per_hour=4.0)

#: by name, for ``--faults``
PRESETS: Final[dict[str, Faults]] = {
    "none": Faults(),
    "jobs": _JOBS,
    "hosts": _HOSTS,
    "daemon": _DAEMON,
    "all": Faults(
        deaths_per_hour=_JOBS.deaths_per_hour,
        hangs_per_hour=_JOBS.hangs_per_hour,
        stalls_per_hour=_JOBS.stalls_per_hour,
        detaches_per_hour=_JOBS.detaches_per_hour,
        outages_per_hour=_HOSTS.outages_per_hour,
        orders_fail=_HOSTS.orders_fail,
        orders_lost=_HOSTS.orders_lost,
        lingers=_HOSTS.lingers,
        daemon_deaths_per_hour=_DAEMON.daemon_deaths_per_hour,
    ),
}


class Chance:
    """One seeded source for all faults of a run."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self.random = Random(f"faults:{seed}")

    def until_next(self, per_hour: float) -> Millis | None:
        """When the next of something that happens this often comes; None: never."""
        return round(self.random.expovariate(per_hour) * HOUR_MS) + 1 if per_hour else None

    def about(self, mean_ms: Millis) -> Millis:
        """A time around a mean: exponential, between a tenth and ten times of it."""
        return round(min(max(self.random.expovariate(1) * mean_ms, mean_ms / 10), 10 * mean_ms))

    def within(self, most_ms: Millis) -> Millis:
        """Any time up to a bound."""
        return self.random.randrange(most_ms + 1)

    def so(self, share: float) -> bool:
        """Whether something of this share comes to be."""
        return self.random.random() < share


class DaemonDied(Exception):
    """The daemon is not there, or died of this call: nobody knows whether it was heard."""


class FaultInjector:
    """Has things go wrong in one world, and lets happen what follows."""

    def __init__(self, world: "World", faults: Faults, seed: int) -> None:
        self.world, self.faults = world, faults
        self.chance = Chance(faults, seed)
        #: what a restart begins with: the facts so far, as they were written
        self.written = State()
        #: the daemon dies of the next call
        self.crash_pending = False
        #: it died when its memory was ahead of the journal
        self.ahead = False
        self.boots = 1
        self.counted: dict[str, int] = {}
        self._lingering = 0
        #: launches that backends were told, and whether their processes were started; None: not yet
        self._launched: dict[LaunchId, bool | None] = {}
        #: how often an operator has looked at something that was stuck, by its name
        self._looks: dict[str, int] = {}
        #: when the newest look at each host began of which the daemon has heard
        self._looked_at: dict[HostId, Millis] = {}

    @property
    def over(self) -> bool:
        """Every job has ended."""
        return not self.world.waiting_to_end

    @property
    def calm(self) -> bool:
        """Nothing begins to go wrong any more."""
        until = self.faults.until_ms
        return self.over or (until > 0 and self.world.kernel.now >= until)

    def latest_end(self) -> Millis:
        """When every job must have ended, whatever goes wrong: all of them one after the other, ten times over."""
        jobs = self.world.jobs
        longest = sum(max(job.lasts_ms, job.work * job.solo_ms) for job in jobs)
        if not jobs:
            return 0
        return max(jobs[-1].arrives_ms, self.faults.until_ms) + 10 * longest + self.faults.longest_ms

    def traits(self) -> DriverTraits:
        """A driver that may be told twice, or asked, or both, or neither."""
        return DriverTraits(idempotent=self.chance.so(0.5), probes=self.chance.so(0.5), copies=not self.faults.near)

    def begin(self) -> None:
        """Plan what is not of a process."""
        self._plan(self.faults.outages_per_hour * len(self.world.inventory.gpus_of), self._outage)
        self._plan(self.faults.daemon_deaths_per_hour, self._doom)
        self.world.kernel.after(self.faults.operator_ms, self._operator)

    def _plan(self, per_hour: float, what: Callable[[], None]) -> None:
        wait = self.chance.until_next(per_hour)
        if wait is not None:
            self.world.kernel.after(wait, self._again, per_hour, what)

    def _again(self, per_hour: float, what: Callable[[], None]) -> None:
        if not self.calm:
            what()
            self._plan(per_hour, what)

    def _count(self, what: str) -> None:
        self.counted[what] = self.counted.get(what, 0) + 1

    # ---- processes ---------------------------------------------------------------------------------------------------

    def accompany(self, process: "Process") -> None:
        """A process begins: plan its end, and what happens to it before."""
        faults = self.faults
        for per_hour, what in (
            (faults.deaths_per_hour, self._dies_by_chance),
            (faults.hangs_per_hour, self._hangs),
            (faults.stalls_per_hour, self._stalls),
            (faults.detaches_per_hour, self._detaches),
        ):
            wait = self.chance.until_next(per_hour)
            if wait is not None:
                self.world.later(process, wait, what)

    def _dies_by_chance(self, process: "Process") -> None:
        if self.calm:
            return
        self._count("deaths")
        self.dies(process)

    def dies(self, process: "Process") -> None:
        """It ends without a word; what it had on GPUs is gone (at once, or soon); a new run comes after a while."""
        if not process.alive:
            return
        world = self.world
        process.life += 1
        process.alive = process.silent = process.stuck = process.knocks = False
        process.slot, process.session, process.request, process.began_ms, process.launch = "", "", None, None, ""
        world.charge(process)
        world.machines.wipe(process.name, process.run, lingering=self.lingering())
        if not process.gone:
            world.later(process, self.chance.about(self.faults.restart_ms), self._restarts)
        elif world.processes.get(process.name) is process:  # nobody heard that it is done: its lease will tell
            world.ended(process)

    def _restarts(self, process: "Process") -> None:
        if process.gone:
            return
        process.alive = process.job.spec.launch is None
        if self.world.by_work and process.step >= process.job.work:
            self.world.end(process)
        elif process.alive:
            self.world.register(process)
        else:
            self._sees_to(process)

    def _sees_to(self, process: "Process") -> None:
        """Whoever has a backend start his job registers it again when it is lost for good."""
        job = self.world.core.state.jobs[process.name]
        if not job.live and job.relaunch_at is None:
            self.world.register(process)
        else:
            self.world.later(process, self.chance.about(self.faults.restart_ms), self._restarts)

    # ---- processes that backends start -------------------------------------------------------------------------------

    def awaits_launch(self, process: "Process") -> None:
        """A backend starts it when it has its place, and whoever registered it sees to that now and then."""
        process.alive = bool(process.launch)
        if not process.alive:
            self.world.later(process, self.chance.about(self.faults.restart_ms), self._restarts)

    def launch(self, told: Launch) -> None:
        """A backend is told to start a process: once, however often it is told."""
        known = self._launched.setdefault(told.launch, None)
        wait = self.chance.within(LOOK_MS)
        job = self.world.core.state.jobs[told.job]
        if known is None:
            assert job.launch is not None
            self.world.kernel.after(wait, self._launch, told, job.run, job.idempotency_key, job.launch.host)
        else:
            self.world.kernel.after(wait, self._say_launched, told.launch)

    def _launch(self, told: Launch, run: int, key: str, host: HostId) -> None:
        if self._launched[told.launch] is not None:
            return  # it was told twice
        world, process = self.world, self.world.processes.get(told.job)
        fails = not self.calm and self.chance.so(self.faults.orders_fail)
        begins = process is not None and not process.gone and host not in world.machines.out and not fails
        self._launched[told.launch] = begins
        self._say_launched(told.launch)
        if process is None or not begins:
            return
        self.dies(process)  # one of before, whose end nobody told it
        process.life += 1
        process.alive, process.run, process.launch = True, run, told.launch
        process.knocks = False  # whoever registered it need not call again: it was heard
        world.begin_anew(process)
        if not self.calm and self.chance.so(self.faults.orders_lost):
            self._count("processes that never came")
            world.later(process, self.chance.within(RETRY_MS), self.dies)
        else:
            world.later(process, self.chance.within(RETRY_MS), lambda it: world.open(it, key))

    def _say_launched(self, launch: LaunchId) -> None:
        if self._launched[launch]:
            self.world.report(i.Launched(launch, pid=1, started=launch))
        else:
            self._count("launches failed")
            self.world.report(i.LaunchFailed(launch, "no such file"))

    def exits(self, process: "Process") -> None:
        """Its job has ended: it clears away and goes."""
        if process.alive:
            self.world.later(process, EXIT_MS, self.dies)

    def _hangs(self, process: "Process") -> None:
        """It falls silent; after a while it is killed, or wakes up and knows of nothing."""
        if self.calm or process.gone:
            return
        self._count("hangs")
        process.silent = True
        ends = self._wakes if self.chance.so(0.5) else self.dies
        self.world.later(process, self.chance.about(self.faults.hang_ms), ends)

    def _wakes(self, process: "Process") -> None:
        process.silent = False
        if process.slot and process.ends_ms <= self.world.kernel.now:
            self.world.phase_over(process, process.slot)
        else:
            self.world.ask_again(process)

    def _stalls(self, process: "Process") -> None:
        """Its phase does not end; an operator revokes the slot, and it is killed."""
        if self.calm or process.gone:
            return
        if not process.slot:
            self.world.later(process, RETRY_MS, self._stalls)
            return
        self._count("stalls")
        process.stuck = True
        self.world.later(process, self.chance.within(2 * self.faults.operator_ms), self._revoked)

    def _revoked(self, process: "Process") -> None:
        if process.slot:
            self.world.call(process, i.RevokeSlot(process.slot, by="operator", reason="it does not end"))
        self.world.later(process, self.chance.within(EXIT_MS), self.dies)

    def _detaches(self, process: "Process") -> None:
        """Its call breaks while it waits; it asks again after a while."""
        if self.calm or process.gone:
            return
        job = self.world.core.state.jobs[process.name]
        slot = job.queued or job.slot
        if self.world.up and process.request is not None and slot is not None and not process.knocks:
            self._count("detaches")
            self.world.call(process, i.DetachSlot(slot))
            longest = self.world.config.reattach_ms * 3 // 2
            self.world.later(process, self.chance.within(longest), self.world.ask_again)
        wait = self.chance.until_next(self.faults.detaches_per_hour)
        assert wait is not None
        self.world.later(process, wait, self._detaches)

    # ---- what processes are told -------------------------------------------------------------------------------------

    def hears(self, process: "Process", slot: Slot) -> bool:
        """Whether the process is there to hear of this grant, and waits for it."""
        request = process.request
        return process.alive and not process.silent and request is not None and request.request_id == slot.request_id

    def asked(self, process: "Process", answer: Answer) -> None:
        """What became of a request: it waits, runs already (the answer was lost), or is past and made anew."""
        slot = self.world.core.state.slots[answer.slot or ""]
        if process.slot or process.request is None or process.request.request_id != slot.request_id:
            return
        if slot.status in (SlotStatus.RUNNING, SlotStatus.TAIL):
            self.world.begin_phase(process, slot)
        elif slot.status not in (SlotStatus.QUEUED, SlotStatus.LOADING):
            self.world.later(process, self.chance.within(RETRY_MS), self._asks_anew)

    def _asks_anew(self, process: "Process") -> None:
        """What it waited for will not be; unless it has asked again already, and has had its phase since."""
        job = self.world.core.state.jobs[process.name]
        if process.slot or process.request is None:
            return
        if job.slot is None and job.queued is None:
            self.world.ask(process)
        else:
            self.world.ask_again(process)

    def released(self, process: "Process", answer: Answer) -> None:
        """A release was accepted; its ``next`` may have been refused, or granted in an answer that was lost."""
        if process.request is not None and not process.silent:
            wait = RETRY_MS if answer.next_slot is None else 0
            self.world.later(process, wait, self.world.ask_again)

    def refused(self, process: "Process", life: int, given: i.Input, no: Rejected) -> None:
        """What a process makes of a refusal: it comes again later, or learns that it is no more."""
        world = self.world
        if isinstance(given, i.EndJob):
            world.ended(process)
        elif process.life != life or process.gone:
            return
        elif isinstance(given, i.OpenSession) and process.job.spec.launch is not None:
            self.dies(process)  # another has its run, or is to be started
        elif isinstance(given, i.RegisterJob | i.OpenSession):
            world.later(process, RETRY_MS, world.register)
        elif isinstance(given, i.RequestSlot) and self._lives(process):
            world.later(process, RETRY_MS, world.ask_again)
        elif isinstance(given, i.RequestSlot | i.ReleaseSlot | i.ShrinkSlot | i.Heartbeat):
            self._count("told that it is lost")
            self.dies(process)

    def _lives(self, process: "Process") -> bool:
        session = self.world.core.state.sessions.get(process.session)
        return session is not None and session.status is SessionStatus.ALIVE

    def slot_taken(self, fact: f.SlotRevoked | f.SlotLost | f.SlotFaulted) -> None:
        """A process that learns that its slot is not its own any more ends with an error."""
        process = self.world.processes.get(self.world.core.state.slots[fact.slot].job)
        if process is not None and process.slot == fact.slot and not process.silent and not process.stuck:
            self.world.later(process, self.chance.within(RETRY_MS), self.dies)
        elif process is not None and not isinstance(fact, f.SlotLost) and process.request is not None:
            self.world.later(process, RETRY_MS, self._asks_anew)

    def withdrawn(self, fact: f.SlotWithdrawn) -> None:
        """Who still waits for it asks anew."""
        slot = self.world.core.state.slots.get(fact.slot)
        process = self.world.processes.get(slot.job) if slot is not None else None
        if process is not None and slot is not None and self.hears(process, slot):
            self.world.later(process, RETRY_MS, self._asks_anew)

    def _operator(self) -> None:
        """An operator looks now and then at what needs a person: tries what is harmless first, then kills."""
        if self.over:
            return
        world = self.world
        world.kernel.after(self.faults.operator_ms, self._operator)
        state = world.core.state
        for process in list(world.processes.values()) if world.up else ():
            job = state.jobs.get(process.name)
            if job is None:
                continue
            status = job.resume_to if job.status is JobStatus.PAUSED else job.status
            stuck = status is JobStatus.QUARANTINED or (status is JobStatus.WAITING and bool(job.pins))
            looks = self._looked(process.name, stuck and (process.alive or job.spec.launch is not None))
            if looks == 1 and job.status is JobStatus.QUARANTINED:
                world.call(process, i.ReinstateJob(process.name, by="operator"))
            elif looks == 3:  # nothing helps while its process holds what nobody knows of
                self._killed(process)
        for node in list(state.nodes.values()):
            if self._looked(node.id, node.status in (NodeStatus.OCCUPIED, NodeStatus.QUARANTINED)) == 2:
                self._evicted(node)

    def _looked(self, name: str, stuck: bool) -> int:
        self._looks[name] = self._looks.get(name, 0) % 3 + 1 if stuck else 0
        return self._looks[name]

    def _evicted(self, node: Node) -> None:
        """The processes are killed whose bytes are on the node by no right."""
        for process in list(self.world.processes.values()):
            by_right = process.name in node.pinned and self.world.core.state.jobs[process.name].run == process.run
            if process.alive and not by_right and self.world.machines.has(process.name, process.run, node.gpus):
                self._killed(process)

    def _killed(self, process: "Process") -> None:
        self._count("killed by an operator")
        self.dies(process)

    def kill(self, told: Kill) -> None:
        """A backend ends a lost job's process, or one that it has started."""
        process = self.world.processes.get(told.job)
        if process is not None and (process.launch == told.launch if told.launch else process.run == told.run):
            self.dies(process)

    # ---- orders ------------------------------------------------------------------------------------------------------

    def told(self, move: Move, took: Millis) -> None:
        """A driver is told: settle what becomes of it."""
        chance, faults = self.chance, self.faults
        if self.calm:
            pass
        elif chance.so(faults.orders_fail):
            move.fate = Fate.FAILS
            self.world.kernel.after(took, self._fails, move)
        elif chance.so(faults.orders_lost):
            move.fate = Fate.UNHEARD if chance.so(0.5) else Fate.LOST
        if not self._can(move) and move.kind is OrderKind.LOAD:
            move.fate = Fate.LOST
        self.world.kernel.after(max(faults.order_limit_ms, 3 * took), self._no_word, move)

    def told_again(self, move: Move) -> None:
        """It was told before, and is not done: of this, too, no word may come."""
        self.world.kernel.after(self.faults.order_limit_ms, self._no_word, move)

    def _can(self, move: Move) -> bool:
        """Whether who carries it out is there."""
        machines, process = self.world.machines, self.world.processes.get(move.job)
        if move.void or move.host in machines.out or machines.boot[move.host] != move.boot:
            return False
        if process is None or process.run != move.run:  # it has ended, and its memory can be seen to be empty
            return move.kind is not OrderKind.LOAD
        return process.alive and not process.silent and bool(process.session or process.gone)

    def lets(self, move: Move) -> bool:
        """Whether the move is done now; if not, no word comes of it but what its fate says."""
        if move.fate in (Fate.FAILS, Fate.LOST):
            return False
        if self._can(move):
            return True
        move.fate = Fate.LOST
        self._undo(move)
        return False

    def _undo(self, move: Move) -> None:
        move.void = True
        if move.kind is OrderKind.LOAD:
            self.world.machines.take(move)

    def _fails(self, move: Move) -> None:
        self._count("orders failed")
        self._undo(move)
        if move.told == self.world.life:
            self.world.report(i.OrderFailed(move.order, "out of memory"))

    def _no_word(self, move: Move) -> None:
        world = self.world
        if move.told == world.life and world.up and move.order in world.core.state.orders:
            self._count("orders without a word")
            world.report(i.OrderLostContact(move.order, f"no answer within {self.faults.order_limit_ms // 1000} s"))

    def probe(self, order: OrderId) -> None:
        """A driver is asked what became of an order."""
        self.world.kernel.after(self.chance.within(LOOK_MS), self._probed, order, self.world.life)

    def _probed(self, order: OrderId, life: int) -> None:
        world, move = self.world, self.world.moves.get(order)
        if life != world.life or order not in world.core.state.orders:
            return
        if move is None:
            world.report(i.OrderNotBegun(order))
            return
        move.told = life
        if move.done:
            move.fate = Fate.DONE
            world.word_of(move)
            return
        under_way = move.fate is Fate.DONE and self._can(move)
        process = world.processes.get(move.job)
        if under_way or move.host in world.machines.out or (process is not None and process.silent):
            world.report(i.OrderLostContact(order, "nobody knows"))
        else:
            self._undo(move)
            move.fate = Fate.LOST
            world.report(i.OrderFailed(order, "it was not done"))

    def lingering(self) -> str:
        """A mark for bytes that stay for a while; "": they go at once."""
        if self.calm or not self.chance.so(self.faults.lingers):
            return ""
        self._count("bytes stayed")
        self._lingering += 1
        mark = f"|stays-{self._lingering}"
        self.world.kernel.after(self.chance.about(self.faults.linger_ms), self.world.machines.no_longer, mark)
        return mark

    # ---- hosts -------------------------------------------------------------------------------------------------------

    def _outage(self) -> None:
        """A host, a used one if there is one, cannot be reached; or it is restarted, and everything in it is gone."""
        world, machines, chance = self.world, self.world.machines, self.chance
        nodes = world.core.state.nodes.values()
        used = dict.fromkeys(node.host for node in nodes if node.group is not None)
        hosts = [host for host in (used or machines.gpus_of) if host not in machines.out]
        if not hosts:
            return
        host = hosts[chance.within(len(hosts) - 1)]
        self._count("outages")
        length = chance.about(self.faults.outage_ms)
        machines.out[host] = world.kernel.now + length
        if chance.so(self.faults.reboots):
            self._count("reboots")
            self.boots += 1
            machines.reboot(host, f"boot-{self.boots}")
            for process in list(world.processes.values()):
                job = world.core.state.jobs[process.name]
                if any(world.core.state.nodes[name].host == host for pins in job.pins.values() for name in pins):
                    self.dies(process)
        world.kernel.after(chance.within(POLL_MS), self.observe, host)
        world.kernel.after(length, self._back, host)

    def _back(self, host: HostId) -> None:
        del self.world.machines.out[host]
        self.world.kernel.after(self.chance.within(POLL_MS), self.observe, host)

    def observe(self, host: HostId) -> None:
        """A backend looks at a host: what it says later is of now."""
        world = self.world
        said: i.Input = i.HostUnreachable(host, "no route to host")
        if host not in world.machines.out:
            seen = world.machines.sights(world.machines.gpus_of[host])
            said = i.HostObserved(host, seen, world.machines.boot[host], since=world.kernel.now)
        world.kernel.after(self.chance.within(LOOK_MS), self._observed, host, said, world.kernel.now, world.life)

    def _observed(self, host: HostId, said: i.Input, began: Millis, life: int) -> None:
        """It is told. Looks at one host follow each other in a daemon: none that failed comes after a later one."""
        if life != self.world.life or (isinstance(said, i.HostUnreachable) and began < self._looked_at.get(host, 0)):
            return
        self._looked_at[host] = max(began, self._looked_at.get(host, 0))
        self.world.report(said)

    # ---- the daemon --------------------------------------------------------------------------------------------------

    def journal(self, bodies: Sequence[bytes]) -> None:
        """Facts are durable."""
        if self.faults.daemon_deaths_per_hour:
            for body in bodies:
                apply(self.written, f.decode(body))

    def _doom(self) -> None:
        self.crash_pending = True

    def daemon_dies_of(self, given: i.Input) -> bool:
        """Whether the daemon dies of this input: before it decides, before that is durable, or before anybody hears."""
        if not self.crash_pending:
            return False
        world = self.world
        self.crash_pending, self.ahead, world.up = False, False, False
        self._count("daemon deaths")
        moment = self.chance.within(2)
        if moment:
            try:
                decision = world.core.handle(given, world.kernel.now)
            except Rejected:
                pass
            else:
                if moment == 1:
                    self.ahead = True
                else:
                    world.keep(given, decision)
        world.kernel.after(self.chance.about(self.faults.daemon_down_ms), self._daemon_is_back)
        return True

    def _daemon_is_back(self) -> None:
        """It knows what was written, and nothing else."""
        world = self.world
        written = msgspec.json.encode(self.written)
        if not self.ahead and msgspec.json.encode(world.core.state) != written:
            raise BrokenInvariant("replay_gives_the_very_state: the facts give another state than the daemon had")
        state = msgspec.json.decode(written, type=State)
        if msgspec.json.encode(state) != written:
            raise BrokenInvariant("replay_gives_the_very_state: a snapshot, read again, is another state")
        world.core = Scheduler(world.config, world.policy_under_test.policy(world.seed), state)
        world.life += 1
        world.up = True
        world.report(world.inventory.start)
        for process in list(world.processes.values()):
            if process.alive and not process.silent and process.request is not None and not process.knocks:
                world.later(process, self.chance.within(RETRY_MS), world.ask_again)

    def retry(self, process: "Process", given: i.Input, then: "Then | None") -> None:
        """A call without an answer is made again, by the same process, until there is one."""
        if not isinstance(given, i.Heartbeat):  # which comes beside whatever else it calls for
            process.knocks = True
        self.world.kernel.after(1 + self.chance.within(RETRY_MS), self._retries, process, process.life, given, then)

    def _retries(self, process: "Process", life: int, given: i.Input, then: "Then | None") -> None:
        waits_for = "" if process.request is None else process.request.request_id
        if process.life == life and isinstance(given, i.RequestSlot) and given.request_id != waits_for:
            process.knocks = False  # it has asked in another call meanwhile, and was granted
        elif process.life == life and process.silent:
            self.retry(process, given, then)  # it will call when it wakes up
        elif process.life == life:
            process.knocks = process.knocks and isinstance(given, i.Heartbeat)
            self.world.call(process, given, then)
