"""A simulated world in which much goes wrong: processes, orders, hosts and the daemon fail by chance.

What follows is what follows live. A process that dies is silent and its memory is gone; a new run registers after a
while and goes on from the last finished iteration (RollMux: a recovered job is a new arrival; research: rollmux.md
1.14). An order of which no word comes is out of contact after its limit. A daemon that dies takes its soft memory, its
unanswered calls and its drivers' reports with it, at any of three moments: before it decides, after that but before
anything is durable, or when all is durable and nothing was answered. A process without an answer calls again. The
daemon comes back from the journal, which must give the very state that it had. Operators look after what needs a
person, and take their time.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from typing import Any, ClassVar, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.apply import apply
from rollmuxd.core.causes import said
from rollmuxd.core.config import Config, DriverTraits
from rollmuxd.core.decision import Answer, Decision
from rollmuxd.core.effects import Effect, Kill, Launch, Perform, Probe
from rollmuxd.core.errors import BrokenInvariant, Rejected
from rollmuxd.core.ids import GpuId, HostId, JobId, LaunchId, Millis, OrderId, PoolName, SlotId
from rollmuxd.core.model import JobStatus, Node, NodeStatus, OrderKind, SessionStatus, Slot, SlotStatus
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import FILLER, JobSpec
from rollmuxd.core.state import State
from rollmuxd.sim.fillers import Fillers, specs
from rollmuxd.sim.inventory import Inventory
from rollmuxd.sim.machines import LEFT, Machines, Move, key_of
from rollmuxd.sim.policies import PolicyUnderTest
from rollmuxd.sim.workload import Workload
from rollmuxd.sim.world import TAIL_ASKED_MS, UNSAID_MB, Process, Then, World
from simkit.faults import Chance, Faults

#: a caller that was refused, or got no answer, tries again within this (client: back-off up to it)
RETRY_MS: Final = 15_000
#: a look at a host takes up to this; what it saw is of its beginning
LOOK_MS: Final = 1_500
#: a poll notices within this that a host is out of reach, or back
POLL_MS: Final = 30_000
#: a process that is to go is gone after this
EXIT_MS: Final = 60_000
#: processes that are lost are soon started again, and not for ever
LAUNCHES: Final[dict[str, int]] = {
    "launch_ms": 100_000,
    "relaunch_after_ms": 5_000,
    "relaunch_limit": 3,
    "relaunch_window_ms": 600_000,
}
#: marks bytes that stay for a while after a park or a death
STAYS: Final = "|stays-"


class DaemonDied(Exception):
    """The daemon is not there, or died of this call: it may have heard it, or not."""


class Fate(Enum):
    """What becomes of a move."""

    DONE = 1
    #: not done, and its driver says so
    FAILS = 2
    #: done, and no word comes of it
    UNHEARD = 3
    #: not done, and no word comes of it
    LOST = 4


class Errand(Struct, gc=False):
    """An order, as its driver carries it out, or fails to."""

    move: Move
    #: the daemon's life in which the driver was asked last: no other hears of it
    life: int
    #: of its host, when it began
    boot: str
    fate: Fate
    done: bool = False
    #: it will never be done
    void: bool = False


class FaultyMachines(Machines):
    """Hosts may be out of reach or be restarted, and bytes may stay longer than they should."""

    def __init__(self, inventory: Inventory) -> None:
        super().__init__(inventory)
        #: hosts that cannot be reached
        self.out: set[HostId] = set()

    def take(self, move: Move, *, residual_mb: int = 0, lingering: str = "") -> None:
        """With a mark in ``lingering``, what was there stays for a while."""
        there = [self.on_gpu[gpu] for gpu in self.gpus_of[move.host]]
        used = [(on_gpu, on_gpu[move.key]) for on_gpu in there if lingering and move.key in on_gpu]
        super().take(move, residual_mb=residual_mb)
        for on_gpu, mb in used:
            on_gpu[move.key + lingering] = mb

    def give_back(self, job: JobId, run: int, gpus: Iterable[GpuId], residual_mb: dict[PoolName, int]) -> None:
        """What stayed of a park before leaves nothing by itself."""
        gpus = list(gpus)
        mine = f"{job}|{run}|"
        for gpu in gpus:
            self._drop(gpu, lambda key: key.startswith(mine) and STAYS in key)
        super().give_back(job, run, gpus, residual_mb)

    def wipe(self, job: JobId, run: int, *, lingering: str = "") -> None:
        """The process ends, and what it had on any GPU goes with it, or stays for a while."""
        mine = f"{job}|{run}|"
        for gpu, there in self.on_gpu.items():
            if there:
                used = sum(mb for key, mb in there.items() if key.startswith(mine) and not key.endswith(LEFT))
                self._drop(gpu, lambda key: key.startswith(mine))
                if used and lingering:
                    there[mine + lingering] = used

    def take_back(self, key: str, gpus: Iterable[GpuId], gpu_mb: int) -> None:
        """The process spreads what it moves by that key over these GPUs again."""
        for gpu in gpus:
            self.on_gpu[gpu].pop(key + LEFT, None)
            self.on_gpu[gpu][key] = gpu_mb

    def _drop(self, gpu: GpuId, wanted: Callable[[str], bool]) -> None:
        there = self.on_gpu[gpu]
        for key in [key for key in there if wanted(key)]:
            del there[key]

    def has(self, job: JobId, run: int, gpus: Iterable[GpuId]) -> bool:
        """Whether the process has anything on these GPUs."""
        mine = f"{job}|{run}|"
        return any(key.startswith(mine) for gpu in gpus for key in self.on_gpu[gpu])

    def no_longer(self, lingering: str) -> None:
        """What stayed for a while is gone."""
        for gpu in self.on_gpu:
            self._drop(gpu, lambda key: key.endswith(lingering))

    def reboot(self, host: HostId, boot: str) -> None:
        """Nothing is left in its memories."""
        self.boot[host] = boot
        for gpu in self.gpus_of[host]:
            self.on_gpu[gpu].clear()


class FaultyFillers(Fillers):
    """Fillers that may not be heard, or ignore that they are to give way, and that try again."""

    _world: "FaultyWorld"

    def begin(self) -> None:
        """See to each now and then: that it is registered, has a session, and asks."""
        pools = Counter(self._world.inventory.pool_of.values())
        self._specs = {spec.name: spec for spec in specs(pools, self._count)} if self._count else {}
        self._names: dict[str, JobId] = {}
        #: runs of which the process is gone, and that are to be lost
        self._dead: dict[JobId, int] = {}
        self._run = 0
        self._sees_to_all()

    def _sees_to_all(self) -> None:
        if self._world.over or not self._specs:
            return
        self._world.kernel.after(RETRY_MS, self._sees_to_all)
        self.beat()
        for spec in self._specs.values():
            if self._world.up:
                with suppress(DaemonDied, Rejected):
                    self._sees_to(spec)

    def _sees_to(self, spec: JobSpec) -> None:
        state = self._world.core.state
        job = state.jobs.get(self._names.get(spec.name, ""))
        if job is None or not job.live:
            if job is not None:
                self.dies(job.id, job.run)
            answer = self._world.tell(i.RegisterJob("fillers", "sim", spec, f"{spec.name} {self._run}")).answer
            job = state.jobs[answer.job or ""]
            self._names[spec.name] = job.id
            self._run += 1
        if job.status is JobStatus.QUARANTINED:  # an operator ends what is left of it
            self.dies(job.id, job.run)
        if self._dead.get(job.id) == job.run:
            return
        session = state.sessions.get(job.session or "")
        if session is None or session.status is not SessionStatus.ALIVE:
            opens = i.OpenSession(job.id, job.idempotency_key, pid=1, host="sim", started=str(job.run))
            opened = self._world.tell(opens).answer.session
            self._sessions[job.id] = opened or ""
        queued = state.slots.get(job.queued or "")
        if queued is not None:
            self._world.tell(i.RequestSlot(job.id, self._sessions[job.id], FILLER, queued.request_id))
        elif job.slot is None:
            self._ask(job.id)

    def dies(self, job: JobId, run: int) -> None:
        """Its process is gone, with all that it had on GPUs and all that it was to do."""
        for errand in self._world.errands.values():
            errand.void = errand.void or (errand.move.job == job and errand.move.run == run and not errand.done)
        self._world.machines.wipe(job, run)
        self._dead[job] = run

    def _ask(self, job: JobId) -> None:
        if self._world.up:
            with suppress(DaemonDied, Rejected):
                super()._ask(job)

    def asked_back(self, fact: f.YieldAsked) -> None:
        """One in five asks for nothing but to be revoked."""
        if not self._world.chance.so(0.2):
            super().asked_back(fact)

    def _release(self, name: SlotId) -> None:
        if self._world.up:
            with suppress(DaemonDied, Rejected):
                super()._release(name)

    def beat(self) -> None:
        """Where the daemon is there."""
        for job, session in self._sessions.items():
            if self._world.up and self._dead.get(job) != self._world.core.state.jobs[job].run:
                with suppress(DaemonDied, Rejected):
                    self._world.tell(i.Heartbeat(session))

    def end(self) -> None:
        """Until each end is heard: then its process leaves, with what it has on GPUs."""
        self._working = {}
        for job in list(self._sessions):
            known = self._world.core.state.jobs.get(job)
            if self._world.up and (known is None or known.status is JobStatus.ENDED):
                del self._sessions[job]
                if known is not None:
                    self._world.machines.wipe(job, known.run)
            elif self._world.up:
                with suppress(DaemonDied, Rejected):
                    self._world.tell(i.EndJob(job, by="sim"))
        if self._sessions:
            self._world.kernel.after(RETRY_MS, self.end)


class FaultyWorld(World):
    """A world with faults. See the module's head."""

    machines: FaultyMachines
    fillers: FaultyFillers

    def __init__(
        self, faults: Faults, workload: Workload, under_test: PolicyUnderTest, seed: int, *more: Any, **named: Any
    ) -> None:
        self.faults, self.chance = faults, Chance(faults, seed)
        super().__init__(workload, under_test, seed, *more, **named)
        self.fillers = FaultyFillers(self, workload.fillers)
        self.machines = FaultyMachines(self.inventory)
        #: what went wrong, and how often
        self.counted: dict[str, int] = {}
        #: which life of the daemon this is, and whether it is there
        self.daemon_life, self.up = 1, True
        #: what a restart begins with: the facts so far, as they were written
        self.written = State()
        #: the daemon dies of the next call
        self.crash_pending = False
        #: it died when its memory was ahead of the journal
        self.ahead = False
        self.boots = 1
        self.errands: dict[OrderId, Errand] = {}
        #: launches that backends were asked for, and whether their processes were started; None: not yet
        self._launched: dict[LaunchId, bool | None] = {}
        #: how often an operator has looked at something that was stuck, by its name
        self._looks: dict[str, int] = {}
        #: when the newest look at each host began of which the daemon has heard
        self._looked_at: dict[HostId, Millis] = {}

    @property
    def over(self) -> bool:
        """Every job has ended."""
        return not self.waiting_to_end

    @property
    def calm(self) -> bool:
        """Nothing begins to go wrong any more."""
        until = self.faults.until_ms
        return self.over or (until > 0 and self.kernel.now >= until)

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def make_config(self) -> Config:
        """Drivers that may be asked twice, or be probed, or both, or neither; backends that start processes again."""
        config = super().make_config()
        drivers = {
            name: DriverTraits(idempotent=self.chance.so(0.5), probes=self.chance.so(0.5), copies=not self.faults.near)
            for name in config.drivers
        }
        hosts = tuple(self.inventory.gpus_of)
        return replace(config, lease_ms=Config().lease_ms, drivers=drivers, launch_hosts=hosts, **LAUNCHES)

    def begin(self) -> None:
        """Plan also the faults that do not belong to a process."""
        super().begin()
        # whatever goes wrong: all of them one after the other, ten times over
        longest = sum(max(job.lasts_ms, job.work * job.solo_ms) for job in self.jobs)
        last = max([self.faults.until_ms, *(job.arrives_ms for job in self.jobs[-1:])])
        self.latest_ms = last + 10 * longest + self.faults.longest_ms
        self.settle_ms += self.faults.longest_ms
        self._plan(self.faults.outages_per_hour * len(self.inventory.gpus_of), self._outage)
        self._plan(self.faults.daemon_deaths_per_hour, self._doom)
        self.kernel.after(self.faults.operator_ms, self._operator)

    def check_placed(self, process: Process) -> None:
        """A job may have to wait for a node that is lost."""

    def check_progress(self) -> None:
        """All jobs may have to wait for a node that is lost."""

    def _plan(self, per_hour: float, what: Callable[[], None]) -> None:
        wait = self.chance.until_next(per_hour)
        if wait is not None:
            self.kernel.after(wait, self._again, per_hour, what)

    def _again(self, per_hour: float, what: Callable[[], None]) -> None:
        if not self.calm:
            what()
            self._plan(per_hour, what)

    def _count(self, what: str) -> None:
        self.counted[what] = self.counted.get(what, 0) + 1

    # ---- processes ---------------------------------------------------------------------------------------------------

    def register(self, process: Process) -> None:
        """A registration may be made again, by the same key."""
        self.rewind(process)
        key = f"{process.job.name}-{process.life}"
        self.call(process, i.RegisterJob("team", "sim", process.job.spec, key), self.registered)

    def opened(self, process: Process, answer: Answer) -> None:
        """Plan also the end of the process, and what happens to it before."""
        faults = self.faults
        for per_hour, what in (
            (faults.deaths_per_hour, self._dies_by_chance),
            (faults.hangs_per_hour, self._hangs),
            (faults.stalls_per_hour, self._stalls),
            (faults.detaches_per_hour, self._detaches),
        ):
            wait = self.chance.until_next(per_hour)
            if wait is not None:
                self.later(process, wait, what)
        super().opened(process, answer)

    def end(self, process: Process) -> None:
        """The job is ended from outside, also where its process hangs."""
        if not process.gone:
            process.silent = False
        super().end(process)

    def ended(self, process: Process, answer: Answer | None = None) -> None:
        """The process clears away, too, and goes."""
        super().ended(process, answer)
        if process.alive:
            self.later(process, EXIT_MS, self.dies)

    def beat(self, process: Process) -> None:
        """A process that hangs does not beat."""
        if process.alive and not process.silent and self.up:
            super().beat(process)

    def tail_begins(self, process: Process, slot: SlotId) -> None:
        """A process that hangs says nothing of its tail."""
        if not process.silent:
            super().tail_begins(process, slot)

    def shrink(self, process: Process, slot: SlotId, keep: tuple[GpuId, ...]) -> None:
        """GPUs are given back by a process that runs, to a daemon that runs; some take them back later."""
        if process.job.grows:
            self.kernel.after(TAIL_ASKED_MS, self._tail_goes_on, process, slot)
        if not process.silent and self.up:
            super().shrink(process, slot, keep)

    def _tail_goes_on(self, process: Process, slot: SlotId) -> None:
        """It says how far its tail is, and takes what it is offered back; not before it knows what was taken back."""
        if process.slot != slot or not process.shrunk or process.silent:
            return
        if process.retrying:
            self.kernel.after(TAIL_ASKED_MS, self._tail_goes_on, process, slot)
        else:
            self.call(process, i.Heartbeat(process.session, slot, 90, 100), self._offered)

    def _offered(self, process: Process, answer: Answer) -> None:
        slot = process.slot
        if slot and any(it.kind == "grow" for it in answer.directives):
            self.call(process, i.GrowSlot(slot, process.fence), self._grown)
        elif slot and self.kernel.now + TAIL_ASKED_MS < process.ends_ms:
            self.kernel.after(TAIL_ASKED_MS, self._tail_goes_on, process, slot)

    def _grown(self, process: Process, answer: Answer) -> None:
        """Its tail is spread over all GPUs of its nodes again, and may shrink again."""
        slot = self.core.state.slots.get(process.slot)
        if slot is None or slot.status is not SlotStatus.RUNNING or not process.shrunk:
            return
        self.machines.nobody_else_is_on(slot.gpus, slot.job, slot.run)
        phase = self.core.state.jobs[slot.job].spec.phase(slot.phase)
        for kept in (self.core.state.states[key] for key in self.core.state.jobs[slot.job].states):
            here = [gpu for gpu in self.core.state.nodes[kept.node].gpus if gpu in slot.gpus]
            if kept.pool in phase.pools:
                key = key_of(slot.job, slot.run, kept.pool, kept.node)
                self.machines.take_back(key, here, kept.spec.gpu_mb or UNSAID_MB)
        self.charge(process)
        process.shrunk, process.running = False, (self.kernel.now, self._nodes_of(slot))
        self._has_more(process, slot.id)
        self.kernel.after(TAIL_ASKED_MS, self.tail_begins, process, slot.id)

    def phase_over(self, process: Process, slot: SlotId) -> None:
        """A process that hangs, or whose phase does not end, gives nothing back."""
        if not process.silent and not process.stuck:
            super().phase_over(process, slot)

    def _dies_by_chance(self, process: Process) -> None:
        if self.calm:
            return
        self._count("deaths")
        self.dies(process)

    def dies(self, process: Process) -> None:
        """It ends without a word; what it had on GPUs is gone (at once, or soon); a new run comes after a while."""
        if not process.alive:
            return
        process.life += 1
        process.alive = process.silent = process.stuck = process.retrying = False
        process.slot, process.session, process.request, process.began_ms, process.launch = "", "", None, None, ""
        self.charge(process)
        self.machines.wipe(process.name, process.run, lingering=self._lingers())
        if not process.gone:
            self.later(process, self.chance.about(self.faults.restart_ms), self._restarts)
        elif self.processes.get(process.name) is process:  # its end was not heard: its lease will tell
            self.ended(process)

    def _restarts(self, process: Process) -> None:
        if process.gone:
            return
        process.alive = process.job.spec.launch is None
        if self.by_work and process.step >= process.job.work:
            self.end(process)
        elif process.alive:
            self.register(process)
        else:
            self._sees_to(process)

    def _sees_to(self, process: Process) -> None:
        """A job whose process a backend starts is registered again when it is lost for good."""
        job = self.core.state.jobs[process.name]
        if not job.live and job.relaunch_at is None:
            self.register(process)
        else:
            self.later(process, self.chance.about(self.faults.restart_ms), self._restarts)

    # ---- processes that backends start -------------------------------------------------------------------------------

    def registered(self, process: Process, answer: Answer) -> None:
        """A backend starts the process when its job has a place; its user looks after that now and then."""
        super().registered(process, answer)
        if process.job.spec.launch is not None:
            process.alive = bool(process.launch)
            if not process.alive:
                self.later(process, self.chance.about(self.faults.restart_ms), self._restarts)

    def _asked_to_launch(self, told: Launch) -> None:
        """A backend starts a process once, however often it is asked to."""
        known = self._launched.setdefault(told.launch, None)
        wait = self.chance.within(LOOK_MS)
        job = self.core.state.jobs[told.job]
        if known is None:
            assert job.launch is not None
            self.kernel.after(wait, self._launch, told, job.run, job.idempotency_key, job.launch.host)
        else:
            self.kernel.after(wait, self._say_launched, told.launch)

    def _launch(self, told: Launch, run: int, key: str, host: HostId) -> None:
        if self._launched[told.launch] is not None:
            return  # it was asked twice
        process = self.processes.get(told.job)
        fails = not self.calm and self.chance.so(self.faults.orders_fail)
        begins = process is not None and not process.gone and host not in self.machines.out and not fails
        self._launched[told.launch] = begins
        self._say_launched(told.launch)
        if process is None or not begins:
            return
        self.dies(process)  # an earlier one, which did not end
        process.life += 1
        process.alive, process.run, process.launch = True, run, told.launch
        process.retrying = False  # its registration was heard
        self.rewind(process)
        if not self.calm and self.chance.so(self.faults.orders_lost):
            self._count("processes that never came")
            self.later(process, self.chance.within(RETRY_MS), self.dies)
        else:
            self.later(process, self.chance.within(RETRY_MS), lambda it: self.open(it, key))

    def _say_launched(self, launch: LaunchId) -> None:
        if self._launched[launch]:
            self.report(i.Launched(launch, pid=1, started=launch))
        else:
            self._count("launches failed")
            self.report(i.Launched(launch, error=said("no such file")))

    def _hangs(self, process: Process) -> None:
        """It falls silent; after a while it is killed, or wakes up and knows of nothing."""
        if self.calm or process.gone:
            return
        self._count("hangs")
        process.silent = True
        ends = self._wakes if self.chance.so(0.5) else self.dies
        self.later(process, self.chance.about(self.faults.hang_ms), ends)

    def _wakes(self, process: Process) -> None:
        process.silent = False
        if process.slot and process.ends_ms <= self.kernel.now:
            self.phase_over(process, process.slot)
        else:
            self.ask_again(process)

    def _stalls(self, process: Process) -> None:
        """Its phase does not end; an operator revokes the slot, and it is killed."""
        if self.calm or process.gone:
            return
        if not process.slot:
            self.later(process, RETRY_MS, self._stalls)
            return
        self._count("stalls")
        process.stuck = True
        self.later(process, self.chance.within(2 * self.faults.operator_ms), self._revoked)

    def _revoked(self, process: Process) -> None:
        if process.slot:
            self.call(process, i.RevokeSlot(process.slot, by="operator", reason="it does not end"))
        self.later(process, self.chance.within(EXIT_MS), self.dies)

    def _detaches(self, process: Process) -> None:
        """Its call breaks while it waits; it asks again after a while."""
        if self.calm or process.gone:
            return
        job = self.core.state.jobs[process.name]
        slot = job.queued or job.slot
        if self.up and process.request is not None and slot is not None and not process.retrying:
            self._count("detaches")
            self.call(process, i.DetachSlot(slot))
            longest = self.config.reattach_ms * 3 // 2
            self.later(process, self.chance.within(longest), self.ask_again)
        wait = self.chance.until_next(self.faults.detaches_per_hour)
        assert wait is not None
        self.later(process, wait, self._detaches)

    # ---- what processes hear -----------------------------------------------------------------------------------------

    def call(self, process: Process, given: i.Input, then: Then | None = None) -> None:
        """A call without an answer is made again; what follows from a refusal depends on the call."""
        life = process.life
        try:
            if not self.up:
                raise DaemonDied
            answer = self.tell(given).answer
        except DaemonDied:
            self._retry(process, given, then)
        except Rejected:
            self._refused(process, life, given)
        else:
            if then is not None and process.life == life:
                then(process, answer)

    def _retry(self, process: Process, given: i.Input, then: Then | None) -> None:
        """The same process calls until there is an answer."""
        if not isinstance(given, i.Heartbeat):  # which comes beside its other calls
            process.retrying = True
        self.kernel.after(1 + self.chance.within(RETRY_MS), self._retries, process, process.life, given, then)

    def _retries(self, process: Process, life: int, given: i.Input, then: Then | None) -> None:
        waits_for = "" if process.request is None else process.request.request_id
        if process.life == life and isinstance(given, i.RequestSlot) and given.request_id != waits_for:
            process.retrying = False  # it has asked in another call meanwhile, and was granted
        elif process.life == life and process.silent:
            self._retry(process, given, then)  # it will call when it wakes up
        elif process.life == life:
            process.retrying = process.retrying and isinstance(given, i.Heartbeat)
            self.call(process, given, then)

    def hears(self, process: Process, slot: Slot) -> bool:
        """Whether the process is there to hear of this grant, and waits for it."""
        request = process.request
        return process.alive and not process.silent and request is not None and request.request_id == slot.request_id

    def asked(self, process: Process, answer: Answer) -> None:
        """What became of a request: it waits, runs already (the answer was lost), or is past and made again."""
        slot = self.core.state.slots[answer.slot or ""]
        if process.slot or process.request is None or process.request.request_id != slot.request_id:
            return
        if slot.status in (SlotStatus.RUNNING, SlotStatus.TAIL):
            self.begin_phase(process, slot)
        elif slot.status not in (SlotStatus.QUEUED, SlotStatus.LOADING):
            self.later(process, self.chance.within(RETRY_MS), self._asks_for_another)

    def _asks_for_another(self, process: Process) -> None:
        """What it waited for will not be; unless it has asked again already, and has had its phase since."""
        job = self.core.state.jobs[process.name]
        if process.slot or process.request is None:
            return
        if job.slot is None and job.queued is None:
            self.ask(process)
        else:
            self.ask_again(process)

    def released(self, process: Process, answer: Answer) -> None:
        """A release was accepted; its ``next`` may have been refused, or granted in an answer that was lost."""
        if process.request is not None and not process.silent:
            wait = RETRY_MS if answer.next_slot is None else 0
            self.later(process, wait, self.ask_again)

    def _refused(self, process: Process, life: int, given: i.Input) -> None:
        """The process tries again later, or learns that it was declared lost."""
        if isinstance(given, i.EndJob):
            self.ended(process)
        elif process.life != life or process.gone:
            return
        elif isinstance(given, i.OpenSession) and process.job.spec.launch is not None:
            self.dies(process)  # another has its run, or is to be started
        elif isinstance(given, i.RegisterJob | i.OpenSession):
            self.later(process, RETRY_MS, self.register)
        elif isinstance(given, i.RequestSlot) and self._lives(process):
            self.later(process, RETRY_MS, self.ask_again)
        elif isinstance(given, i.RequestSlot | i.ReleaseSlot | i.ShrinkSlot | i.Heartbeat):
            self._count("told that it is lost")
            self.dies(process)

    def _lives(self, process: Process) -> bool:
        session = self.core.state.sessions.get(process.session)
        return session is not None and session.status is SessionStatus.ALIVE

    def _slot_taken(self, fact: f.SlotTakenAway) -> None:
        """A process that learns that its slot is not its own any more ends with an error."""
        process = self.processes.get(self.core.state.slots[fact.slot].job)
        if process is not None and process.slot == fact.slot and not process.silent and not process.stuck:
            self.later(process, self.chance.within(RETRY_MS), self.dies)
        elif process is None or process.request is None:
            return
        elif fact.how is not SlotStatus.LOST or self._lives(process):  # a host that restarted had none of it yet
            self.later(process, RETRY_MS, self._asks_for_another)

    def _withdrawn(self, fact: f.SlotWithdrawn) -> None:
        """A process that still waits for it asks for another."""
        slot = self.core.state.slots.get(fact.slot)
        process = self.processes.get(slot.job) if slot is not None else None
        if process is not None and slot is not None and self.hears(process, slot):
            self.later(process, RETRY_MS, self._asks_for_another)

    def _operator(self) -> None:
        """An operator looks now and then at what needs a person: tries what is harmless first, then kills."""
        if self.over:
            return
        self.kernel.after(self.faults.operator_ms, self._operator)
        state = self.core.state
        for process in list(self.processes.values()) if self.up else ():
            job = state.jobs.get(process.name)
            if job is None:
                continue
            status = job.resume_to if job.status is JobStatus.PAUSED else job.status
            stuck = status is JobStatus.QUARANTINED or (status is JobStatus.WAITING and bool(job.pins))
            looks = self._looked(process.name, stuck and (process.alive or job.spec.launch is not None))
            if looks == 1 and job.status is JobStatus.QUARANTINED:
                self.call(process, i.ResumeJob(process.name, by="operator", quarantined=True))
            elif looks == 3:  # nothing helps while its process holds GPUs that the daemon does not know of
                self._killed(process)
        for node in list(state.nodes.values()):
            if self._looked(node.id, node.status in (NodeStatus.OCCUPIED, NodeStatus.QUARANTINED)) == 2:
                self._evicted(node)

    def _looked(self, name: str, stuck: bool) -> int:
        self._looks[name] = self._looks.get(name, 0) % 3 + 1 if stuck else 0
        return self._looks[name]

    def _evicted(self, node: Node) -> None:
        """The processes are killed whose bytes are on the node by no right."""
        for process in list(self.processes.values()):
            by_right = process.name in node.pinned and self.core.state.jobs[process.name].run == process.run
            if process.alive and not by_right and self.machines.has(process.name, process.run, node.gpus):
                self._killed(process)

    def _killed(self, process: Process) -> None:
        self._count("killed by an operator")
        self.dies(process)

    def _asked_to_kill(self, told: Kill) -> None:
        """A backend ends a lost job's process, or one that it has started."""
        if self.fillers.has(told.job):
            self.fillers.dies(told.job, told.run)
        process = self.processes.get(told.job)
        if process is not None and (process.launch == told.launch if told.launch else process.run == told.run):
            self.dies(process)

    # ---- orders ------------------------------------------------------------------------------------------------------

    def do(self, effect: Effect) -> None:
        """Drivers are probed, and backends start and end processes."""
        match effect:
            case Probe():
                self.kernel.after(self.chance.within(LOOK_MS), self._probed, effect.order, self.daemon_life)
            case Launch():
                self._asked_to_launch(effect)
            case Kill():
                self._asked_to_kill(effect)
            case _:
                super().do(effect)

    def perform(self, effect: Perform) -> None:
        """A driver that gets an order again carries it out once."""
        errand = self.errands.get(effect.order)
        if errand is None:
            super().perform(effect)
            return
        errand.life = self.daemon_life
        if errand.done:
            errand.fate = Fate.DONE
            self.kernel.after(0, self.say_done, errand.move)
        else:  # of this, too, no word may come
            self.kernel.after(self.faults.order_limit_ms, self._no_word, errand)

    def begin_move(self, move: Move, took: Millis) -> None:
        """Decide what becomes of the move."""
        fate = self.draw_fate(move)
        errand = self.errands[move.order] = Errand(move, self.daemon_life, self.machines.boot[move.host], fate)
        if fate is Fate.FAILS:
            self.kernel.after(took, self._fails, errand)
        if move.kind is OrderKind.LOAD and not self._can(errand):
            errand.fate = Fate.LOST
        self.kernel.after(max(self.faults.order_limit_ms, 3 * took), self._no_word, errand)
        if errand.fate is not Fate.LOST:
            super().begin_move(move, took)

    def draw_fate(self, move: Move) -> Fate:
        """What becomes of a move, by chance."""
        if self.calm:
            return Fate.DONE
        if self.chance.so(self.faults.orders_fail):
            return Fate.FAILS
        if self.chance.so(self.faults.orders_lost):
            return Fate.UNHEARD if self.chance.so(0.5) else Fate.LOST
        return Fate.DONE

    def performed(self, move: Move) -> None:
        """A move is done only where its process, its driver and its host are there."""
        errand = self.errands[move.order]
        if errand.fate in (Fate.FAILS, Fate.LOST):
            return
        if self._can(errand):
            errand.done = True
            super().performed(move)
        else:
            errand.fate = Fate.LOST
            self._undo(errand)

    def take(self, move: Move) -> None:
        """Some of it may stay for a while."""
        self.machines.take(move, residual_mb=move.residual_mb, lingering=self._lingers())

    def say_done(self, move: Move) -> None:
        """The word may be lost, or meant for a daemon that has died since."""
        errand = self.errands[move.order]
        if errand.fate is Fate.DONE and errand.life == self.daemon_life and self.up:
            super().say_done(move)

    def seen_after(self, move: Move) -> tuple[i.GpuObservation, ...]:
        """Nothing is seen of a host that cannot be reached."""
        return () if move.host in self.machines.out else super().seen_after(move)

    def _can(self, errand: Errand) -> bool:
        """Whether the process, the driver and the host are there."""
        move, process = errand.move, self.processes.get(errand.move.job)
        if errand.void or move.host in self.machines.out or self.machines.boot[move.host] != errand.boot:
            return False
        if self.fillers.has(move.job):
            return move.run == self.core.state.jobs[move.job].run or move.kind is not OrderKind.LOAD
        if process is None or process.run != move.run:  # it has ended, and its memory can be seen to be empty
            return move.kind is not OrderKind.LOAD
        return process.alive and not process.silent and bool(process.session or process.gone)

    def _undo(self, errand: Errand) -> None:
        errand.void = True
        if errand.move.kind is OrderKind.LOAD:
            self.machines.take(errand.move)

    def _fails(self, errand: Errand) -> None:
        self._count("orders failed")
        self._undo(errand)
        if errand.life == self.daemon_life:
            self.report(i.OrderFailed(errand.move.order, said("out of memory")))

    def _no_word(self, errand: Errand) -> None:
        order = errand.move.order
        if errand.life == self.daemon_life and self.up and order in self.core.state.orders:
            self._count("orders without a word")
            self.report(i.OrderLostContact(order, said(f"no answer within {self.faults.order_limit_ms // 1000} s")))

    def _probed(self, order: OrderId, life: int) -> None:
        errand = self.errands.get(order)
        if life != self.daemon_life or order not in self.core.state.orders:
            return
        if errand is None:
            self.report(i.OrderNotBegun(order))
            return
        errand.life = life
        if errand.done:
            errand.fate = Fate.DONE
            self.say_done(errand.move)
            return
        under_way = errand.fate is Fate.DONE and self._can(errand)
        process = self.processes.get(errand.move.job)
        if under_way or errand.move.host in self.machines.out or (process is not None and process.silent):
            self.report(i.OrderLostContact(order, said("nobody knows")))
        else:
            self._undo(errand)
            errand.fate = Fate.LOST
            self.report(i.OrderFailed(order, said("it was not done")))

    def _lingers(self) -> str:
        """A mark for bytes that stay for a while; "": they go at once."""
        if self.calm or not self.chance.so(self.faults.lingers):
            return ""
        self._count("bytes stayed")
        mark = f"{STAYS}{self.counted['bytes stayed']}"
        self.kernel.after(self.chance.about(self.faults.linger_ms), self.machines.no_longer, mark)
        return mark

    # ---- hosts -------------------------------------------------------------------------------------------------------

    def _outage(self) -> None:
        """A host, a used one if there is one, cannot be reached; or it is restarted, and everything in it is gone."""
        chance, nodes = self.chance, self.core.state.nodes.values()
        used = dict.fromkeys(node.host for node in nodes if node.group is not None)
        hosts = [host for host in (used or self.machines.gpus_of) if host not in self.machines.out]
        if not hosts:
            return
        host = hosts[chance.within(len(hosts) - 1)]
        self._count("outages")
        length = chance.about(self.faults.outage_ms)
        self.machines.out.add(host)
        if chance.so(self.faults.reboots):
            self._count("reboots")
            self.boots += 1
            self.machines.reboot(host, f"boot-{self.boots}")
            for process in list(self.processes.values()):
                job = self.core.state.jobs[process.name]
                if any(self.core.state.nodes[name].host == host for pins in job.pins.values() for name in pins):
                    self.dies(process)
        self.kernel.after(chance.within(POLL_MS), self.observe, host)
        self.kernel.after(length, self._back, host)

    def _back(self, host: HostId) -> None:
        self.machines.out.remove(host)
        self.kernel.after(self.chance.within(POLL_MS), self.observe, host)

    def observe(self, host: HostId) -> None:
        """A backend looks at a host: what it says later is of now."""
        seen = i.HostObserved(host, unreachable=said("no route to host"))
        if host not in self.machines.out:
            gpus = self.machines.observe(self.machines.gpus_of[host])
            seen = i.HostObserved(host, gpus, self.machines.boot[host], since=self.kernel.now)
        self.kernel.after(self.chance.within(LOOK_MS), self._observed, host, seen, self.kernel.now, self.daemon_life)

    def _observed(self, host: HostId, seen: i.HostObserved, began: Millis, life: int) -> None:
        """The daemon hears of it. Looks at one host follow each other: none that failed comes after a later one."""
        if life != self.daemon_life or (seen.unreachable is not None and began < self._looked_at.get(host, 0)):
            return
        self._looked_at[host] = max(began, self._looked_at.get(host, 0))
        self.report(seen)

    # ---- the daemon --------------------------------------------------------------------------------------------------

    def deadline(self) -> Millis | None:
        """A daemon that is down has no clock."""
        return super().deadline() if self.up else None

    def report(self, given: i.Input) -> None:
        """Where no daemon is there to hear it, it is lost."""
        if self.up:
            try:  # noqa: SIM105 - half of all inputs come by here, and a context manager costs as much as a fact
                super().report(given)
            except DaemonDied:
                pass

    def tell(self, given: i.Input) -> Decision:
        """The daemon may die of it.

        Raises:
            Rejected: it is refused.
            DaemonDied: the daemon may have heard it, or not.
        """
        if self.crash_pending and self.daemon_dies_of(given):
            raise DaemonDied
        return super().tell(given)

    def write(self, bodies: list[bytes]) -> None:
        """Keep also the state that a restart begins with."""
        super().write(bodies)
        if self.faults.daemon_deaths_per_hour:
            for body in bodies:
                apply(self.written, f.decode(body))

    def _doom(self) -> None:
        self.crash_pending = True

    def daemon_dies_of(self, given: i.Input) -> bool:
        """Whether the daemon dies of this input: before it decides, before that is durable, or before it answers."""
        if not self.crash_pending:
            return False
        self.crash_pending, self.ahead, self.up = False, False, False
        self._count("daemon deaths")
        moment = self.chance.within(2)
        if moment:
            try:
                decision = self.core.handle(given, self.kernel.now)
            except Rejected:
                pass
            else:
                if moment == 1:
                    self.ahead = True
                else:
                    self.keep(given, decision)
        self.kernel.after(self.chance.about(self.faults.daemon_down_ms), self._daemon_is_back)
        return True

    def _daemon_is_back(self) -> None:
        """It knows what was written, and nothing else."""
        written = msgspec.json.encode(self.written)
        if not self.ahead and msgspec.json.encode(self.core.state) != written:
            raise BrokenInvariant("replay_gives_the_very_state: the facts give another state than the daemon had")
        state = msgspec.json.decode(written, type=State)
        if msgspec.json.encode(state) != written:
            raise BrokenInvariant("replay_gives_the_very_state: a snapshot, read again, is another state")
        self.core = Scheduler(self.config, self.policy_under_test.policy(self.seed), state)
        self.daemon_life += 1
        self.up = True
        self.report(self.inventory.start)
        for process in list(self.processes.values()):
            if process.alive and not process.silent and process.request is not None and not process.retrying:
                self.later(process, self.chance.within(RETRY_MS), self.ask_again)

    heeded: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        **World.heeded,
        f.SlotTakenAway: _slot_taken,
        f.SlotWithdrawn: _withdrawn,
    }
