"""Jobs of several ranks: rank 0 talks to the daemon, the others follow through a store that they all can read.

The followers wait by polling the store, never inside a collective. A wait for a slot may take hours, and a collective
that takes hours kills the process group. The store is whatever the workload has (``torch.distributed``'s stores fit as
they are). Ranks enter and leave the same phases in the same order; they are matched by counting.

What may be relied on:

- A slot is not given back while a rank may be in its phase. If rank 0 cannot wait for the others to leave it, the slot
  is kept until they have, or until the job ends. Then the daemon looks whether its GPUs are clean.
- A rank that has left the job is out of all its phases, and is not waited for.
- A follower's wait that is given up (Ctrl-C, a cancelled task) counts for nothing: asked again, it is the same phase.
  Where it asks for another one instead, what came to nothing for rank 0, too, is passed over.
- A store that fails is an error at the rank at which it does: all ranks have to be ended, and started again.

All keys are under ``rollmuxd/<job>/<n>``, with n counting the times that the job was started over this store. First
``start``, then for each phase ``<k>/granted``, ``<k>/left/<rank>`` (a follower is out) and ``<k>/over`` (rank 0 has
released, or why it has not). The last is ``gone`` (rank 0 has left the job), or of a follower ``gone/<rank>`` and
``gone/some``. Where torchrun has started the ranks again, n begins with which time that is: its store outlives them. On
several nodes, which count each for itself, an id follows n instead that the ranks agree on before all else (``meet``,
``here/<rank>``, ``<id>/met``). What every rank has read of a phase is deleted, where the store can.
"""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from rollmuxd.client.errors import RollmuxError, SlotLost, in_words, is_interruption
from rollmuxd.client.retry import SAY_EVERY_S, Flow, Pause, duration


class Store(Protocol):
    """What is needed of a store: three methods of ``torch.distributed.Store``. What is there is there for all ranks."""

    def set(self, key: str, value: str, /) -> Any:
        """Write."""
        ...

    def get(self, key: str, /) -> Any:
        """Read, as ``str`` or ``bytes``; only called for keys that are there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Say at once whether all keys are there."""
        ...


#: seconds between looks: a hand-over is noticed soon, a long wait costs next to nothing
POLL_S = (0.1, 1.0)
#: seconds that a rank 0 which is failing waits for the others to leave the GPUs, before it leaves the slot to them
FAILING_S = 10.0

_WITHOUT_IT = "end this one too, or start all of them again"
_NO_MORE = f"no rank gets a slot without it: {_WITHOUT_IT}"
#: for the rank at which it failed, which may continue
IF_IT_GOES_ON = f"If rank 0 continues, continue with it; if not, {_WITHOUT_IT}"

_starts: dict[tuple[str, int], int] = {}
#: what tells a rank from one of a former process
_processes: dict[tuple[str, int], str] = {}


