"""A job's process as a step of its own, which outlives the daemon and its kept steps. So does its srun.

Where Slurm tracks processes by cgroup, what a step has started ends with the step. So no job may be started in the kept
step: it would end with the daemon. An srun that is killed alone cancels its step.
"""

import contextlib
import secrets
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import IO, Any, Final

import anyio

from rollmuxd.spi import ContactLost, PluginError, Ran
from rollmuxd_backend_local import payload
from rollmuxd_backend_slurm import controller
from rollmuxd_backend_slurm.controller import Node
from rollmuxd_backend_slurm.options import SlurmOptions

#: between two looks whether the process was started
_LOOK_S: Final = 0.1

#: The program of the step. It starts the process as on every other host, and writes down what came of it. It stays
#: until the process and all its descendants have ended, which become its children (36 is PR_SET_CHILD_SUBREAPER).
#: A signal before the allocation's end reaches the process too, which may want it; this one must not end.
#: Key and mark of the run are in the file: they are in no argument, and not in srun's environment.
_STARTER: Final = """
import ctypes, json, os, signal, sys, zlib
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: None)
path = sys.argv[1]
with open(path, "rb") as file:
    p = json.loads(zlib.decompress(file.read()))
os.unlink(path)
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
with open(path + ".new", "w") as sys.stdout:
    exec(p[0])
os.rename(path + ".new", path + ".said")
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
"""

#: Names there are random, and a file that exists is refused.
_PLACE: Final = "/tmp"  # noqa: S108

#: Makes a new file that only its user may read.
_WRITE: Final = 'umask 077; set -C; cat > "$0"'
_READ: Final = 'cat "$0.said" && rm -f "$0.said"'

#: runs a command on the node, over the kept step
Run = Callable[..., Awaitable[Ran]]


class Steps:
    """Starts jobs' processes. Whether one lives is asked of its node, and not of its srun."""

    def __init__(self) -> None:
        self._sruns: list[subprocess.Popen[bytes]] = []

    async def start(
        self, run: Run, node: Node, options: SlurmOptions, question: Mapping[str, Any], limit_s: float
    ) -> dict[str, Any]:
        """Ask the question ``start`` in a step of its own; the answer.

        Raises what ``run`` raises, and ContactLost: it is not known whether it was started.
        """
        mark, path = f"rollmuxd-{secrets.token_hex(8)}", f"{_PLACE}/.rollmuxd-start-{secrets.token_hex(12)}"
        packed = payload.pack(dict(question), mark)
        written = await run(("sh", "-c", _WRITE, path), stdin=packed, timeout_s=limit_s)
        if written.exit_code != 0:
            raise ContactLost(
                f"{node.host}: {path} cannot be written there: {written.stderr.decode(errors='replace').strip()}"
            )
        # The process's own output is in its log: nothing of it goes through srun.
        name = f"--job-name=rollmuxd-{question['order']['launch']}"
        argv = (*controller.step(options, node), "--input=none", "--output=none", "--error=none", name)
        with tempfile.TemporaryFile() as said:
            srun = self._spawn((*argv, options.python, "-I", "-S", "-c", _STARTER, path), options.conf, said)
            try:
                with anyio.fail_after(limit_s):
                    answer = await self._answer(run, srun, path)
            except TimeoutError as error:
                raise ContactLost(f"{node.host}: no step has started the process within {limit_s:g} s") from error
            finally:
                with anyio.move_on_after(limit_s, shield=True), contextlib.suppress(PluginError):
                    await run(("rm", "-f", path, f"{path}.new", f"{path}.said"), timeout_s=limit_s)
            if answer is None:
                said.seek(0)
                why = controller.in_words(said.read().decode(errors="replace"), node)
                raise ContactLost(f"{node.host}: {why}")
            return payload.unpack(answer, mark)

    async def _answer(self, run: Run, srun: "subprocess.Popen[bytes]", path: str) -> bytes | None:
        """What the step has written down; None where its srun has ended, and it has not."""
        while True:
            over = srun.poll() is not None
            read = await run(("sh", "-c", _READ, path))
            if read.exit_code == 0 or over:  # it had ended before that look
                return read.stdout if read.exit_code == 0 else None
            await anyio.sleep(_LOOK_S)

    def _spawn(self, argv: Sequence[str], conf: str, said: IO[bytes]) -> "subprocess.Popen[bytes]":
        self._sruns = [one for one in self._sruns if one.poll() is None]
        srun = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=controller.environment(conf),
            start_new_session=True,
        )
        self._sruns.append(srun)
        return srun

    def leave(self) -> None:
        """The sruns stay, and are the business of the process that inherits them."""
        for srun in self._sruns:
            if srun.poll() is None:
                srun.returncode = 0
        self._sruns.clear()
