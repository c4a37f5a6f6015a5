"""``attach``: a thread beside a phase that tells the daemon of the rollout, and the gateway of the daemon's wishes.

The job stays the one process that speaks to the daemon. A GPU is given back only when the gateway reports that its
replica is parked; that it is clean, the daemon sees for itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import httpx

if TYPE_CHECKING:
    from rollmuxd.client.job import Slot

log = logging.getLogger(__name__)

#: seconds that a poll waits for news, and so the longest that a directive waits here
POLL_S: Final = 0.2
#: seconds before a shrink that was refused is tried again
AGAIN_S: Final = 1.0
_LIMIT_S: Final = 30.0


def no_gateway(url: str, error: httpx.TransportError) -> str:
    """What to do where a gateway does not answer."""
    return f"no gateway answers at {url} ({error}); start it with `rollmuxd gateway run`"


class Attached:
    """What :func:`rollmuxd_gateway.attach` returns: enter it within the phase, leave it before the phase ends.

    ``told`` has what happened, for reports: when the work crossed the tail's share, when the directive came, when GPUs
    were given back (seconds of ``time.time()``).
    """

    def __init__(
        self,
        slot: Slot,
        url: str,
        *,
        total: int = 0,
        key: str = "",
        tail_from: float = 0.8,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.slot, self.total, self.tail_from = slot, total, tail_from
        #: of an :class:`~rollmuxd.client.job.AsyncSlot`: where its calls run
        self._loop = loop
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=_LIMIT_S)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollmuxd-gateway", daemon=True)
        self._seq = -1
        self._refused_at = 0.0
        self._unwell = False
        self._gpus: tuple[str, ...] = ()
        self.told: dict[str, Any] = {"shrinks": []}
        self.view: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._gpus = tuple(self.slot.gpus)
        gpus = list(self._gpus) or None
        try:
            self._post("/rollmux/rollouts", {"total": self.total, **({} if gpus is None else {"gpus": gpus})})
        except httpx.TransportError as error:
            raise type(error)(no_gateway(str(self._http.base_url), error)) from error
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()
        try:
            view = self._get(0.0)
            self._post("/rollmux/rollouts", {"close": True})
            figures = {name: view[name] for name in ("tokens", "moved", "recomputed")}
            self.slot.measure(**figures, work=view["tokens"])
        except httpx.HTTPError as lost:
            log.warning("the gateway did not answer at the end of the rollout: %s", type(lost).__name__)
        finally:
            self._http.close()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                view = self._get(POLL_S)
                self._unwell = False
                self._follow(view)
            except httpx.HTTPError as error:
                # Without a gateway nothing is known of its replicas, so nothing is given back.
                if not self._unwell:
                    log.warning("the gateway does not answer (%s): this slot keeps its GPUs", type(error).__name__)
                self._unwell = True
                self._ending.wait(POLL_S)
            except Exception as error:
                log.warning("the rollout could not be followed: %s: %s", type(error).__name__, error)
                self._ending.wait(AGAIN_S)

    def _follow(self, view: dict[str, Any]) -> None:
        slot = self.slot
        done, total = view["done"], view["total"]
        slot.progress(done, total)
        if total and done >= self.tail_from * total:
            self.told.setdefault("crossed_at", time.time())
        directive = slot.directive
        if slot.lost or (directive is not None and directive.kind == "stop"):
            self._post("/rollmux/stop", {"reason": "the slot is lost"})
            self._ending.set()
            return
        if directive is not None and directive.kind == "shrink":
            self.told.setdefault("directive_at", time.time())
            self._shrink(list(directive.keep), view)
        elif directive is not None and directive.kind == "grow":
            self._run_in_loop(slot.grow)
        before, self._gpus = self._gpus, tuple(slot.gpus)
        if set(self._gpus) - set(before):
            # This report is from before: it still calls the replicas parked that wake now.
            self._post("/rollmux/grow", {"gpus": list(self._gpus)})
        elif view["status"] in ("tail", "drained"):
            self._give_back(view)

    def _shrink(self, keep: list[str], view: dict[str, Any]) -> None:
        if view["status"] != "open" or time.monotonic() - self._refused_at < AGAIN_S:
            return
        verdict = self._post("/rollmux/shrink", {"keep": keep})
        self.told.setdefault("verdicts", []).append(verdict.get("reason") or "accepted")
        if not verdict.get("accepted"):
            self._refused_at = time.monotonic()

    def _give_back(self, view: dict[str, Any]) -> None:
        """GPUs of parked replicas, as they come; those that no replica has stay with the slot."""
        parked = {gpu for replica in view["replicas"] if replica["status"] == "parked" for gpu in replica["gpus"]}
        remaining = [gpu for gpu in self._gpus if gpu not in parked]
        if remaining and len(remaining) < len(self._gpus):
            self._run_in_loop(self.slot.shrink, remaining)
            self._gpus = tuple(self.slot.gpus)
            self.told["shrinks"].append((time.time(), len(remaining)))

    def _run_in_loop(self, call: Callable[..., Any], *given: Any) -> None:
        """Call the slot. Of a job on asyncio that is a coroutine of its loop."""
        told = call(*given)
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(told, self._loop).result()

    # ---- HTTP --------------------------------------------------------------------------------------------------------

    def _get(self, wait_s: float) -> dict[str, Any]:
        params = {"after": self._seq, "wait_ms": round(wait_s * 1000)}
        answer = self._http.get("/rollmux/rollout", params=params)
        answer.raise_for_status()
        self.view = answer.json()
        self._seq = self.view["seq"]
        return self.view

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._http.post(path, json=body)
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()
        return told
