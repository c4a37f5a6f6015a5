"""A framework's loop as a job: what it is called and needs, and the verbs that its methods are bracketed with.

One process of the framework drives its workers; it is the one that talks. One phase is left where the next begins. The
framework itself takes its state off the GPUs at the end of a phase, by settings of its own, which a hook insists on; a
GPU that is not seen clear goes to nobody.
"""

import contextlib
import enum
import functools
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import rollmuxd
from rollmuxd_hook_kit.turns import Turns

#: names a file with keywords of :func:`rollmuxd.job`, as TOML
FILE: Final = "ROLLMUX_HOOK"


class Shape(enum.Enum):
    """Which GPUs the loop's phases are on."""

    #: rollouts and training in turn on the same: a rollout begins with the weights' way into its engines
    ONE_POOL = "one pool"
    #: each on their own, and both while weights go from one to the other
    TWO_POOLS = "two pools"
    #: one phase: all that the loop does on shared GPUs
    TRAIN_ONLY = "train only"


_PHASES: Final[Mapping[Shape, Mapping[str, Any]]] = {
    Shape.ONE_POOL: {"rollout": "train", "train": "train"},
    Shape.TWO_POOLS: {"rollout": "rollout", "train": "train", "sync": ["rollout", "train"]},
    Shape.TRAIN_ONLY: {"train": "train"},
}


class Loop:
    """The job of a loop, and its turns. Without a daemon all of it does nothing.

    ``given`` has keywords of :func:`rollmuxd.job`, over those of the file that ``ROLLMUX_HOOK`` names; ``name`` is for
    a job that has none. ``stays`` says why state would stay on the GPUs between phases, if it would: refused, unless
    ``resident=True`` is among the keywords (for daemons that only watch, and where there are no GPUs).

    Raises TypeError and ValueError for settings that cannot be.
    """

    def __init__(self, given: Mapping[str, Any] | None, *, name: str, shape: Shape, stays: str = "") -> None:
        settings = {**from_file(), **(given or {})}
        resident = bool(settings.pop("resident", False))
        if stays and not resident:
            raise ValueError(
                f"{stays}; for a daemon that only watches (mode observe), or where there are no GPUs, say "
                f"resident=True among the job's keywords ({FILE}=job.toml)"
            )
        self._shape = shape
        #: whether nothing is parked
        self.resident = resident
        settings = _job_settings(settings, name, shape)
        side = settings.get("side") or {}
        one = shape is not Shape.TWO_POOLS
        #: what an evaluation has, where it is not in one that will do
        self.eval_phase = "eval" if "eval" in side else next(iter(_PHASES[shape])) if one else "sync"
        self._save_phase = "save" if "save" in side else "train"
        #: where evaluation and saving find all that they need (on one pool, state may be there that must stay)
        self._enough = ("init", "sync", "rollout", "train") if one else ("init", "sync")
        self.job = rollmuxd.job(**settings)
        self.turns = Turns(self.job, _nothing)
        if not resident:
            self.parked_by(_nothing)

    def parked_by(
        self, park: Callable[[], Any], *, load: Callable[[], Any] | None = None, pool: str | None = None
    ) -> None:
        """Call ``park`` before others get the GPUs of a pool (of any), ``load`` when they are this job's again.

        Both while the loop waits, in another thread; for what the framework has not parked by itself.
        """
        self.job.on_park(lambda _: park(), pool=pool)
        self.job.on_load(lambda _: (load or _nothing)(), pool=pool)
        self.job.on_discard(_nothing, pool=pool)

    @property
    def rollout_pool(self) -> str:
        """Where engines are."""
        return "rollout" if self._shape is Shape.TWO_POOLS else "train"

    # ---- where the loop is -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Register the job, and wait for ``init``: nothing is on the GPUs yet."""
        self.turns.start()
        try:
            self.turns.go("init")
        except BaseException as error:
            self.end(error)
            raise

    def rollout(self) -> None:
        """Generate from here."""
        if self._shape is not Shape.TRAIN_ONLY:
            self.turns.go("rollout")

    def train(self) -> None:
        """Train from here: everything until the next rollout, log-probabilities first."""
        self.turns.go("train")

    def sync(self) -> None:
        """Weights are on their way from here."""
        self.turns.go({Shape.ONE_POOL: "rollout", Shape.TWO_POOLS: "sync", Shape.TRAIN_ONLY: "train"}[self._shape])

    def rest(self) -> None:
        """Need no GPU from here."""
        if self.turns.current != "init":
            self.turns.leave()

    def evaluating(self) -> AbstractContextManager[None]:
        """Generate for an evaluation."""
        return self.turns.within(self.eval_phase, or_in=self._enough)

    def saving(self) -> AbstractContextManager[None]:
        """Write state of the trainer."""
        return self.turns.within(self._save_phase, or_in=self._enough)

    @contextlib.contextmanager
    def to_its_end(self) -> Iterator[None]:
        """End the job with this, and say how it ended."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Release what is held, and end the job; a second time, nothing."""
        if self.turns.on:
            self.turns.end(error)


def around(
    owner: Any,
    name: str,
    *,
    before: Callable[[], Any] | None = None,
    after: Callable[[], Any] | None = None,
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """Have an object's method begin with ``before`` and end with ``after``, unless it raises, all of it ``within``.

    In a coroutine these block its loop: nothing of it may go on without the GPUs, and who interrupts it gets through.
    """
    method = getattr(owner, name)

    @contextlib.contextmanager
    def bracket() -> Iterator[None]:
        with within():
            (before or _nothing)()
            yield
            (after or _nothing)()

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


def refuse(what: str, instead: str) -> ValueError:
    """Return the refusal of a loop whose rollouts run on while it trains: no phase of it ends where another begins."""
    return ValueError(
        f"{what}: its rollouts run on while it trains, so there is no time at which the GPUs of one are free; {instead}"
    )


def get(config: Any, *path: str, default: Any = None) -> Any:
    """What a config has there, as keys or as attributes; ``default`` where there is nothing, or None."""
    for part in path:
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
        if config is None:
            return default
    return config


def from_file() -> dict[str, Any]:
    """The keywords in the file that ``ROLLMUX_HOOK`` names. Raises ValueError if it cannot be read."""
    named = os.environ.get(FILE)
    if not named:
        return {}
    try:
        said = tomllib.loads(Path(named).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{FILE}={named}: {error}") from error
    said.pop("roles", None)  # of a file for `rollmuxd run`
    return said


def _job_settings(given: Mapping[str, Any], name: str, shape: Shape) -> dict[str, Any]:
    if shape is not Shape.TWO_POOLS and "rollout" in given:
        raise ValueError(
            "rollout=: this run generates on the GPUs of pool train, or on its own; give train= only, for all it shares"
        )
    named = os.environ.get("ROLLMUX_JOB") or re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:100] or "train"
    pools = {"train": {"nodes": 1}} | ({"rollout": {"nodes": 1}} if shape is Shape.TWO_POOLS else {})
    settings = {"name": named, "phases": dict(_PHASES[shape]), **pools, **given}
    side = dict(settings.get("side") or {})
    if isinstance(side.get("save"), Mapping):
        settings["side"] = {**side, "save": {"pools": "train", **side["save"]}}
    return settings


def _nothing(*_: Any) -> None:
    """Do nothing: it has been done, or is the framework's to do."""
