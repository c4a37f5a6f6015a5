"""Sleep and wake by verl's own means, so that another job has the GPUs between two phases.

The trainer's state is parked by verl itself, which moves it to host memory after each call where its settings say so
(``param_offload``, ``optimizer_offload``). The engine is put to sleep by the ``CheckpointEngineManager``. It drops its
weights in its sleep, so it wakes as verl wakes it: by sending it the trainer's, which are the same as before.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rollmuxd.client.job import Job
from rollmuxd_hook_kit.turns import around


class Engine:
    """The engine of a trainer, as its checkpoint engine manager has it. ``step`` tells which weights it wakes with."""

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._send: Callable[..., Any] | None = None
        self._sleep: Callable[..., Any] | None = None
        self.awake = False
        #: it was awake when it was parked, and is to be when it is loaded
        self._to_wake = False

    def watch(self, manager: Any) -> None:
        """Follow whether the engine is awake, from when it sleeps."""
        around(manager, "update_weights", after=partial(setattr, self, "awake", True))
        around(manager, "sleep_replicas", after=partial(setattr, self, "awake", False))
        self._send, self._sleep = manager.update_weights, manager.sleep_replicas

    def attach(self, job: Job, *, pool: str) -> None:
        """Have the daemon park and load it. The hooks run while the trainer waits for a slot."""
        job.on_park(self._park, pool=pool)
        job.on_load(self._load, pool=pool)
        job.on_discard(self._discard, pool=pool)

    def _park(self, _: object) -> None:
        self._to_wake = self._to_wake or self.awake
        self._rest()

    def _load(self, _: object) -> None:
        if self._to_wake and self._send is not None:
            self._send(self._step())
            self._to_wake = False

    def _discard(self, _: object) -> None:
        self._to_wake = False
        self._rest()

    def _rest(self) -> None:
        if self.awake and self._sleep is not None:
            self._sleep()


def check_offload(config: Any, *, reference: bool, critic: bool, engine: bool = True) -> None:
    """Raise ValueError where verl would keep something on the GPUs between two phases."""
    model = config.actor_rollout_ref
    kept = list(_kept(model.actor, "actor_rollout_ref.actor", ("param_offload", "optimizer_offload")))
    if reference:
        kept += _kept(model.ref, "actor_rollout_ref.ref", ("param_offload",))
    if critic:
        kept += _kept(config.critic, "critic", ("param_offload", "optimizer_offload"))
    if engine and not model.rollout.free_cache_engine:
        kept.append("actor_rollout_ref.rollout.free_cache_engine")
    if kept:
        raise ValueError(
            "between its phases verl would keep what another job needs the room for: say "
            f"{' '.join(f'{name}=True' for name in kept)}; or +rollmux.parking=False, where there is room for both"
        )


def _kept(section: Any, where: str, wanted: tuple[str, ...]) -> Iterator[str]:
    for name in wanted:
        if name in section and not section[name]:
            yield f"{where}.{name}"
    for name, part in section.items():
        if hasattr(part, "items"):
            yield from _kept(part, f"{where}.{name}", wanted)
