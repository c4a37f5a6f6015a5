"""A Ray for one job of ``rollmuxd run`` (``[ray]`` in ``job.toml``).

Jobs that run on Ray reserve whole GPUs of it by placement groups, so a second job would never start on the same Ray. On
a Ray of its own, each reserves any GPUs of its place, and the daemon decides whose turn it is.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Final

from msgspec import Meta, Struct

from rollmuxd.cli.common import Failed

#: what starting it may take: four Python programs, on a machine that has other things to do
_STARTS_S: Final = 120.0
_LOOK_S: Final = 0.05
#: the file with what Ray says meanwhile
_SAID: Final = "said"
#: Ray's sockets need seventy bytes of the 107 that a path may have
_SHORT: Final = "/tmp"  # noqa: S108  # tempfile makes a folder of one's own there


class RayTable(Struct, frozen=True, forbid_unknown_fields=True):
    """What ``[ray]`` says."""

    #: Ray's own command: that of the job's environment
    program: Annotated[str, Meta(min_length=1)] = "ray"
    #: more of them for ``ray start``
    arguments: tuple[str, ...] = ()


@contextmanager
def own_ray(
    table: RayTable, gpus: Sequence[str] | None, env: dict[str, str], out: IO[bytes] | None, beat: Callable[[], None]
) -> Iterator[dict[str, str]]:
    """Start a Ray with these GPUs (None: as many as it finds); what the job's commands need to know of it.

    Its processes are ours from then on: ending our descendants ends them. ``beat`` is called again and again meanwhile.
    Raises Failed, with what Ray says.
    """
    with tempfile.TemporaryDirectory(prefix="rx-", dir=_SHORT, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # Each port that Ray would have a habit of is a free one, or Ray's to find: a second Ray has the same habits.
        argv = [table.program, "start", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"]
        argv.append(f"--dashboard-agent-listen-port={_free_port()}")
        dashboard = _free_port()
        argv += ["--head", "--port=0", f"--temp-dir={folder}", f"--dashboard-port={dashboard}"]
        argv += [] if gpus is None else [f"--num-gpus={len(gpus)}"]
        # One that the user's shell is in is not this one.
        plain = {name: value for name, value in env.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
        # Ray's ports are open to the network; it lets in callers that have this (older versions of Ray do not ask for
        # it).
        only_us = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        try:
            _run([*argv, *table.arguments], plain | only_us, folder / _SAID, beat)
        finally:
            if out is not None and (folder / _SAID).exists():
                out.write((folder / _SAID).read_bytes())
                out.flush()
        yield {
            **only_us,
            "RAY_ADDRESS": (folder / "ray_current_cluster").read_text(encoding="ascii").strip(),
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
            # What is started with ray.init(address="local") in spite of it finds no other one, either.
            "RAY_TMPDIR": str(folder),
        }


def _run(argv: list[str], env: Mapping[str, str], said: Path, beat: Callable[[], None]) -> None:
    give_up = time.monotonic() + _STARTS_S
    with said.open("wb") as both:
        try:
            starting = subprocess.Popen(
                argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=both, stderr=both, start_new_session=True
            )
        except OSError as error:
            raise Failed(
                f"[ray]: {argv[0]} could not be started: {error}; install Ray where the job is, or name it: "
                'program = "/path/to/ray"'
            ) from error
    while (status := starting.poll()) is None:
        if time.monotonic() > give_up:
            raise Failed(f"[ray]: {argv[0]} start has not come to its end in {_STARTS_S:g} s")
        beat()
        time.sleep(_LOOK_S)
    if status != 0:
        lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
        raise Failed(f"[ray]: {' '.join(argv[:2])} ended with exit status {status}: {' / '.join(lines[-3:])}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
