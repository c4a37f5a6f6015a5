"""Races of those who move state: engines that sleep, wake, free and restore, or say that they did.

Each test says what the peer does and what we do; each has been seen to fail with the part of our code taken out that
it is about. Time is virtual; the GPUs are the mock's, whose record of whose bytes are where is checked at each end.
"""

import anyio
import pytest
from bad_plugins import (
    CrashingBackend,
    CrashingResidency,
    LyingResidency,
    SilentResidency,
    SlowBackend,
    WrappedResidency,
)
from faulty_mock import FaultyResidency as MockResidency
from faulty_mock import give_back, reboot

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import said
from rollmuxd.explain.causes import sentence
from rollmuxd.explain.explainer import Explainer
from rollmuxd.spi import NotDone

virtual = [pytest.mark.asyncio, pytest.mark.looptime]


def asynchronous(test):
    for mark in virtual:
        test = mark(test)
    return test


class OnlyFor(WrappedResidency):
    """Spoils the orders of one job only: by another driver around the same hardware."""

    def __init__(self, name, bad, inner=None):
        super().__init__(inner or MockResidency())
        self.name, self.bad = name, bad

    async def _meet(self, method, order):
        self.told.append((method, order))
        if order.name == self.name and method in self.bad.only:
            await getattr(self.bad, method)(order)
            return False
        return True


@asynchronous
async def test_sglang_a_release_that_answers_200_and_frees_nothing_lets_nobody_in(stage):
    """SGLang without its memory saver: the call that releases memory answers 200 and frees nothing (RLix, tms-fixes).

    We: GPUs are given on when a backend has verified them clean. The driver's word moves nobody in; the node is
    quarantined after its time, with the reason, and comes back when it is clean after all.
    """
    liar = OnlyFor("a", LyingResidency(MockResidency()))
    async with stage(liar, clean_timeout_ms=30_000) as world:
        for name in "abc":
            await world.join(name, "rollout")
        a = await world.hold("a")
        await world.release(a)
        b = await world.ask("b")

        await world.wait_for(lambda: world.node("r").status == "quarantined")
        assert world.state.slots[b].status == "queued"
        assert "not verified clean" in sentence(world.node("r").reason)
        give_back(world.backend.host("r").machine, "a", "r/gpu0")
        give_back(world.backend.host("r").machine, "a", "r/gpu1")
        await world.until(b, "running")


@asynchronous
async def test_slime_579_a_release_that_returns_before_the_memory_is_free_is_waited_for(stage):
    """slime: the release returned before the memory was free, and what came next ran out of it (PR #579).

    We: what is seen after the release counts; until then the next one waits, and no longer.
    """
    late = OnlyFor("a", LyingResidency(MockResidency()))
    async with stage(late) as world:
        for name in "ab":
            await world.join(name, "rollout")
        await world.release(await world.hold("a"))
        b = await world.ask("b")
        await world.stays(lambda: world.state.slots[b].status == "queued", 5.0)

        for gpu in ("r/gpu0", "r/gpu1"):
            give_back(world.backend.host("r").machine, "a", gpu)

        assert await world.until(b, "running") < 35.0, "a look at the host is never further away than that"


@asynchronous
async def test_a_second_engine_is_not_started_on_a_half_empty_gpu(stage):
    """Engines size their memory by what they find: a second one on a GPU with a sleeper's rest crashes, or stays small
    for ever (verl #5979, OpenRLHF #1162; sleeping engines keep 2 to 8 GB).

    We: what may stay is agreed when a job registers; so much more than that, and nobody starts there.
    """
    async with stage(options={"residual_gb": 12}) as world:
        await world.join("a", "rollout", residual_mb=2_000)
        await world.join("b", "rollout", residual_mb=2_000)
        await world.release(await world.hold("a"))
        b = await world.ask("b")

        await world.stays(lambda: world.state.slots[b].status == "queued", 30.0)
        assert [order.name for verb, order in told(world) if verb == "load"] == ["a"]


