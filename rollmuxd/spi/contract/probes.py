"""Probes: what may be said of an order without a known answer."""

import pytest

from rollmuxd.core.model import OrderKind
from rollmuxd.spi.contract.moments import cancelled, sentence
from rollmuxd.spi.contract.rig import GivenDriver, Rig


class Probes(GivenDriver):
    """What is promised by drivers that can be probed."""

    @sentence
    async def test_a_probe_after_each_order_never_contradicts_what_was_answered(self, rig: Rig) -> None:
        self._needs_probes(rig)
        for kind in (OrderKind.LOAD, OrderKind.PARK, OrderKind.LOAD, OrderKind.DISCARD):
            order = self.order(rig, kind)
            await self._tell(rig, order)
            probed = await rig.residency.probe(order)
            assert probed.done or not probed.known, f"{kind} was done, and the probe says it was not: {probed.error}"

    @sentence
    async def test_a_probe_of_an_order_that_was_never_told_does_not_say_done(self, rig: Rig) -> None:
        self._needs_probes(rig)
        for kind in OrderKind:
            assert not (await rig.residency.probe(self.order(rig, kind))).done
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        assert not (await rig.residency.probe(self.order(rig, OrderKind.PARK))).done
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))

    @sentence
    async def test_a_probe_of_an_order_cut_short_does_not_say_done_of_what_is_not(self, rig: Rig) -> None:
        self._needs_probes(rig)
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        for moment in self._moments():
            order = self.order(rig, OrderKind.PARK)
            if await cancelled(lambda order=order: rig.residency.park(order), moment):  # type: ignore[misc]
                break
            if (await rig.residency.probe(order)).done:
                await self._is_clean(rig)
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))

    @sentence
    async def test_an_order_that_a_probe_calls_not_begun_has_moved_nothing_and_can_be_told_again(
        self, rig: Rig
    ) -> None:
        self._needs_probes(rig)
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        for moment in (None, *self._moments()):
            order = self.order(rig, OrderKind.PARK)
            if moment is not None and await cancelled(lambda order=order: rig.residency.park(order), moment):  # type: ignore[misc]
                break
            probed = await rig.residency.probe(order)
            if probed.known and not probed.done and not probed.begun:
                await self._is_loaded(rig)
                await self._tell(rig, order)
                await self._is_clean(rig)
                assert (await rig.residency.probe(order)).begun, "it was done, and a probe says that it was not begun"
                await self._tell(rig, self.order(rig, OrderKind.LOAD))
            elif moment is not None:
                await self._tell(rig, self.order(rig, OrderKind.DISCARD))
                await self._tell(rig, self.order(rig, OrderKind.LOAD))
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))

    def _needs_probes(self, rig: Rig) -> None:
        if not rig.residency.traits.probes:
            pytest.skip("the driver does not say that it can be probed")
