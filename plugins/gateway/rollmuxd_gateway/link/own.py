"""``link = "own"``: the gateway is the job, and phases are read off the traffic. The loop knows one URL only.

The first request waits here until the rollout's slot is granted. The last answer of a rollout is held back until the
train slot is granted: a synchronous loop stands still there anyway. The next request ends the training.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import rollmuxd
from rollmuxd_gateway.app import App
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core import rollout as sizes
from rollmuxd_gateway.link.loop import Attached
from rollmuxd_gateway.settings import Wrong

log = logging.getLogger(__name__)


class OwnLink:
    """Phases by traffic. ``phases`` counts those that were held, by name."""

    def __init__(self, app: App, url: str, key: str = "") -> None:
        self.app, self.url, self.key = app, url, key
        self.phases: dict[str, int] = {"rollout": 0, "train": 0}
        try:
            self._job = rollmuxd.ajob(**self._described())
        except (TypeError, ValueError) as error:
            raise Wrong(f"[job]: {error}") from error
        self._wanted = asyncio.Event()
        self._open = asyncio.Event()
        self._may_leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Be the job, until :meth:`close`."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._is_no_job)

    def _is_no_job(self, task: asyncio.Task[None]) -> None:
        """Without a job there is no slot, and nothing may run: requests are failed, and none waits."""
        if not task.cancelled():
            error = task.exception()
            trace = None if isinstance(error, rollmuxd.RollmuxError) else error
            log.error("the gateway is no job, and answers requests with 503: %s", error, exc_info=trace)
            self.app.tell(i.Stop("the gateway is no job of the daemon any more; its log says why"))
            self._open.set()
            self._may_leave.set()

    async def close(self) -> None:
        """End the job. What is held back may leave."""
        self._may_leave.set()
        self._open.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def arrival(self) -> None:
        """Wait until a request may begin."""
        if not self._open.is_set():
            self._wanted.set()
            await self._open.wait()

    async def departure(self) -> None:
        """Wait until an answer may leave: the last one of a rollout does so with the train slot."""
        if self._open.is_set() and self._is_over():
            await self._may_leave.wait()

    def _is_over(self) -> bool:
        rollout, total = self.app.core.rollout, sizes.expected_total(self.app.core.config, self.app.core.rollout)
        return bool(total) and rollout.done >= total and not self._busy()

    def _busy(self) -> bool:
        core = self.app.core
        return bool(core.queue or core.again or any(replica.live for replica in core.replicas.values()))

    # ---- the job -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        job, loop = self._job, asyncio.get_running_loop()

        def move(asleep: bool, gpus: Any) -> None:
            """In a thread of the client: wake the engines of these GPUs, or put all to sleep."""
            asked = asyncio.run_coroutine_threadsafe(self._move(asleep, gpus), loop)
            asked.result()

        job.on_load(lambda order: move(False, order.gpus), pool="rollout")
        job.on_park(lambda _: move(True, None), pool="rollout")
        job.on_discard(lambda _: move(True, None), pool="rollout")
        async with job:
            while True:
                await self._wanted.wait()
                await self._rollout(job)
                await self._training(job)

    def _described(self) -> dict[str, Any]:
        given = {"init": False, **self.app.settings.job}
        rollout = {"driver": "channel", **given.get("rollout", {"nodes": 1})}
        return {**given, "rollout": rollout}

    async def _move(self, asleep: bool, gpus: Any) -> None:
        from rollmuxd_gateway.fronts.control import move_memory

        failed, _ = await move_memory(self.app, None if gpus is None else tuple(gpus), asleep=asleep)
        if failed:
            raise RuntimeError("; ".join(failed))

    async def _rollout(self, job: Any) -> None:
        self._may_leave.clear()
        async with job.phase("rollout") as slot, self._attached(slot):
            self._wanted.clear()
            self._open.set()
            await self._until_over()
            self.phases["rollout"] += 1
        self._open.clear()

    @asynccontextmanager
    async def _attached(self, slot: Any) -> AsyncIterator[None]:
        """``attach`` blocks, and speaks to this very process: in a thread."""
        attached = Attached(slot, self.url, key=self.key, loop=asyncio.get_running_loop())
        await asyncio.to_thread(attached.__enter__)
        try:
            yield
        finally:
            await asyncio.to_thread(attached.__exit__, None, None, None)

    async def _until_over(self) -> None:
        """All responses are there; or, where their number is not known, nothing has come for ``idle_s``."""
        idle_s = self.app.settings.idle_s
        while True:
            seq = self.app.core.seq
            if self._is_over():
                return
            await self.app.follow(seq, idle_s)
            if self.app.core.seq == seq and not self._busy():
                return

    async def _training(self, job: Any) -> None:
        """The train slot, from the last answer of the rollout to the next request."""
        known = sizes.expected_total(self.app.core.config, self.app.core.rollout)
        if not known or self.app.core.rollout.done < known:
            self._may_leave.set()  # what follows is not known to be training
            return
        phase = job.phase("train")
        try:
            async with asyncio.timeout(self.app.settings.hold_s):
                await phase.__aenter__()
        except TimeoutError:
            log.warning("no train slot within hold_s: the answer leaves without one")
            self._may_leave.set()
            return
        try:
            self.phases["train"] += 1
            self._may_leave.set()
            await self._wanted.wait()
        finally:
            await phase.__aexit__(None, None, None)