@asynchronous
async def test_what_stays_beyond_that_is_let_where_all_others_fit_and_is_counted_from_then_on(stage):
    """The other side of it: what an engine keeps grows with time (RTS: 2 to 8 GB), and a limit that is an end in itself
    stops a group in which everybody has room.

    We: it is judged after a time in which it may still go; then it is written down, counted, and the next one goes on.
    """
    async with stage(options={"residual_gb": 8}) as world:
        await world.join("a", "rollout", residual_mb=2_000)
        await world.join("b", "rollout", residual_mb=2_000)
        await world.release(await world.hold("a"))
        b = await world.ask("b")

        await world.stays(lambda: world.state.slots[b].status == "queued", 14.0)
        await world.until(b, "running")
        left = [fact for fact in await facts(world) if isinstance(fact, f.ResidualMemoryObserved)]
        assert [(fact.mb, fact.agreed_mb) for fact in left] == [(8_000, 2_000)]


@asynchronous
async def test_what_was_agreed_to_stay_is_in_nobodys_way(stage):
    """The other side of it: a checkpointing engine always keeps something (RTS's matrix: 2 to 4 GB), and a check for
    zero would never let anybody in.

    We: the residual memory that was declared counts as clean.
    """
    async with stage() as world:
        await world.join("a", "rollout", residual_mb=4_000)
        await world.join("b", "rollout", residual_mb=4_000)
        await world.release(await world.hold("a"))

        await world.hold("b")


@asynchronous
async def test_a_restore_that_sticks_for_ever_costs_its_own_time_limit_and_its_own_job(stage):
    """cuda-checkpoint hangs beside a sleeping vLLM (RTS's report), and the group hangs with it.

    We: an order has a time limit; then that job is quarantined, with the reason, and the next one goes.
    """
    async with stage(OnlyFor("a", SilentResidency(MockResidency(), only=("load",)))) as world:
        for name in "ab":
            await world.join(name, "rollout")
        a = await world.ask("a")
        b = await world.ask("b")

        waited = await world.until(b, "running")

        assert 10.0 <= waited <= 10.0 + 2.0
        assert world.state.slots[a].granted_at is None
        assert world.job("a").status == "quarantined"
        assert "no answer within 10 s" in sentence(world.job("a").reason)
        assert world.job("b").status in {"probing", "admitted"}


@asynchronous
async def test_rts_a_restore_that_failed_is_never_told_as_restored(stage):
    """RTS: `ContextRestored` is always true (`server.go` line 132); the job goes on with whatever is there.

    We: `granted` means loaded. Who could not be loaded is told so, and runs on nothing.
    """
    async with stage() as world:
        world.backend.faults.add("fail", "load", job="a", message="CUDA out of memory")
        await world.join("a", "rollout")
        a = await world.ask("a")

        await world.until(a, "faulted", "over")

        assert world.state.slots[a].granted_at is None
        assert "CUDA out of memory" in str(world.state.slots[a].reason)


@asynchronous
async def test_rts_165_a_fault_is_tried_again_where_that_does_no_harm_and_can_be_reinstated_where_not(stage):
    """RTS: one failure in twenty of cuda-checkpoint put a job into FAULTED, and any such job blocked its whole group
    until somebody repaired it by hand ("every time-slice switch is one" chance to fail, PR #165).

    We: an order that may be repeated is; then it is that job's trouble alone; and `reinstate` is the way out.
    """
    async with stage() as world:
        for name in "abc":
            await world.join(name, "rollout")
        once = world.backend.faults.add("fail", "park", job="a", times=1)
        await world.release(await world.hold("a"))
        b = await world.hold("b")
        assert world.job("a").status != "quarantined", "once is no fault"
        world.backend.faults.remove(once)

        always = world.backend.faults.add("fail", "park", job="b")
        await world.release(b)
        c = await world.hold("c")  # what b could not park is discarded, and seen to be gone
        assert world.job("b").status == "quarantined"
        await world.release(c)
        await world.hold("a")

        world.backend.faults.remove(always)
        await world.writer.submit(i.ResumeJob(world.job("b").id, "ann", quarantined=True))
        await world.wait_for(lambda: world.job("b").status in {"probing", "admitted"})
        await world.ask("b")


