"""What a follower of the facts keeps for each open order, until a fact says that the order has ended."""

from typing import Generic, TypeVar

from rollmuxd.core import facts as f
from rollmuxd.core.ids import OrderId
from rollmuxd.core.model import Order
from rollmuxd.core.state import state_key

T = TypeVar("T")


class OpenOrders(Generic[T]):
    """Holds one thing for each open order.

    An order is over by its own end, or when the state that it moves was observed after its host had been away. No
    state has two orders, so that this cannot become more than there are.
    """

    def __init__(self) -> None:
        self._kept: dict[OrderId, tuple[str, T]] = {}
        self._of_state: dict[str, OrderId] = {}

    def add(self, order: f.OrderIssued | Order, kept: T) -> None:
        """It was issued."""
        name = order.order if isinstance(order, f.OrderIssued) else order.id
        state = state_key(order.job, order.pool, order.node)
        self.over(self._of_state.get(state, ""))
        self._kept[name], self._of_state[state] = (state, kept), name

    def over(self, order: OrderId) -> T | None:
        """It is over; what was kept for it."""
        found = self._kept.pop(order, None)
        if found is None:
            return None
        del self._of_state[found[0]]
        return found[1]

    def seen(self, fact: f.StateObserved) -> T | None:
        """Where a state is was seen; what was kept for the order that is over with that."""
        return self.over(self._of_state.get(state_key(fact.job, fact.pool, fact.node), ""))
