"""A contract that nothing can break is worth nothing: each bad plugin is caught by the sentence that it breaks."""

import anyio
import pytest
from bad_plugins import (
    CrashingBackend,
    CrashingResidency,
    LyingBackend,
    LyingResidency,
    SilentBackend,
    SilentResidency,
    WrappedBackend,
    WrappedResidency,
)
from faulty_mock import FaultyMock as MockBackend
from faulty_mock import FaultyResidency as MockResidency

from rollmuxd.spi import (
    ContactLost,
    DriverTraits,
    GpuObservation,
    HostConfig,
    Inventory,
    NotDone,
    Observation,
    Probed,
    StateSpec,
)
from rollmuxd.spi.contract import BackendContract, ResidencyContract, Rig
from rollmuxd.spi.fakes import FakeChannel

GPUS = ("host1/gpu0", "host1/gpu1")
STATE = StateSpec(pool="rollout", gpu_mb=4_000, residual_mb=500, ram_mb=8_000, driver="mock")
RED = (AssertionError, RuntimeError, TimeoutError, NotDone, ContactLost, ExceptionGroup, pytest.fail.Exception)


# ---- bad backends ----------------------------------------------------------------------------------------------------


class LeavesOneOut(WrappedBackend):
    async def observe(self, host):
        observation = await super().observe(host)
        return Observation(gpus=observation.gpus[:-1], boot_id=observation.boot_id)


class ShowsOneTwice(WrappedBackend):
    async def observe(self, host):
        observation = await super().observe(host)
        return Observation(gpus=observation.gpus + observation.gpus[:1], boot_id=observation.boot_id)


class Forgetful(WrappedBackend):
    """Another boot id each time."""

    async def observe(self, host):
        observation = await super().observe(host)
        return Observation(gpus=observation.gpus, boot_id=f"boot-{self.calls['observe']}")


class EmptyWhenAway(WrappedBackend):
    """The classic: what cannot be reached has nothing on it."""

    async def observe(self, host):
        try:
            return await super().observe(host)
        except ContactLost:
            return Observation(gpus=tuple(GpuObservation(gpu=gpu, used_mb=0) for gpu in GPUS), boot_id="b")

    async def inventory(self, host):
        try:
            return await super().inventory(host)
        except ContactLost:
            return Inventory(gpus=(), ram_mb=0)


class Cached(WrappedBackend):
    kept = None

    async def observe(self, host):
        self.kept = self.kept or await super().observe(host)
        return self.kept


class BrokenByCancelling(WrappedBackend):
    broken = False

    async def observe(self, host):
        if self.broken:
            raise ContactLost("the connection was left half open")
        try:
            await anyio.lowlevel.checkpoint()
            return await super().observe(host)
        except BaseException:
            self.broken = True
            raise


class DeafToCancelling(WrappedBackend):
    async def observe(self, host):
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.2)
        return await super().observe(host)


class EndsAnything(WrappedBackend):
    async def kill(self, *_):
        return True


class ClosesOnce(WrappedBackend):
    closed = False

    async def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


def backend_contract(wrap, patience=300.0):
    class Contract(BackendContract):
        patience_s = patience

        async def make(self):
            return wrap(await MockBackend.open([HostConfig(id="host1", gpus=GPUS)], {}))

        async def take_away(self, backend):
            backend.inner.faults.add("lose")

        async def bring_back(self, backend):
            backend.inner.faults.clear()

        async def occupy(self, backend):
            backend.inner.faults.occupy(GPUS[0], 1_000)
            return GPUS[0], 1_000

    return Contract()


