"""One kept step on one node: opened when it is needed, opened again when it is gone."""

import asyncio
from typing import Any, Final

from rollmuxd.spi import ContactLost
from rollmuxd_backend_local.agent import SentAgent
from rollmuxd_backend_local.agent.connection import Opened, end_process
from rollmuxd_backend_slurm import controller
from rollmuxd_backend_slurm.controller import Node
from rollmuxd_backend_slurm.options import SlurmOptions

#: what a step may take to end by itself, and then its srun
_END_S: Final = 2.0
#: of what srun says
_SAID_KEPT: Final = 4_000


class Line(SentAgent):
    """The step on one node of an allocation."""

    def __init__(self, node: Node, options: SlurmOptions) -> None:
        super().__init__(options.connect_s, options.silent_s)
        self._node, self._options = node, options
        self._agent = f"the step on {node.name}"
        self._what = f"node {node.name} of allocation {node.allocation}"
        self._process: asyncio.subprocess.Process | None = None
        self._said = bytearray()
        self._listening: asyncio.Task[None] | None = None
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
        process = self._process = await asyncio.create_subprocess_exec(
            *controller.step(self._options, self._node, "--unbuffered", "--job-name=rollmuxd"),
            *self._python(self._options.python),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=controller.environment(self._options.conf),
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._said.clear()
        self._listening = asyncio.create_task(self._listen(process))
        opened = process.stdout, process.stdin
        try:
            self._told(await self._greet(opened))
        except EOFError:
            await self._listening
            raise EOFError(controller.in_words(self._said.decode(errors="replace"), self._node)) from None
        return opened

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

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await end_process(process, _END_S)
        await super()._end()
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.cancel()
            await asyncio.wait([listening])