@asynchronous
async def test_vllm_level_2_nobody_wakes_without_weights(stage):
    """vLLM: sleep level 2 throws the weights away, and a wake-up that does not load them anew serves noise (NeMo-RL
    #2631, TRL).

    We: a discarded state is GONE, and the load after it is told as a cold one. Warm is said of what was parked, and of
    nothing else: not after the machine was restarted, and not to a process that was started again.
    """
    async with stage() as world:
        for name in "ab":
            await world.join(name, "rollout")
        await world.release(await world.hold("a"))
        await world.release(await world.hold("b"))
        await world.release(await world.hold("a"))
        assert [order.warm for verb, order in told(world) if verb == "load" and order.name == "a"] == [False, True]

        await world.release(await world.hold("b"))  # a's is parked
        job = world.job("a")
        await world.writer.submit(i.OpenSession(job.id, "a", 4711, "box", "anew"))
        await world.wait_for(lambda: states(world, "a") == ["gone"])
        await world.release(await world.hold("a"))
        assert [order.warm for verb, order in told(world) if verb == "load" and order.name == "a"][2:] == [False]

        reboot(world.backend.host("r").machine)
        world.away("r")
        await world.wait_for(lambda: world.node("r").status == "up" and states(world, "a") == ["gone"])
        await world.hold("b")
        assert [order.warm for verb, order in told(world) if verb == "load" and order.name == "b"][-1] is False


@asynchronous
async def test_rlix_what_is_loaded_is_not_loaded_again(stage):
    """SGLang and TMS: resuming twice crashes (RLix, tms-fixes); slime #1895: sleeping twice does.

    We: the daemon knows where each state is; the same job coming next moves nothing.
    """
    async with stage() as world:
        await world.join("a")
        for _ in range(3):
            await world.release(await world.hold("a", "rollout"))
            await world.release(await world.hold("a", "train"))

        assert [(verb, order.pool) for verb, order in told(world)] == [("load", "rollout"), ("load", "train")]


@asynchronous
async def test_rlix_an_error_that_nobody_foresaw_stops_one_job_and_nobody_else(stage):
    """RLix: any unexpected exception shuts the whole Ray cluster down by force (fail-fast by design).

    We: with a driver that raises what no contract allows contact is lost; its job is quarantined, all others go on.
    """
    async with stage(OnlyFor("a", CrashingResidency(MockResidency(), only=("load", "park", "discard")))) as world:
        for name in "abc":
            await world.join(name)
        a = await world.ask("a")
        await world.until(a, "faulted", "over")

        for _ in range(2):
            for name in "bc":
                await world.release(await world.hold(name))
                await world.release(await world.hold(name, "train"))
        assert world.job("a").status == "quarantined"
        assert "RuntimeError" in sentence(world.job("a").reason)


@asynchronous
async def test_rlix_a_backend_with_a_bug_costs_the_sight_of_its_hosts_and_nothing_else(stage):
    """The same of a backend: RLix's resource manager raises, and everything ends.

    We: the host is unreachable for as long as that lasts, which its node says; then it is back.
    """
    bad = []

    def spoilt(backend):
        bad.append(CrashingBackend(SlowBackend(backend, 0.002), only=()))
        return bad[0]

    async with stage(backend_like=spoilt) as world:
        await world.join("a")
        a = await world.hold("a")
        bad[0].only = ("observe",)
        await world.release(a)
        await world.join("b")
        b = await world.ask("b")
        await world.stays(lambda: world.state.slots[b].status != "running", 20.0)

        bad[0].only = ()
        world.away("r")
        await world.until(b, "running")


@asynchronous
async def test_rts_155_a_job_on_several_hosts_is_loaded_on_all_of_them_at_once(stage):
    """RTS: hosts are restored one after the other; the ranks of a job on several hosts wait for each other in the
    restore, and so for ever (#155).

    We: all loads of a claim are told at once, and the slot is granted when all have ended.
    """

    class Ranks(WrappedResidency):
        """A load ends when the loads on all hosts have begun."""

        def __init__(self, inner, hosts):
            super().__init__(inner)
            self.hosts, self.begun, self.all = hosts, set(), anyio.Event()

        async def load(self, order):
            self.begun.add(order.host)
            if len(self.begun) == self.hosts:
                self.all.set()
            await self.all.wait()
            await super().load(order)

    nodes = (("r1", 2, "rollout"), ("r2", 2, "rollout"), ("r3", 2, "rollout"))
    async with stage(Ranks(MockResidency(), 3), nodes) as world:
        await world.join("wide", "rollout", nodes=3)

        slot = await world.hold("wide")

        assert len(world.state.slots[slot].gpus) == 6


