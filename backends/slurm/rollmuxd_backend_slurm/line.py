"""One kept step on one node: opened when it is needed, opened again when it is gone."""

import asyncio
import contextlib
import json
import secrets
from importlib.resources import files
from typing import Any, Final

import anyio
import msgspec

from rollmuxd.spi import ContactLost
from rollmuxd_backend_local.agent import AgentConnection, frames
from rollmuxd_backend_local.agent.connection import Opened, end_process
from rollmuxd_backend_local.agent.kept import Kept
from rollmuxd_backend_local.agent.reached import Said
from rollmuxd_backend_slurm import controller
from rollmuxd_backend_slurm.controller import Node
from rollmuxd_backend_slurm.options import SlurmOptions

#: the daemon is heard of so often within the time after which a step ends itself
_BEATS: Final = 6
#: what a step may take to end by itself, and then its srun
_END_S: Final = 2.0
#: of what srun says
_SAID_KEPT: Final = 4_000
#: a site's prolog may print something before the step's program does
_NOISE: Final = 2**16

#: Reads the program from standard input, where no argument is too long, and becomes it. Slurm can send a signal some
#: time before the end (--signal=USR1@600), which says nothing here.
_OPENER: Final = """
import json, os, signal, sys, types
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: None)

def take(size):
    got = b""
    while len(got) < size:
        part = os.read(0, size - len(got))
        if not part:
            sys.exit("its program did not come")
        got += part
    return got

package = types.ModuleType("rollmuxd_step")
package.__path__ = []
sys.modules[package.__name__] = package
for short, source in json.loads(take(int(sys.argv[1]))):
    module = types.ModuleType(package.__name__ + "." + short)
    module.__package__ = package.__name__
    sys.modules[module.__name__] = module
    setattr(package, short, module)
    exec(compile(source, "<rollmuxd: %s>" % short, "exec", dont_inherit=True), module.__dict__)
package.serve.main(*sys.argv[2:])
"""


class Line(AgentConnection):
    """The step on one node of an allocation."""

    def __init__(self, node: Node, options: SlurmOptions) -> None:
        super().__init__(options.connect_s)
        self._node, self._options = node, options
        self._agent = f"the step on {node.name}"
        self._what = f"node {node.name} of allocation {node.allocation}"
        self._process: asyncio.subprocess.Process | None = None
        self._said = bytearray()
        self._kept = Kept()
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        #: what the step said of itself, and the controller of its allocation, when it was opened
        self.environment: dict[str, str] = {}
        self.tracked_by_cgroup = False
        self.restarts = 0

    async def _open(self) -> Opened:
        # Asked first: its answer has reasons, where srun's would only be that there is no step.
        try:
            there = await controller.component(self._node, self._options.conf)
        except ContactLost as error:
            raise EOFError(str(error)) from error
        if not there.is_there:
            raise EOFError(f"allocation {self._node.allocation} is over: its state is {there.state}")
        self.restarts = there.restarts
        program, mark = _program(), f"rollmuxd-{secrets.token_hex(8)}"
        argv = controller.step(self._options, self._node, "--unbuffered", "--job-name=rollmuxd")
        python = (self._options.python, "-I", "-S", "-u", "-c", _OPENER, str(len(program)), mark)
        process = self._process = await asyncio.create_subprocess_exec(
            *(*argv, *python, f"{self._options.silent_s:g}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=controller.environment(self._options.conf),
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._said.clear()
        self._kept = Kept()
        listening = asyncio.create_task(self._listen(process))
        self._tasks = (listening,)
        process.stdin.write(program)
        with contextlib.suppress(OSError):  # it has ended: below is read what it said of why
            await process.stdin.drain()
        self._told(await self._greeting(process.stdout, mark, listening))
        self._tasks = (listening, asyncio.create_task(self._beat(process.stdin)))
        return process.stdout, process.stdin

    async def _ask(self, writer: asyncio.StreamWriter, ask: frames.Ask) -> Said:
        wish = ask.wish
        if isinstance(wish, frames.Run) and (name := self._kept.name(wish.stdin)):
            known = self._kept.has(name)
            self._kept.whole(name, name)
            ask = msgspec.structs.replace(
                ask, wish=msgspec.structs.replace(wish, kept=name, stdin=b"" if known else wish.stdin)
            )
        return await super()._ask(writer, ask)

    async def _greeting(
        self, stdout: asyncio.StreamReader, mark: str, listening: "asyncio.Task[None]"
    ) -> dict[str, Any]:
        noise = 0
        while line := await stdout.readline():
            before, found, said = line.decode(errors="replace").partition(mark)
            if found:
                told: dict[str, Any] = json.loads(said)
                return told
            noise += len(line)
            if noise > _NOISE:
                raise EOFError(f"it says something else than it should: {before.strip()[:200]}")
        await listening
        raise EOFError(controller.in_words(self._said.decode(errors="replace"), self._node))

    def _told(self, facts: dict[str, Any]) -> None:
        self.environment = facts["environment"]
        # Slurm's own cgroups have the allocation's number in their paths (job_4711), in both versions.
        self.tracked_by_cgroup = f"/job_{self.environment.get('SLURM_JOB_ID', '')}/" in facts["cgroups"]

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Keep the end of what srun says."""
        assert process.stderr is not None
        while part := await process.stderr.read(_SAID_KEPT):
            self._said += part
            del self._said[:-_SAID_KEPT]

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        """So that a step which hears nothing may end itself: after a daemon's death nothing else would end it."""
        with contextlib.suppress(OSError):
            while not writer.is_closing():
                frames.write(writer, frames.Beat())
                await writer.drain()
                await anyio.sleep(self._options.silent_s / _BEATS)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await end_process(process, _END_S)
        tasks, self._tasks = self._tasks, ()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _program() -> bytes:
    """What runs in a step: the modules, in the order in which they need each other."""
    folder = files("rollmuxd_backend_local") / "agent"
    named = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in ("kept", "onnode", "serve")]
    return json.dumps(named).encode()
