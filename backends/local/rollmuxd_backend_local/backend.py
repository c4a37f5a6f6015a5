"""``LocalBackend``: the machine that the daemon runs on."""

import asyncio
import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import anyio
import msgspec

from rollmuxd.spi import ContactLost, HostConfig, HostId, NotDone, Ran
from rollmuxd.spi.environment import inherited, with_score_reset
from rollmuxd_backend_local import payload
from rollmuxd_backend_local.agent import frames
from rollmuxd_backend_local.agent.onnode import OnNode
from rollmuxd_backend_local.agent.reached import OnNodes, Said
from rollmuxd_backend_local.asking import Asking
from rollmuxd_backend_local.onhost import ask, gpus
from rollmuxd_backend_local.options import HostOptions, Options

#: Looks that hang in the driver keep their threads. So many may; more are not started, and say so.
_THREADS = 8
#: what an address may take to be reached from here
_REACH_S: Final = 10.0


class _Here(OnNode):
    def environment(self) -> dict[str, str]:
        return inherited(os.environ)


class OnThisMachine(OnNodes[Options]):
    """A backend whose hosts are all this machine: what it does on a node is done in this process."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._node, self._calls = _Here(payload.questions()), itertools.count()

    def _reach_s(self, host: HostId) -> float:
        self._of(host)
        return _REACH_S

    async def _wish(self, host: HostId, wish: frames.Wish, limit_s: float | None, user: str = "") -> Said:
        call = str(next(self._calls))
        doing = asyncio.ensure_future(self._node.do(call, msgspec.to_builtins(wish), self._reach_s(host)))
        try:
            said = await asyncio.shield(doing)  # it keeps to its limit itself
        except asyncio.CancelledError:
            await self._node.end(call)
            with anyio.CancelScope(shield=True):
                await asyncio.wait([doing])
            raise
        return msgspec.convert(said, Said)  # type: ignore[no-any-return]  # a union

    async def run(
        self,
        host: HostId,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> Ran:
        """On this machine, as the daemon's user."""
        self._of(host)
        path = (env or {}).get("PATH", os.environ.get("PATH"))
        if argv and shutil.which(argv[0], path=path) is None:
            raise NotDone(f"{host}: {argv[0]}: there is no such program, or it may not be run")
        command = with_score_reset(argv) if argv else ()
        return await super().run(host, command, env=env, stdin=stdin, timeout_s=timeout_s)


class LocalBackend(OnThisMachine[HostOptions], Asking[HostOptions]):
    """This machine: GPUs by NVML, kept open; processes of its own. There is one host."""

    name, kind = "local", HostOptions

    def __init__(self, hosts: Mapping[HostId, HostConfig], options: Mapping[HostId, HostOptions], owner: str) -> None:
        super().__init__(hosts, options, owner)
        self._threads = 0
        #: what NVML is asked through, once it was started
        self._nvml: Any = None

    @classmethod
    async def open(cls, hosts: Sequence[HostConfig], options: Mapping[str, Any]) -> Self:
        """Make the backend. Needs neither a GPU nor a driver.

        Raises:
            ValueError: an option that is not known or out of range; or two hosts, which would be one machine.
        """
        logs = {"logs": f"{options['state_dir']}/logs"} if options.get("state_dir") is not None else {}
        if len(hosts) > 1:
            raise ValueError(
                f"{hosts[1].id}: it is reached by backend local, and so is {hosts[0].id}: both are this machine; "
                "make one [[hosts]] table of them"
            )
        return await super().open(hosts, {**logs, **options})

    async def ask(self, host: HostId, question: Mapping[str, Any], limit_s: float, user: str = "") -> dict[str, Any]:
        """In a thread; what starts and ends processes, in a process of its own, which has no threads."""
        try:
            with anyio.fail_after(limit_s):
                if question["ask"] in ("start", "stop"):
                    return await super().ask(host, question, limit_s, user)
                call = self._ask_nvml if question["ask"] in ("look", "about") else ask.answer
                return await self._in_a_thread(host, call, dict(question))
        except TimeoutError as error:
            raise ContactLost(
                f"{host} did not answer within {limit_s:g} s; see dmesg for whether its GPU driver hangs"
            ) from error

    async def close(self) -> None:
        """NVML is left open: the process ends soon, and a look may still be under way."""

    async def _in_a_thread(
        self, host: HostId, call: Callable[[dict[str, Any]], dict[str, Any]], question: dict[str, Any]
    ) -> dict[str, Any]:
        """Call it in a thread that is not waited for: not this call when it is cancelled, and not the process's end."""
        if self._threads >= _THREADS:
            raise ContactLost(f"{host}: {_THREADS} looks hang in its GPU driver; see dmesg, and restart the machine")
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[dict[str, Any]] = loop.create_future()

        def done(answer: dict[str, Any]) -> None:
            self._threads -= 1
            if not answered.done():
                answered.set_result(answer)

        def work() -> None:
            answer = call(question)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done, answer)

        self._threads += 1
        threading.Thread(target=work, name="rollmuxd-nvml", daemon=True).start()
        return await answered

    def _ask_nvml(self, question: dict[str, Any]) -> dict[str, Any]:
        """NVML is started once and kept, which also keeps the driver loaded; and again where that will not do."""
        if self._nvml is not None:
            answer = ask.answer({**question, "nvml": self._nvml})
            if "said" in answer and "no_gpus" not in answer["said"]:
                return answer
        try:
            self._nvml = gpus.nvml(question["made_up"])
        except Exception:
            return ask.answer(question)  # which says what is wrong
        return ask.answer({**question, "nvml": self._nvml})