class RankGroup:
    """One rank's view of the others."""

    def __init__(
        self, store: Store, name: str, *, rank: int, ranks: int, clock: Callable[[], float], tell: Callable[[str], None]
    ) -> None:
        count = _starts[name, rank] = _starts.get((name, rank), 0) + 1
        self._store = store
        self._name = name
        # Each node counts for itself: they are equal on one node only.
        self._of_nodes = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
        again = "0" if self._of_nodes else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._process = _processes.setdefault((name, rank), os.urandom(16).hex())
        self._prefix = f"rollmuxd/{name}/{count}" if again == "0" else f"rollmuxd/{name}/{again}-{count}"
        self._rank = rank
        self._ranks = ranks
        self._clock = clock
        self._tell = tell
        self._phase = 0
        #: of rank 0: the phase that others may be in; empty when all are out
        self.entered = ""
        #: the others may wait for what this rank says
        self._is_expected = False

    def meet(self) -> Flow[None]:
        """Where torchrun has started ranks on several nodes: agree on keys that no ranks before us can have used.

        Rank 0 waits until all others have seen a word that is new, and they until it has seen theirs.
        """
        if not self._of_nodes:
            return
        meets = self._as_rank_0() if self._rank == 0 else self._with_rank_0()
        try:
            met = yield from meets
        except BaseException:
            _starts[self._name, self._rank] -= 1
            raise
        self._prefix = f"{self._prefix}/{met}"

    def _as_rank_0(self) -> Flow[str]:
        met = os.urandom(16).hex()
        here = {rank: f"here/{rank}" for rank in range(1, self._ranks)}

        def missing() -> list[int]:
            return [rank for rank, key in here.items() if not self._has(key) or self._get(key)["of"] != met]

        def text() -> str:
            return f"rank 0 waits for rank {', '.join(map(str, missing()))} to start the job"

        self._publish("meet", {"of": met})
        yield from self._until(lambda: not missing(), text, None)
        self._publish(f"{met}/met", {str(rank): self._get(key)["process"] for rank, key in here.items()})
        return met

    def _with_rank_0(self) -> Flow[str]:
        said = ""

        def met() -> bool:
            nonlocal said
            told = self._get("meet")["of"] if self._has("meet") else ""
            if told != said:
                self._publish(f"here/{self._rank}", {"of": told, "process": self._process})
                said = told
            return self._has(f"{said}/met") and self._get(f"{said}/met")[str(self._rank)] == self._process

        yield from self._until(met, lambda: f"rank {self._rank} waits for rank 0 to start the job", None)
        return said

    # ---- rank 0 ----

    def publish_start(self, **what: Any) -> None:
        """Tell the others whether there is a daemon, which job and which session."""
        self._is_expected = True  # though that may fail: it may have been heard all the same
        self._publish("start", what)

    def publish_no_start(self, error: BaseException) -> None:
        """Let the others fail as we did."""
        self._publish("start", {"error": _why(error)})

    def publish_grant(self, phase: str, **what: Any) -> None:
        """Let the others in. Should that fail, some may be in all the same: :meth:`publish_over` takes it back."""
        self._phase += 1
        self.entered = phase
        self._publish(f"{self._phase}/granted", {"phase": phase, **what})

    def publish_no_grant(self, phase: str, error: BaseException) -> None:
        """Let the others fail as we did."""
        self._phase += 1
        self._publish(f"{self._phase}/granted", {"phase": phase, "error": _why(error)})

    def all_left(self, phase: str, *, failing: bool, limit_s: float = FAILING_S) -> Flow[list[int]]:
        """Wait until all others are out of the phase: the GPUs are theirs too. For seconds only if we are failing.

        Returns the ranks that may still be in it. While there are any, the slot is not to be given back.
        """
        keys = self._left(self._phase)

        def all_out() -> bool:  # one look or two, however many ranks there are
            return self._store.check(keys) or (self._has("gone/some") and not self._inside())

        def text() -> str:
            return f"{phase} waits for rank {', '.join(map(str, self._inside()))} to leave it"

        if not (yield from self._until(all_out, text, limit_s if failing else None)):
            return self._inside()
        self.entered = ""
        return []

    def publish_over(self, error: BaseException | None, *, lost: bool) -> None:
        """Tell the others that our release was answered, or why not; and whether the slot is known to be lost.

        A rank that comes after that and finds an error does not enter the phase.
        """
        why = "" if error is None else _why(error)
        if lost and not isinstance(error, SlotLost):
            why = f"the slot was lost, and rank 0 did not leave its phase in good order: {why}"
        self._publish(f"{self._phase}/over", {"error": why, "lost": lost})
        self._forget(self._phase - 1)

    def _inside(self) -> list[int]:
        """Return the ranks that may be in the phase: those that left neither it nor the job."""
        others = range(1, self._ranks)
        return [
            rank for rank in others if not self._has(f"{self._phase}/left/{rank}") and not self._has(f"gone/{rank}")
        ]

    def _forget(self, phase: int) -> None:
        """Delete what is there of a phase: a rank that is out of the next one has read all of it."""
        delete = getattr(self._store, "delete_key", None)  # (three methods are required at most)
        if delete is None or phase < 1 or not self._store.check(self._left(phase + 1)):
            return
        here = f"{self._prefix}/{phase}"
        for key in (f"{here}/granted", *self._left(phase), f"{here}/over"):
            delete(key)

    def _left(self, phase: int) -> list[str]:
        return [f"{self._prefix}/{phase}/left/{rank}" for rank in range(1, self._ranks)]

    # ---- the others ----

    def started(self) -> Flow[dict[str, Any]]:
        """Wait for rank 0 to have started the job."""
        try:
            told = yield from self._read("rank 0 to start the job", "start")
        except BaseException:
            _starts[self._name, self._rank] -= 1
            raise
        self._is_expected = True
        return told

    def granted(self, phase: str) -> Flow[dict[str, Any]]:
        """Wait for rank 0 to have a slot for the phase."""
        while True:
            self._phase += 1
            granted, over = f"{self._phase}/granted", f"{self._phase}/over"
            try:
                told = yield from self._read(f"rank 0 to have {phase}", granted, over)
                ended = self._get(over) if self._has(over) else {}
            except BaseException:
                self._phase -= 1
                raise
            if ended.get("error"):
                self._publish_left()  # rank 0 may have let us in, and would wait for us
            other = told.get("phase", phase)
            if other == phase or not (ended.get("error") or told.get("error")):
                break
            # That came to nothing for rank 0, and we had given it up before.
        if ended.get("error"):
            late = f"rank 0 has left {phase} before rank {self._rank} entered it"
            raise RollmuxError(f"{late}: {ended['error']}. {IF_IT_GOES_ON}")
        if other != phase:
            self._publish_left()
            text = f"rank {self._rank} enters phase {phase} where rank 0 entered {other}"
            raise RollmuxError(f"{text}: all ranks must enter the same phases in the same order")
        if told.get("error"):
            raise RollmuxError(f"rank 0 got no slot for {phase}: {told['error']}. {IF_IT_GOES_ON}")
        return told

    def left(self, phase: str, *, failing: bool) -> Flow[None]:
        """Say that we are out, and wait for the release. Raises :class:`SlotLost` if it was lost.

        Raises :class:`RollmuxError` where rank 0 does not know: the daemon did not answer, or was not asked.
        """
        self._publish_left()
        if failing:
            return
        told = yield from self._read(f"rank 0 to leave {phase}", f"{self._phase}/over")
        why = told["error"]
        if told["lost"]:
            raise SlotLost(why, phase=phase, reason=why)
        if why:
            unknown = f"Whether the slot was kept is not known: treat what this rank has done in {phase} with care"
            raise RollmuxError(f"rank 0 did not leave {phase} in good order: {why}. {unknown}")

    def _publish_left(self) -> None:
        self._publish(f"{self._phase}/left/{self._rank}", {})

    # ---- both ----

    def publish_gone(self, why: str) -> None:
        """Tell ranks that wait for us that nothing comes."""
        if self._is_expected:
            with suppress(Exception):  # whatever the store fails with: this rank is through
                for key in ["gone"] if self._rank == 0 else [f"gone/{self._rank}", "gone/some"]:
                    self._publish(key, {"why": why})

    def _publish(self, key: str, what: dict[str, Any]) -> None:
        self._store.set(f"{self._prefix}/{key}", json.dumps(what))

    def _has(self, key: str) -> bool:
        return self._store.check([f"{self._prefix}/{key}"])

    def _get(self, key: str) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self._store.get(f"{self._prefix}/{key}"))
        return read

    def _read(self, what: str, *keys: str) -> Flow[dict[str, Any]]:
        """Wait until one of the keys is there; returns the first that is."""
        waits = f"rank {self._rank} waits for {what}"
        yield from self._until(lambda: any(map(self._has, (*keys, "gone"))), lambda: waits, None)
        for key in keys:
            if self._has(key):
                return self._get(key)
        # Nor is it to come: that rank 0 has gone is the last that it writes.
        why = self._get("gone")["why"]
        left = f"rank 0 has left the job{f' ({why})' if why else ''}"
        raise RollmuxError(f"{waits}, and {left}: {_NO_MORE}")

    def _until(self, there: Callable[[], bool], text: Callable[[], str], limit_s: float | None) -> Flow[bool]:
        """Wait; returns False when that took longer than the limit."""
        began = said = self._clock()
        pause = POLL_S[0]
        while not there():
            now = self._clock()
            left_s = math.inf if limit_s is None else limit_s - (now - began)
            if left_s <= 0:
                return False
            if now - said >= SAY_EVERY_S:
                said = now
                self._tell(f"{text()} (for {duration(now - began)} now)")
            yield Pause(min(pause, max(0.001, left_s)))
            pause = min(POLL_S[1], pause * 1.5)
        return True


def _why(error: BaseException) -> str:
    """What the other ranks hear of an error of rank 0."""
    if is_interruption(error) or isinstance(error, GeneratorExit):
        return "it was interrupted"
    return str(error) if isinstance(error, SlotLost) else in_words(error)
