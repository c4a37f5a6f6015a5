"""Weights that travel between two phases, for the hooks: ``rollmux=dict(weights=Between(...))``.

Sharing costs most where a phase holds both pools, and handing on the weights is such a phase (RollMux, section 5.2).
Here the train slot ends when the weights are copied to host memory, and the rollout slot begins when they are on the
rollout hosts. What else a version needs, sums and differences, is made between the two.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rollmuxd_weights.core.fence import Identity
from rollmuxd_weights.publish import Copied, Publisher, take_part


class Between:
    """A mover for the hooks of TRL and of the other frameworks (:class:`rollmuxd_hook_kit.turns.Mover`).

    Every trainer host publishes, so that each slow line carries a shard of its own. One rank of the job, the first,
    waits and loads.

    ``publisher``: of this trainer host, on one rank of it; None on the other ranks. ``weights``: returns the tensors to
    publish, whole or sharded; every rank calls it, and takes part in gathering shards. ``load``: on the rank that
    loads: gets a version's identity, and puts it into the engines; None on the other ranks. ``rollouts``: how many
    rollout hosts have to have it. ``expected_s``: what that takes.

    Raises ValueError for ``load`` without a publisher.
    """

    def __init__(
        self,
        publisher: Publisher | None,
        weights: Callable[[], Mapping[str, Any]],
        load: Callable[[Identity], Any] | None,
        *,
        rollouts: int,
        expected_s: float,
        timeout_s: float = 600.0,
    ) -> None:
        if load is not None and publisher is None:
            raise ValueError(
                "load= is given, and publisher=None: the rank that loads needs a publisher, which knows the version. "
                "Give load=None on the ranks that load nothing"
            )
        self.expected_s = expected_s
        self._publisher, self._weights, self._load = publisher, weights, load
        self._rollouts, self._timeout_s = rollouts, timeout_s
        self._copied: Copied | None = None
        self._identity: Identity | None = None
        self._published = 0
        self._before: Identity | None = None

    def publish(self, fence: str | None = None) -> None:
        """Copy the weights to host memory, as this loop's first version, its second, and so on.

        ``fence``: the slot's. All hosts have the same, so they agree on the version, whatever is in their stores. None,
        where there is no daemon: the version follows what this host's store has of the publisher's run. So hosts whose
        stores differ agree once their publishers have a new run.
        """
        tensors = self._weights()
        self._published += 1
        if self._publisher is None:
            take_part(tensors)
            return
        version = self._published
        if fence is None:
            self._before = self._before or self._newest(self._publisher)
            fence = f"{self._before.incarnation}.{self._before.number}"
            version += self._before.version
        self._copied = self._publisher.copy(tensors, version, fence=fence)

    @staticmethod
    def _newest(publisher: Publisher) -> Identity:
        found = publisher.store.current()
        return found if found is not None and found.run == publisher.run else Identity(publisher.run, 0, 0, 0)

    def wait(self) -> None:
        """Offer the copy; on the rank that loads, return when every rollout host has it. Raises TimeoutError."""
        if self._publisher is not None and self._copied is not None:
            self._identity = self._publisher.offer(self._copied).identity
            self._copied = None
        if self._load is not None and self._publisher is not None and self._identity is not None:
            self._publisher.wait_pulled(self._identity, hosts=self._rollouts, timeout_s=self._timeout_s)

    def load(self) -> None:
        """Load it into the engines."""
        if self._load is not None and self._identity is not None:
            self._load(self._identity)
