"""One phase after the other, for a loop that is not ours: the one that is held is left where the next one begins."""

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rollmuxd.client.job import Job, Slot


class Mover(Protocol):
    """Moves new weights while no GPU is held: ``rollmuxd_weights.between`` has one.

    On every rank of the loop the three are called in this order, once for each time that engines need new weights.
    """

    #: what :meth:`wait` is expected to take: the plans of the daemon count it as the job's own time before a rollout
    expected_s: float

    def publish(self, fence: str | None) -> None:
        """Copy the trainer's weights to host memory. Its GPUs are held, by the slot of this fence (None: no daemon)."""

    def wait(self) -> None:
        """Return when the weights are on every rollout host. No GPU is held."""

    def load(self) -> Any:
        """Load them into the engines. The rollout's GPUs are held."""


class Turns:
    """The phases of a job, entered by name. ``settle`` is called before a release, and returns when the GPUs rest.

    ``gateway`` is the address of a rollout gateway: each phase of the name ``rollout`` is joined to it. One that asks
    for keys is ``{"url": ..., "key_file": ...}``, with a file that has a key for control on its first line. Raises
    ValueError for another shape, and OSError for a file that cannot be read.

    Without a daemon, and after the job's end, everything here does nothing (``on`` is false).
    """

    def __init__(self, job: Job, settle: Callable[[], None], *, gateway: Any = "") -> None:
        self._job = job
        self._settle = settle
        self._gateway, self._gateway_key = _gateway(gateway)
        self._joined: AbstractContextManager[Any] | None = None
        self.on = False
        self.current: str | None = None
        self.slot: Slot | None = None

    @property
    def fence(self) -> str | None:
        """Of the slot that is held."""
        return self.slot.fence if self.slot is not None else None

    def start(self) -> None:
        """Register the job. Raises what :meth:`rollmuxd.client.job.Job.start` raises."""
        self._job.start()
        self.on = not self._job.alone

    def go(self, phase: str) -> None:
        """Wait for a phase, having left the one before; of the one that is held, nothing. Raises ``SlotLost``."""
        if not self.on or self.current == phase:
            return
        self.leave(then=phase)
        self.slot = self._job.phase(phase).__enter__()
        self.current = phase
        if self._gateway and phase == "rollout":
            from rollmuxd_gateway import attach

            joined = attach(self.slot, self._gateway, key=self._gateway_key)
            joined.__enter__()
            self._joined = joined

    def leave(self, *, then: str | None = None, error: BaseException | None = None) -> None:
        """Release what is held, if anything; ``then`` is asked for in the same call. Raises ``SlotLost``."""
        phase, self.current, self.slot = self.current, None, None
        if phase is None:
            return
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.__exit__(None, None, None)
        if error is None:
            self._settle()
        self._job.phase(phase, then=then).__exit__(None, error, None)

    @contextlib.contextmanager
    def within(self, phase: str, *, or_in: tuple[str, ...] = ("init",)) -> Iterator[None]:
        """Have the phase for as long as this lasts; where it, or one of ``or_in``, is held already, that will do."""
        if not self.on or self.current == phase or self.current in or_in:
            yield
            return
        self.go(phase)
        try:
            yield
        except BaseException as error:
            self.leave(error=error)
            raise
        self.leave()

    def bring(self, mover: Mover) -> None:
        """Publish while the trainer's GPUs are held, wait while none are, and hold the rollout's."""
        if self.current != "init":
            self.go("train")
        mover.publish(self.fence)
        self.leave()
        mover.wait()
        self.go("rollout")

    @contextlib.contextmanager
    def ending_with_an_error(self) -> Iterator[None]:
        """End the job with an error of this: a user's script may not tell of it."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException | None = None) -> None:
        """Release what is held, and end the job."""
        self.on = False
        try:
            self.leave(error=error)
        finally:
            self._job.__exit__(None, error, None)


def around(
    owner: Any,
    name: str,
    *,
    before: Callable[[], Any] | None = None,
    after: Callable[[], Any] | None = None,
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """Have an object's method begin with ``before`` and end with ``after``, unless it raises, all of it ``within``.

    In a coroutine these block its loop: nothing of it may continue without the GPUs, and an interruption gets through.
    """
    method = getattr(owner, name)

    @contextlib.contextmanager
    def bracket() -> Iterator[None]:
        with within():
            (before or nothing)()
            yield
            (after or nothing)()

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def bracketed(*args: Any, **kwargs: Any) -> Any:
            with bracket():
                return await method(*args, **kwargs)
    else:

        @functools.wraps(method)
        def bracketed(*args: Any, **kwargs: Any) -> Any:
            with bracket():
                return method(*args, **kwargs)

    setattr(owner, name, bracketed)


def nothing(*_: Any) -> None:
    """Do nothing: it has been done, or is the framework's to do."""


def job_name(said: str, default: str) -> str:
    """What a run calls its job. One that `rollmuxd run` has started joins the job that it was started for."""
    name = os.environ.get("ROLLMUX_JOB") or said
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:100] or default


def with_sides(settings: Mapping[str, Any], mover: Mover | None) -> dict[str, Any]:
    """The keywords with the pools of evaluation and saving, and a mover's phases, where they say nothing else."""
    side = dict(settings.get("side") or {})
    if mover is not None:
        rollout = {"pools": "rollout", "gap_s": mover.expected_s}
        settings = {"phases": {"rollout": rollout, "train": "train"}, **settings}
        # What evaluates in a slot of its own has both: engines, and what the trainer computes.
        side["eval"] = {"pools": ["rollout", "train"], **(side.get("eval") or {})}
    if isinstance(side.get("save"), Mapping):
        side["save"] = {"pools": "train", **side["save"]}
    return {**settings, **({"side": side} if side else {})}


def check_settings(settings: Mapping[str, Any], *, gateway: Any = "") -> None:
    """Raise ValueError for keywords of :func:`rollmuxd.job` that a hook cannot keep, and for a gateway without use."""
    if settings.get("movable") == "warm":
        raise ValueError(
            "movable='warm': a framework's processes load their state where it was, and cannot on other GPUs; leave it "
            "out, or say movable='relaunch' in the file of rollmuxd run, for a script that resumes from its checkpoint"
        )
    if gateway and "rollout" not in settings.get("phases", ("rollout",)):
        raise ValueError(
            f"gateway={gateway!r}: this run has no phase rollout that joins it, only "
            f"{', '.join(settings['phases'])}; leave it out"
        )


def _gateway(given: Any) -> tuple[str, str]:
    """Address and key."""
    if isinstance(given, str):
        return given, ""
    if not isinstance(given, Mapping) or set(given) != {"url", "key_file"}:
        raise ValueError(f"gateway is {given!r}: it needs an address, or a table with url and key_file")
    lines = Path(str(given["key_file"])).expanduser().read_text().split()
    if not lines:
        raise ValueError(f"{given['key_file']} is empty: its first line is the gateway's key for control")
    return str(given["url"]), lines[0]
