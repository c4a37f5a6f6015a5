"""Orders: what is on the GPUs after a load, a park and a discard; sent twice, cut short, too late, to no process."""

import contextlib
import gc

import anyio
import pytest

from rollmuxd.core.ids import GpuId
from rollmuxd.core.model import OrderKind
from rollmuxd.spi.contract.moments import cancelled, sentence
from rollmuxd.spi.contract.rig import GivenDriver, Rig
from rollmuxd.spi.errors import ContactLost, NotDone
from rollmuxd.spi.residency import StateOrder


class Moves(GivenDriver):
    """What every residency driver promises."""

    @sentence
    async def test_load_park_load_and_each_time_the_memory_follows(self, rig: Rig) -> None:
        for warm in (False, True, True):
            await self._tell(rig, self.order(rig, OrderKind.LOAD, warm=warm))
            await self._is_loaded(rig)
            await self._tell(rig, self.order(rig, OrderKind.PARK))
            await self._is_clean(rig)

    @sentence
    async def test_discard_frees_what_is_loaded(self, rig: Rig) -> None:
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._is_clean(rig, residual_mb=0)

    @sentence
    async def test_discard_frees_what_is_parked_and_its_left_overs(self, rig: Rig) -> None:
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        await self._tell(rig, self.order(rig, OrderKind.PARK))
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._is_clean(rig, residual_mb=0)

    @sentence
    async def test_discard_of_nothing_is_done_and_so_is_a_second_one(self, rig: Rig) -> None:
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._is_clean(rig, residual_mb=0)

    @sentence
    async def test_after_a_discard_it_can_be_loaded_anew(self, rig: Rig) -> None:
        for _ in range(2):
            await self._tell(rig, self.order(rig, OrderKind.LOAD))
            await self._is_loaded(rig)
            await self._tell(rig, self.order(rig, OrderKind.DISCARD))

    @sentence
    async def test_park_before_anything_was_loaded_puts_nothing_onto_the_gpus(self, rig: Rig) -> None:
        with contextlib.suppress(NotDone, ContactLost):  # both are honest
            await self._tell(rig, self.order(rig, OrderKind.PARK))
        await self._is_clean(rig)

    @sentence
    async def test_an_order_told_twice_is_done_once(self, rig: Rig) -> None:
        if not rig.residency.traits.idempotent:
            pytest.skip("the driver does not say that it is idempotent")
        for kind in (OrderKind.LOAD, OrderKind.PARK, OrderKind.LOAD, OrderKind.DISCARD):
            order = self.order(rig, kind)
            await self._tell(rig, order)
            once = await self._used(rig)
            await self._tell(rig, order)
            assert await self._used(rig) == once, f"{kind} told twice moved memory twice"

    @sentence
    async def test_two_jobs_are_moved_at_the_same_time(self, rig: Rig) -> None:
        if len(rig.gpus) < 2:
            pytest.skip("the rig has one GPU only")

        async def go(job: str, gpu: GpuId) -> None:
            for kind in (OrderKind.LOAD, OrderKind.PARK, OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD):
                await self._tell(rig, self.order(rig, kind, job=job, gpus=(gpu,)))

        async with anyio.create_task_group() as group:
            group.start_soon(go, "a", rig.gpus[0])
            group.start_soon(go, "b", rig.gpus[1])
        await self._is_clean(rig, residual_mb=0)

    # A library may leave a connection that is cut short while it is made to the garbage collector.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @sentence
    async def test_an_order_cancelled_at_any_await_ends_and_the_state_is_not_out_of_reach(self, rig: Rig) -> None:
        """Afterwards the daemon tells it again (idempotent), or has the state discarded."""
        for moment in self._moments():
            loaded = await self._cut_short(rig, self.order(rig, OrderKind.LOAD), moment)
            if rig.residency.traits.idempotent:
                await self._is_loaded(rig)
                parked = await self._cut_short(rig, self.order(rig, OrderKind.PARK), moment)
                await self._is_clean(rig)
            else:
                parked = True
            await self._tell(rig, self.order(rig, OrderKind.DISCARD))
            await self._is_clean(rig, residual_mb=0)
            if loaded and parked:
                break
        gc.collect()

    @pytest.mark.asyncio
    async def test_with_the_host_away_no_order_is_said_to_be_done(self) -> None:
        rig = await self.make()
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        await self.take_away(rig)
        for kind in (OrderKind.PARK, OrderKind.DISCARD):
            try:
                await self._tell(rig, self.order(rig, kind))
            except (ContactLost, NotDone, TimeoutError):
                continue
            pytest.fail(f"{kind} is said to be done on a host that is away")

    @pytest.mark.asyncio
    async def test_an_option_that_it_does_not_know_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match="no_such_option"):
            await self.open_with({"no_such_option": 1})

    @pytest.mark.asyncio
    async def test_it_may_be_closed_twice_and_states_stay_where_they_are(self) -> None:
        rig = await self.make()
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        await rig.residency.close()
        await rig.residency.close()
        await self._is_loaded(rig)
        await rig.backend.close()

    async def _cut_short(self, rig: Rig, order: StateOrder, moment: float) -> bool:
        """Cancel an order, then tell it again where that may be done. Whether it was done before it was cancelled."""
        with anyio.fail_after(self.patience_s):
            finished = await cancelled(lambda: self._tell(rig, order), moment)
        if rig.residency.traits.idempotent:
            await self._tell(rig, order)
        return finished
