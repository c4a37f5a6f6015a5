"""The same bound for wheels: groups as loom plans them, in the best partition, moved for nothing.

Exact means over the groups that loom's planner finds (:mod:`~rollmuxd.core.loom_plan`): which partition of the jobs
is cheapest is solved, which wheels there are for a set of jobs is searched.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from rollmuxd.core import loom_plan, loom_words
from rollmuxd.sim.optimal import MICRO, PRICE, WHOLE, Need, Plan, Planner
from rollmuxd.sim.workload import Pool, SimJob

#: what the planner knows of a price that it must not find nothing: pools without one are told apart by their nodes
_LEAST_PRICE: Final = 1 / MICRO


class WheelPlanner(Planner):
    """The cheapest wheel for a set of jobs, in which each goes round at its own rate."""

    def __init__(self, jobs: Sequence[SimJob], pools: Sequence[Pool]) -> None:
        super().__init__(jobs, pools)
        rooms = {}
        for name, price in ((self.part_pool, self.part_price), (WHOLE, self.whole_price)):
            known = self.pools.get(name)
            if known is not None:
                dollars = price / MICRO or _LEAST_PRICE
                rooms[name] = loom_words.Room(dollars, dollars, known.ram_mb, known.gpu_mb or inf)
        self._wheels = loom_plan.Planner(rooms)
        self._mine = {id(need): self._wheel_need(need) for need in self.needs}

    def _wheel_need(self, need: Need) -> loom_words.Need:
        pools = {self.part_pool: need.part, WHOLE: need.whole}
        phases = tuple(
            (
                tuple(pool for pool, used in ((self.part_pool, on_part), (WHOLE, on_whole)) if used),
                took + moves,
                gap,
            )
            for on_part, on_whole, took, moves, gap in need.phases
        )
        kept = tuple(
            (
                pool,
                sum(state.ram_mb for state in states),
                sum(state.leftover_mb for state in states),
                max(state.gpu_mb - state.leftover_mb for state in states),
            )
            for pool, states in ((self.part_pool, need.part_states), (WHOLE, need.whole_states))
            if states
        )
        return loom_words.Need(
            job=need.name,
            phases=phases,
            widths=tuple((pool, width) for pool, width in pools.items() if width),
            solo_ms=need.solo_ms,
            round_ms=sum(took + gap for _, took, gap in phases),
            limit_ms=need.limit_ms,
            kept=kept,
        )

    def _together(self, needs: Sequence[Need]) -> Plan | None:
        found = self._wheels.fit([self._mine[id(need)] for need in needs])
        if found is None:
            return None
        whole, part = found.nodes.get(WHOLE, 0), found.nodes.get(self.part_pool, 0)
        rates = tuple(found.rate(place) for place in range(len(needs)))
        slowdown = sum(
            1000 * found.period_ms // (rate * (need.solo_ms or 1)) for need, rate in zip(needs, rates, strict=True)
        )
        price = whole * self.whole_price + part * self.part_price
        return Plan(whole, part, found.period_ms, price * PRICE + slowdown, rates)