BACKENDS = [
    (LeavesOneOut, "test_it_sees_every_gpu_of_the_host_exactly_once"),
    (ShowsOneTwice, "test_it_sees_every_gpu_of_the_host_exactly_once"),
    (Forgetful, "test_asked_twice_it_has_the_same_gpus_and_the_same_boot_id"),
    (EmptyWhenAway, "test_a_host_that_is_away_is_contact_lost_and_never_an_empty_answer"),
    (EmptyWhenAway, "test_a_host_it_was_not_opened_for_is_contact_lost"),
    (Cached, "test_it_looks_each_time_and_never_gives_a_cached_answer"),
    (LyingBackend, "test_it_looks_each_time_and_never_gives_a_cached_answer"),
    (BrokenByCancelling, "test_a_call_cancelled_at_any_await_ends_and_leaves_it_usable"),
    (EndsAnything, "test_it_never_ends_a_process_whose_start_time_is_another"),
    (EndsAnything, "test_it_never_ends_a_process_group_or_init"),
    (ClosesOnce, "test_it_may_be_closed_twice_and_before_anything_was_asked"),
    (CrashingBackend, "test_it_may_be_called_concurrently"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("wrap", "sentence"), BACKENDS, ids=[f"{wrap.__name__}-{text}" for wrap, text in BACKENDS])
async def test_a_bad_backend_breaks_its_sentence(wrap, sentence):
    with pytest.raises(RED):
        await getattr(backend_contract(wrap), sentence)()
    # The same sentence holds for a good one: it is the badness that was caught.
    await getattr(backend_contract(WrappedBackend), sentence)()


@pytest.mark.asyncio
@pytest.mark.parametrize("wrap", [SilentBackend, DeafToCancelling])
async def test_a_backend_that_hangs_is_caught_by_patience(wrap):
    contract = backend_contract(wrap, patience=0.02)
    with pytest.raises(TimeoutError):
        await contract.test_a_call_cancelled_at_any_await_ends_and_leaves_it_usable()


# ---- bad drivers -----------------------------------------------------------------------------------------------------


class LoadsNothing(WrappedResidency):
    async def load(self, order):
        pass


class FailsOnNothing(WrappedResidency):
    """A discard of what is not there is an error."""

    def __init__(self, inner):
        super().__init__(inner)
        self.there = set()

    async def load(self, order):
        await super().load(order)
        self.there.add(order.job)

    async def discard(self, order):
        if order.job not in self.there:
            raise NotDone("nothing there")
        await super().discard(order)


class SaysDoneOfAnything(WrappedResidency):
    async def probe(self, order):
        return Probed(known=True, done=True)


class SaysNotDoneOfAnything(WrappedResidency):
    async def probe(self, order):
        return Probed(known=True, error="no")


class MovesTwice(WrappedResidency):
    """Says idempotent, and is not: a second load comes on top of the first."""

    traits = DriverTraits(idempotent=True, probes=True)

    async def load(self, order):
        await super().load(order)
        if len([one for _, one in self.told if one.order == order.order]) > 1:
            for gpu in order.gpus:
                order.backend.faults.occupy(gpu, 100)


class StuckByCancelling(WrappedResidency):
    stuck = False

    async def load(self, order):
        if self.stuck:
            raise NotDone("an earlier load is still in progress")
        self.stuck = True
        await super().load(order)
        self.stuck = False


class OneAtATime(WrappedResidency):
    at = 0

    async def load(self, order):
        if self.at:
            raise NotDone("busy")
        self.at += 1
        try:
            await super().load(order)
        finally:
            self.at -= 1


class DoneWhenAway(WrappedResidency):
    async def park(self, order):
        try:
            await super().park(order)
        except ContactLost:
            return


class DropsAtClose(WrappedResidency):
    async def close(self):
        for method, order in self.told:
            if method == "load":
                await self.inner.discard(order)


def residency_contract(wrap):
    class Contract(ResidencyContract):
        tolerance_mb = 0
        patience_s = 300.0

        async def make(self):
            backend = await MockBackend.open(
                [HostConfig(id="host1", gpus=GPUS)], {"copy_gbps": 4_000.0, "cold_s": 0.002}
            )
            residency = wrap(await MockResidency.open(FakeChannel(), {}))
            return Rig(residency=residency, backend=backend, host="host1", gpus=GPUS, state=STATE)

        async def take_away(self, rig):
            rig.backend.faults.add("lose")

        async def open_with(self, options):
            return await MockResidency.open(FakeChannel(), options)

    return Contract()


RESIDENCIES = [
    (LyingResidency, "test_load_park_load_and_each_time_the_memory_follows"),
    (LyingResidency, "test_discard_frees_what_is_loaded"),
    (LyingResidency, "test_discard_frees_what_is_parked_and_its_left_overs"),
    (LoadsNothing, "test_load_park_load_and_each_time_the_memory_follows"),
    (LoadsNothing, "test_after_a_discard_it_can_be_loaded_anew"),
    (FailsOnNothing, "test_discard_of_nothing_is_done_and_so_is_a_second_one"),
    (MovesTwice, "test_an_order_told_twice_is_done_once"),
    (OneAtATime, "test_two_jobs_are_moved_at_the_same_time"),
    (StuckByCancelling, "test_an_order_cancelled_at_any_await_ends_and_the_state_is_not_out_of_reach"),
    (SaysNotDoneOfAnything, "test_a_probe_after_each_order_never_contradicts_what_was_answered"),
    (SaysDoneOfAnything, "test_a_probe_of_an_order_that_was_never_told_does_not_say_done"),
    (SaysDoneOfAnything, "test_a_probe_of_an_order_cut_short_does_not_say_done_of_what_is_not"),
    (DoneWhenAway, "test_with_the_host_away_no_order_is_said_to_be_done"),
    (DropsAtClose, "test_it_may_be_closed_twice_and_states_stay_where_they_are"),
    (CrashingResidency, "test_discard_of_nothing_is_done_and_so_is_a_second_one"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wrap", "sentence"), RESIDENCIES, ids=[f"{wrap.__name__}-{text}" for wrap, text in RESIDENCIES]
)
async def test_a_bad_driver_breaks_its_sentence(wrap, sentence):
    with pytest.raises(RED):
        await getattr(residency_contract(wrap), sentence)()
    await getattr(residency_contract(WrappedResidency), sentence)()


@pytest.mark.asyncio
async def test_a_driver_that_hangs_is_caught_by_patience():
    contract = residency_contract(SilentResidency)
    type(contract).patience_s = 0.02
    with pytest.raises(TimeoutError):
        await contract.test_discard_frees_what_is_loaded()


@pytest.mark.asyncio
async def test_a_sentence_that_is_broken_shows_the_values_as_a_test_of_ones_own_does():
    """pytest does that in test modules only, unless it is told of others before they are imported."""
    contract = backend_contract(Forgetful)
    with pytest.raises(AssertionError, match="assert 8 == 1"):
        await contract.test_it_may_be_called_concurrently()


class TakesItsTime(WrappedBackend):
    begun = 0

    async def observe(self, host):
        self.begun += 1
        await anyio.sleep(0.02)
        return await super().observe(host)


@pytest.mark.asyncio
async def test_a_call_is_cancelled_at_the_moments_that_the_author_says_and_at_no_other():
    made = []

    def make(backend):
        made.append(TakesItsTime(backend))
        return made[0]

    contract = backend_contract(make)
    type(contract).cancelled_after_turns, type(contract).cancelled_after_s = (3, 4), (0.001,)
    await contract.test_a_call_cancelled_at_any_await_ends_and_leaves_it_usable()
    assert (made[0].begun, made[0].calls["observe"]) == (6, 3), "three are cancelled, and each is followed by a look"


def test_the_contract_can_be_had_without_the_rest_of_rollmuxd_and_spi_without_the_contract():
    """spi itself stays free of pytest and anyio: the daemon imports it, and a plugin's author may have neither."""
    import subprocess
    import sys

    script = "import rollmuxd.spi, sys; bad = {'pytest', 'anyio'} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", script], check=True)
    script = "import rollmuxd.spi.contract, sys; assert 'rollmuxd.daemon' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
