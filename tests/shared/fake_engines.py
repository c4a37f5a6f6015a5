"""An engine's HTTP server, and the host that it runs on, for tests of drivers: real sockets, made-up memory.

What is switched on in ``faults`` happens to the next call of that path (``"POST /sleep"``), and to all of them where it
is said with ``always``:

    error           answered 500, nothing done           half            half of it done, then 500
    missing         answered 404                          lie             answered as if done, nothing done
    hang            never answered, nothing done          hang_after      done, never answered
    drop            the line breaks, nothing done         drop_after      done, then the line breaks
    garbage         done, and answered with nonsense      die             half of it done, then the process is gone
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias
from urllib.parse import parse_qs, urlsplit

import anyio

from rollmuxd.core.ids import GpuId, HostId, JobId
from rollmuxd.core.inputs import GpuObservation
from rollmuxd.spi.backend import GpuInfo, HostConfig, Inventory, Observation, Ran
from rollmuxd.spi.errors import ContactLost
from rollmuxd_backend_local import HostOptions
from rollmuxd_backend_mock import MockBackend

Query: TypeAlias = Mapping[str, list[str]]
Reply: TypeAlias = tuple[int, Any]


class FakeEngine:
    """An HTTP server with a life: subclasses say what a call does, in steps, and what memory it has."""

    def __init__(self, *, address: str = "127.0.0.1") -> None:
        self.address = address
        self.port = 0
        self.calls: list[str] = []
        self.faults: dict[str, str] = {}
        self.always: dict[str, str] = {}
        self.missing_reply: Any = {"detail": "Not Found"}
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._ended = asyncio.Event()

    # ---- what a subclass says ---------------------------------------------------------------------------------------

    def steps(self, call: str, query: Query, body: Any) -> tuple[Sequence[Callable[[], None]], Callable[[], Reply]]:
        """What a call (``POST /sleep``) does, one after the other, and what it answers then. LookupError: no such call.

        A step that raises is the end of the call, answered 500, or of the process if it raises SystemExit.
        """
        raise NotImplementedError

    def used_mb(self) -> int:
        """What its process has on its GPU."""
        raise NotImplementedError

    def born(self) -> None:
        """Its process starts."""

    # ---- for the test -----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it listens, or did."""
        return f"http://{self.address}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self._server is not None

    async def start(self) -> None:
        """Start the process, on the port that it had before."""
        if self._server is None:
            self.born()
            self._ended = asyncio.Event()
            with anyio.CancelScope(shield=True):  # a process is there or it is not
                self._server = server = await asyncio.start_server(self._serve, self.address, self.port)
            self.port = server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End the process: its memory is free, its connections are cut."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self._ended.set()
            for writer in list(self._open):
                writer.transport.abort()
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.stop()

    # ---- inside -----------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._one(reader, writer)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        where = urlsplit(target)
        call = f"{method} {where.path}"
        self.calls.append(f"{call}?{where.query}" if where.query else call)
        fault = self.faults.pop(call, None) or self.always.get(call, "")
        if fault in {"drop", "hang"}:
            await (self._ended.wait() if fault == "hang" else self._cut(writer))
            return
        status, said = self._answer(call, fault, parse_qs(where.query), json.loads(raw) if raw else None)
        if fault == "die" or status == 0:
            await self.stop()
        elif fault in {"drop_after", "hang_after"}:
            await (self._ended.wait() if fault == "hang_after" else self._cut(writer))
        else:
            await _reply(writer, status, b"<html>" if fault == "garbage" else _encoded(said))

    def _answer(self, call: str, fault: str, query: Query, body: Any) -> Reply:
        if fault == "error":
            return 500, {"error": {"message": "", "type": "InternalServerError", "code": 500}}
        if fault == "missing":
            return 404, self.missing_reply
        try:
            steps, answer = self.steps(call, query, body)
        except LookupError:
            return 404, self.missing_reply
        if fault in {"half", "die"}:
            steps = steps[: (len(steps) + 1) // 2]
        try:
            for step in () if fault == "lie" else steps:
                step()
        except SystemExit:
            return 0, None
        except Exception as error:
            return 500, {"error": {"message": str(error), "type": type(error).__name__, "code": 500}}
        return (500, {"error": {"message": "out of memory"}}) if fault == "half" else answer()

    @staticmethod
    async def _cut(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()


def _encoded(said: Any) -> bytes:
    return said.encode() if isinstance(said, str) else b"" if said is None else json.dumps(said).encode()


async def _reply(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    await writer.drain()


class EngineHost:
    """A backend for one host whose GPUs have on them what the engines there say. Keeps the backends' contract."""

    def __init__(self, host: HostId, engines: Mapping[GpuId, Sequence[FakeEngine]], *, gpu_mb: int = 80_000) -> None:
        self.host = host
        #: those on each GPU
        self.engines = dict(engines)
        self.gpu_mb = gpu_mb
        self.away = False
        #: commands of the test's own, by program; everything else is run on this machine
        self.commands: dict[str, Callable[[Sequence[str]], Awaitable[Ran]]] = {}
        self.ran: list[tuple[str, ...]] = []
        self._here = MockBackend({}, ())
        self._here.options = {host: HostOptions()}

    @classmethod
    async def open(cls, hosts: Sequence[HostConfig], options: Mapping[str, Any]) -> Self:
        """An empty host."""
        return cls(hosts[0].id, dict.fromkeys(hosts[0].gpus, ()))

    async def inventory(self, host: HostId) -> Inventory:
        """Its GPUs."""
        self._reach(host)
        return Inventory(tuple(GpuInfo(gpu, "fake", self.gpu_mb) for gpu in self.engines), 1_000_000)

    async def observe(self, host: HostId) -> Observation:
        """What the engines say that they use."""
        self._reach(host)
        return Observation(tuple(self._see(gpu) for gpu in self.engines), "fake-boot")

    async def kill(self, host: HostId, pid: int, started: str, job: JobId, owner: str) -> bool:
        """Nothing is its own to end."""
        return False

    async def run(
        self,
        host: HostId,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> Ran:
        """One of the test's commands, or one of this machine's."""
        self._reach(host)
        self.ran.append(tuple(argv))
        if argv and argv[0] in self.commands:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self.commands[argv[0]](argv)
            except TimeoutError as error:
                raise ContactLost(f"{argv[0]} took longer than {timeout_s:g} s, and was ended") from error
        return await self._here.run(host, argv, env=env, stdin=stdin, timeout_s=timeout_s)

    async def exchange(
        self, host: HostId, address: str, port: int, data: bytes, *, most: int, trust: str = ""
    ) -> bytes:
        """With what listens on this machine."""
        self._reach(host)
        return await self._here.exchange(host, address, port, data, most=most, trust=trust)

    async def close(self) -> None:
        """Nothing is kept open."""

    def _see(self, gpu: GpuId) -> GpuObservation:
        there = [engine for engine in self.engines[gpu] if engine.running]
        return GpuObservation(
            gpu, sum(engine.used_mb() for engine in there), tuple(f"engine {engine.url}" for engine in there)
        )

    def _reach(self, host: HostId) -> None:
        if self.away or host != self.host:
            raise ContactLost(f"host {host} is away")
