"""The kept connection to one cluster: the envoy's process and the socket to it, made again when they are gone."""

import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio

from rollmuxd.spi import ContactLost
from rollmuxd_backend_ray import frames
from rollmuxd_backend_ray.frames import Answer, Ask, Data, Failed, Forget, Ran, Seen

#: seconds between tries to join, as long as they fail; a tenth more or less
_AGAIN_S: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
#: a call waits so long for the next try; else it is told when that will be
_PATIENCE_S: Final = 2.5
#: what the envoy may take to end by itself
_END_S: Final = 2.0
#: the envoy keeps to a call's limit itself; so long after it, it has not answered
_WAY_S: Final = 1.5
#: so many calls in a row without an answer, and the envoy is given up, though it lives
_UNANSWERED: Final = 3
#: an envoy looks for the cluster's head for so long, and then ends: the next one finds it, or another in its place
_HEAD_S: Final = "10"
_SAID_KEPT: Final = 4_000
#: what the daemon has for itself: settings, a cluster of its own, where it tells systemd how it is (``man sd_notify``)
_THE_DAEMONS: Final = ("ROLLMUX_", "RAY_ADDRESS", "NOTIFY_SOCKET", "WATCHDOG_")


class ClusterConnection:
    """The envoy in one cluster, and the connection to it.

    ``serving``: the socket of an envoy that somebody else has started; else it is started here, and ended.
    """

    def __init__(
        self, address: str, connect_s: float, *, serving: str = "", now: Callable[[], float] = time.monotonic
    ) -> None:
        self._address, self._connect_s, self._serving, self._now = address, connect_s, serving, now
        self._process: asyncio.subprocess.Process | None = None
        self._folder = ""
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._joining: asyncio.Task[asyncio.StreamWriter] | None = None
        self._waiting: dict[int, asyncio.Future[Ran | Data | Seen | Failed]] = {}
        self._number = 0
        self._unanswered = 0
        #: tries that failed in a row, when the next may be made, and what the last one said
        self._failed = 0
        self._next_at = 0.0
        self._why = ""

    async def ask(
        self, node: frames.Node, reach_s: float, wish: frames.Wish, limit_s: float | None
    ) -> Ran | Data | Seen | Failed:
        """Have something done on a node, within ``limit_s``. Raises ContactLost: nobody knows whether it was."""
        joined = False
        try:
            with anyio.fail_after(None if limit_s is None else limit_s + _WAY_S):
                writer = await self._connection()
                joined = True
                answer = await self._ask(writer, Ask(self._next(), node, reach_s, limit_s or 0, wish))
        except TimeoutError as error:
            if not joined:
                raise ContactLost(self._why or f"the Ray cluster at {self._address} is not joined yet") from error
            self._went_unanswered()
            raise ContactLost(f"the envoy in the cluster did not answer within {limit_s:g} s") from error
        self._unanswered = 0
        return answer

    async def close(self) -> None:
        """End the envoy; what it has had started on the nodes goes on."""
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.wait([self._joining])
        self._drop("it was closed")
        if self._reading is not None:
            await asyncio.wait([self._reading])
        await self._end()

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _ask(self, writer: asyncio.StreamWriter, ask: Ask) -> Ran | Data | Seen | Failed:
        answered: asyncio.Future[Ran | Data | Seen | Failed] = asyncio.get_running_loop().create_future()
        self._waiting[ask.number] = answered
        try:
            frames.write(writer, ask)
            await writer.drain()
            return await answered
        except OSError as error:
            raise ContactLost(f"the envoy in the cluster is gone: {error}") from error
        finally:
            del self._waiting[ask.number]
            # Cancelled with whoever waited for it, it is done as well.
            if (answered.cancelled() or not answered.done()) and not writer.is_closing():
                frames.write(writer, Forget(ask.number))

    async def _connection(self) -> asyncio.StreamWriter:
        if self._writer is not None:
            return self._writer
        if self._joining is None or self._joining.done():
            # A task of its own, which all that wait for it share: none of them takes it along when it is cancelled.
            self._joining = asyncio.create_task(self._join())
            self._joining.add_done_callback(_looked_at)
        return await asyncio.shield(self._joining)

    async def _join(self) -> asyncio.StreamWriter:
        wait_s = self._next_at - self._now()
        if wait_s > _PATIENCE_S:
            raise ContactLost(f"{self._why} (next try in {wait_s:.0f} s)")
        await anyio.sleep(max(wait_s, 0))
        await self._end()
        try:
            with anyio.fail_after(self._connect_s):
                socket = self._serving or await self._start()
                reader, writer = await asyncio.open_unix_connection(socket)
        except TimeoutError:
            raise await self._lost(f"it could not be joined within {self._connect_s:g} s") from None
        except (OSError, ValueError, EOFError) as error:
            raise await self._lost(str(error)) from error
        self._writer = writer
        self._failed, self._unanswered, self._why = 0, 0, ""
        self._reading = asyncio.create_task(self._read(reader, writer))
        return writer

    async def _start(self) -> str:
        """Start the envoy; where it serves. Raises EOFError: it has ended, and why."""
        self._folder = tempfile.mkdtemp(prefix=frames.FOLDER)
        socket = f"{self._folder}/s"
        env = {name: value for name, value in os.environ.items() if not name.startswith(_THE_DAEMONS)}
        env.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", _HEAD_S)
        log = Path(self._folder) / "said"
        with log.open("wb") as said:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollmuxd_backend_ray.envoy", socket, self._address),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=said,
                env=env,
                start_new_session=True,
            )
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if line == b"ready\n":
                return socket
        await process.wait()
        told = log.read_text(errors="replace")[-_SAID_KEPT:].strip().splitlines()
        raise EOFError(told[-1] if told else f"the envoy ended with exit code {process.returncode}")

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand out the answers, until there are none any more."""
        why = "the envoy in the cluster has ended"
        try:
            while True:
                said = await frames.read(reader)
                if isinstance(said, Answer) and said.number in self._waiting and not self._waiting[said.number].done():
                    self._waiting[said.number].set_result(said.said)
        except EOFError:
            pass
        except ValueError as error:
            why = f"the envoy says what nobody understands: {error}"
        finally:
            if self._writer is writer:
                self._drop(why)

    def _drop(self, why: str) -> None:
        """The connection is no more: nobody gets an answer."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(ContactLost(why))

    def _went_unanswered(self) -> None:
        """Where Ray itself hangs, another envoy may not."""
        self._unanswered += 1
        if self._unanswered >= _UNANSWERED:
            self._unanswered = 0
            self._drop("the envoy in the cluster does not answer, and is ended")

    async def _lost(self, why: str) -> ContactLost:
        await self._end()
        again_s = _AGAIN_S[min(self._failed, len(_AGAIN_S) - 1)]
        self._failed += 1
        self._next_at = self._now() + again_s * random.uniform(0.9, 1.1)
        self._why = f"the Ray cluster at {self._address} cannot be reached: {why}"
        return ContactLost(self._why)

    async def _end(self) -> None:
        """End the envoy's process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                with anyio.fail_after(_END_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


def _looked_at(task: "asyncio.Task[asyncio.StreamWriter]") -> None:
    """Nobody may be left who waits for it: its error is no surprise then."""
    if not task.cancelled():
        task.exception()
