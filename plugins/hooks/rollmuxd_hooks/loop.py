"""A framework's loop as a job: what it is called and needs, and the verbs that its methods are bracketed with.

One process of the framework drives its workers; it is the one that talks. One phase is left where the next begins. The
framework itself takes its state off the GPUs at the end of a phase, by settings of its own that a hook insists on. A
GPU that is not verified clean goes to no job.
"""

import contextlib
import enum
import importlib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import rollmuxd
from rollmuxd_hook_kit.turns import Mover, Turns, check_settings, job_name, nothing, with_sides

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
    #: one phase, the trainer's; rollouts run all the time, on GPUs of the run's own
    ASYNCHRONOUS = "asynchronous"


_PHASES: Final[Mapping[Shape, Mapping[str, Any]]] = {
    Shape.ONE_POOL: {"rollout": "train", "train": "train"},
    Shape.TWO_POOLS: {"rollout": "rollout", "train": "train", "sync": ["rollout", "train"]},
    Shape.TRAIN_ONLY: {"train": "train"},
    Shape.ASYNCHRONOUS: {"train": "train"},
}


class Loop:
    """The job of a loop, and its turns. Without a daemon all of it does nothing.

    ``gateway="http://..."`` among the keywords joins each rollout to a gateway, which the framework generates through;
    see :class:`~rollmuxd_hook_kit.turns.Turns` for one that asks for keys.

    ``given`` has keywords of :func:`rollmuxd.job`, over those of the file that ``ROLLMUX_HOOK`` names; ``name`` is for
    a job that has none. ``stays`` says why state would stay on the GPUs between phases, if it would. That is refused,
    unless ``resident=True`` is among the keywords (for daemons that only watch, and where there are no GPUs).

    ``weights`` among the keywords is a :class:`~rollmuxd_hook_kit.turns.Mover`, or ``"module:name"`` of what makes one.
    It brings new weights to the engines between ``train`` and ``rollout``, while no GPU is held. The framework's own
    way, over both pools, is not taken.

    ``ahead`` says of an asynchronous loop how many batches it begins beyond the one that it trains on. Its slot is for
    ``train``, from a complete batch to the weights' arrival at the engines. It is never held while the loop waits for
    its own rollouts: the next job would wait for them too.

    ``settle`` returns when this process's GPUs rest, for a loop that computes in the process itself.

    Raises TypeError and ValueError for settings that cannot be.
    """

    #: the last one that has begun: a driver makes one run
    current: "ClassVar[Loop | None]" = None

    def __init__(
        self,
        given: Mapping[str, Any] | None,
        *,
        name: str,
        shape: Shape,
        stays: str = "",
        ahead: int = 1,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        settings = {**from_file(), **(given or {})}
        resident = bool(settings.pop("resident", False))
        gateway = settings.pop("gateway", "")
        if stays and not resident:
            raise ValueError(
                f"{stays}; for a daemon that only watches (mode observe), or where there are no GPUs, say "
                f"resident=True among the job's keywords ({FILE}=job.toml)"
            )
        self._shape = shape
        self._mover = _mover(settings.pop("weights", None), shape)
        #: whether what was trained last is on the rollout hosts
        self._brought = False
        #: whether nothing is parked
        self.resident = resident
        settings = _job_settings(settings, name, shape, self._mover)
        if shape is Shape.ASYNCHRONOUS:
            said = settings.get("asynchronous")
            settings["asynchronous"] = {"ahead": ahead, **(said if isinstance(said, Mapping) else {})}
        check_settings(settings, gateway=gateway)
        side = settings.get("side") or {}
        one = shape is not Shape.TWO_POOLS
        #: what an evaluation has, where it is not in one that will do
        self.eval_phase = "eval" if "eval" in side else next(iter(_PHASES[shape])) if one else "sync"
        self._save_phase = "save" if "save" in side else "train"
        #: where evaluation and saving find all that they need (on one pool, state may be there that must stay)
        self._enough = ("init", "sync", "rollout", "train") if one else ("init", "sync")
        self.job = rollmuxd.job(**settings)
        self.turns = Turns(self.job, settle, gateway=gateway)
        if not resident:
            self.parked_by(nothing)

    def parked_by(
        self, park: Callable[[], Any], *, load: Callable[[], Any] | None = None, pool: str | None = None
    ) -> None:
        """Call ``park`` before others get the GPUs of a pool (of any), ``load`` when they are this job's again.

        Both while the loop waits, in another thread; for what the framework has not parked by itself.
        """
        self.job.on_park(lambda _: park(), pool=pool)
        self.job.on_load(lambda _: (load or nothing)(), pool=pool)
        self.job.on_discard(nothing, pool=pool)

    @property
    def asynchronous(self) -> bool:
        """Whether rollouts run all the time, on GPUs of the run's own."""
        return self._shape is Shape.ASYNCHRONOUS

    @property
    def rollout_pool(self) -> str:
        """Where engines are."""
        return "rollout" if self._shape is Shape.TWO_POOLS else "train"

    # ---- where the loop is -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Register the job, and wait for ``init``: nothing is on the GPUs yet."""
        self.turns.start()
        with self.ending_with_an_error():
            self.turns.go("init")
        Loop.current = self

    @classmethod
    def begun(cls, by: str) -> "Loop":
        """The loop that has begun in this process. Raises RuntimeError where none has: ``by`` begins it."""
        if cls.current is None:
            raise RuntimeError(f"the job has not begun: import {by} too")
        return cls.current

    def rollout(self) -> None:
        """Generate from here."""
        if self._shape not in (Shape.TRAIN_ONLY, Shape.ASYNCHRONOUS):
            self.turns.go("rollout")

    def train(self) -> None:
        """Train from here: everything until the next rollout, log-probabilities first."""
        self._brought = False
        self.turns.go("train")

    def sync(self) -> None:
        """Weights are on their way from here; an asynchronous run's first ones within ``init``."""
        if self.asynchronous and self.turns.current == "init":
            return
        if self._mover is not None:
            if self._brought:
                self.turns.go("rollout")
            else:
                self.turns.bring(self._mover)
                self._brought = True
            return
        self.turns.go({Shape.ONE_POOL: "rollout", Shape.TWO_POOLS: "sync"}.get(self._shape, "train"))

    def send(self, theirs: Callable[[], Any]) -> Any:
        """Put the weights into the engines: by the framework (``theirs``), unless they were brought already."""
        self.sync()
        if self._mover is None:
            return theirs()
        return self._mover.load()

    def rest(self) -> None:
        """Need no GPU from here."""
        if self.turns.current != "init":
            self.turns.leave()

    def evaluating(self) -> AbstractContextManager[None]:
        """Generate for an evaluation; an asynchronous run does so on GPUs of its own, and holds no others."""
        if self.asynchronous:
            self.turns.leave()
            return contextlib.nullcontext()
        return self.turns.within(self.eval_phase, or_in=self._enough)

    def saving(self) -> AbstractContextManager[None]:
        """Write state of the trainer."""
        return self.turns.within(self._save_phase, or_in=self._enough)

    @contextlib.contextmanager
    def to_its_end(self) -> Iterator[None]:
        """End the job with this, and say how it ended."""
        with self.ending_with_an_error():
            yield
        self.end()

    def ending_with_an_error(self) -> AbstractContextManager[None]:
        """End the job with an error of this."""
        return self.turns.ending_with_an_error()

    def end(self, error: BaseException | None = None) -> None:
        """Release what is held, and end the job; a second time, nothing."""
        if self.turns.on:
            self.turns.end(error)


def refuse(what: str, instead: str, why: str = "the hook does not know where this loop needs its GPUs") -> ValueError:
    """Return the refusal of a loop that would lose gradients, deadlock, or compute on GPUs of another job."""
    return ValueError(f"{what}: {why}; {instead}")


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


def _mover(given: Any, shape: Shape) -> Mover | None:
    """A mover, from itself or from the name of what makes one. Raises ValueError where there is no way for it."""
    if given is None:
        return None
    if shape is not Shape.TWO_POOLS:
        raise ValueError("weights=: no weights travel between shared pools here; leave it out")
    if not isinstance(given, str):
        return cast("Mover", given)
    module, _, name = given.partition(":")
    try:
        return cast("Mover", getattr(importlib.import_module(module), name)())
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"weights={given!r}: {error}; it is 'module:name' of a function that makes the mover"
        ) from error


def _job_settings(given: Mapping[str, Any], name: str, shape: Shape, mover: Mover | None) -> dict[str, Any]:
    if shape is not Shape.TWO_POOLS and "rollout" in given:
        raise ValueError(
            "rollout=: this run generates on the GPUs of pool train, or on its own; give train= only, for all it shares"
        )
    pools = {"train": {"nodes": 1}} | ({"rollout": {"nodes": 1}} if shape is Shape.TWO_POOLS else {})
    by_default = {"name": job_name(name, "train"), "phases": dict(_PHASES[shape]), **pools}
    return {**by_default, **with_sides(given, mover)}