@asynchronous
async def test_rts_155_a_load_that_fails_on_one_host_grants_nothing_on_the_others(stage):
    """The other side of it: a job that is restored on one host of two is of no use, and holds both.

    We: the slot is faulted as a whole; what was loaded elsewhere is cleared away before anybody else comes.
    """
    nodes = (("r1", 2, "rollout"), ("r2", 2, "rollout"))
    async with stage(None, nodes) as world:
        world.backend.faults.add("fail", "load", host="r2", job="wide")
        await world.join("wide", "rollout", nodes=2)
        await world.join("b", "rollout", nodes=2)
        wide = await world.ask("wide")
        b = await world.ask("b")

        await world.until(b, "running")

        assert world.state.slots[wide].granted_at is None
        assert world.job("wide").status == "quarantined"


@asynchronous
async def test_nemo_2523_parked_states_never_need_more_host_ram_than_there_is(stage):
    """vLLM's sleep level 1 fills the host's RAM until the machine swaps or kills (NeMo-RL PR #2523, OpenRLHF #1013,
    slime #113).

    We: RAM for every parked state is reserved when a job is placed; for whom there is none, waits and is told so.
    """
    async with stage(nodes=(("r", 2, "rollout"),)) as world:
        await world.join("a", "rollout", ram_mb=60_000)
        await world.join("b", "rollout", ram_mb=60_000)

        assert world.job("a").pins
        assert world.job("b").status == "waiting"
        why = Explainer(world.writer.scheduler.context).why_job_waits(world.job("b").id, 10**15).reasons
        assert "parked states" in " ".join(reason.text for reason in why)
        await world.writer.submit(i.EndJob(world.job("a").id, "ann"))
        await world.wait_for(lambda: world.job("b").status in {"probing", "admitted"})


@asynchronous
async def test_a_driver_whose_word_comes_late_and_twice_moves_nothing_twice(stage):
    """Doubled and late reports: an offload that timed out in one place and was done in another is counted twice by
    state machines that take each report for news (RTS's agent and orchestrator, each with its own).

    We: an order ends once; what comes afterwards changes nothing.
    """
    async with stage() as world:
        for name in "ab":
            await world.join(name, "rollout")
        a = await world.hold("a")
        orders = [fact for fact in await facts(world) if isinstance(fact, f.OrderIssued)]
        before = len(await facts(world))

        for late in (i.OrderDone(orders[0].order), i.OrderFailed(orders[0].order, said("no")), i.OrderDone("o999")):
            await world.writer.submit(late)

        assert (await facts(world))[before:] == []
        assert world.state.slots[a].status == "running"


@asynchronous
async def test_a_process_that_dies_under_a_park_does_not_take_its_successor_into_quarantine(stage):
    """RTS: after a pod was replaced, what is left of the one before decides on the state of the new one; it is removed
    by hand.

    We: an order from before the process that the run has now says nothing of it.
    """

    class Dying(WrappedResidency):
        def __init__(self, inner):
            super().__init__(inner)
            self.dies, self.parking = anyio.Event(), anyio.Event()

        async def park(self, order):
            if order.name == "a":
                self.parking.set()
                await self.dies.wait()
                raise NotDone("its process has died")
            await super().park(order)

    driver = Dying(MockResidency())
    async with stage(driver) as world:
        for name in "ab":
            await world.join(name, "rollout")
        await world.release(await world.hold("a"))
        b = await world.ask("b")
        await driver.parking.wait()
        await anyio.sleep(1.0)

        await world.writer.submit(i.OpenSession(world.job("a").id, "a", 4711, "box", "anew"))
        for gpu in ("r/gpu0", "r/gpu1"):
            give_back(world.backend.host("r").machine, "a", gpu)
        driver.dies.set()

        await world.until(b, "running")
        assert world.job("a").status in {"probing", "admitted"}


# ---- reading ---------------------------------------------------------------------------------------------------------


def told(world):
    """Each order as the driver was told it, with its verb."""
    return world.residency.told


def states(world, name):
    return [str(world.state.states[key].status) for key in world.job(name).states]


async def facts(world):
    found, _ = await world.writer.facts_after(0, 0, 100_000)
    return [fact for _, fact in found]
