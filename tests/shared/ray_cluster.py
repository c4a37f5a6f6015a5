"""A Ray cluster for tests, in a process of its own: Ray does not come into this one."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

import forked
from patience import PATIENCE_S

#: what takes long of what Ray imports, and nothing of Ray's: it reads variables as it is imported
IMPORTED_BY_RAY = ("google.protobuf.internal.builder", "jsonschema", "requests", "aiohttp", "fastapi")
#: the same of verl
IMPORTED_BY_VERL = ("torch", "tensordict", "transformers", "datasets", "pandas", "peft", "accelerate", "hydra", "zmq")


class ClusterProcess:
    """See :mod:`ray_server` for its commands."""

    def __init__(self, folder: Path, names: Sequence[str], *, apart: bool = False) -> None:
        self.folder = folder
        self._words = (*(["--apart"] if apart else []), *names)
        self.address = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "cluster.log"
        with log.open("w") as stderr:
            python = self.folder / "python"
            program = Path(__file__).with_name("ray_server.py")
            self._process = forked.Popen(
                [sys.executable, str(program), str(self.folder), str(python), *self._words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env={**os.environ, "RAY_JEMALLOC_LIB_PATH": ""},  # what Ray preloads, no copy has
                imported=IMPORTED_BY_RAY,
                stand_in=python,
            )
        try:
            self.address = self._answer()["address"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def do(self, *words: str) -> None:
        """Have it done, and return when it is."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = _line(self._process.stdout)
        if not line:
            said = (self.folder / "cluster.log").read_text(errors="replace")[-2_000:]
            raise RuntimeError(f"the Ray cluster does not answer: {said}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _line(stream: IO[str]) -> str:
    """The next line; empty where there is none within the time."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(stream, selectors.EVENT_READ)
        return stream.readline() if waiting.select(PATIENCE_S) else ""
