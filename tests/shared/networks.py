"""What tests and the demo make hosts of: networks with links that can be cut (needs root, and ``ip``), and ports."""

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable

from rollmuxd_backend_local.onhost import processes


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that nothing else on this machine gets, for a server that cannot say which it took.

    It stays bound, without listening, until this process ends. A server that sets SO_REUSEADDR can take it, as servers
    do; the kernel gives it to nothing that asks for any port.
    """
    held = socket.socket()
    atexit.register(held.close)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    port: int = held.getsockname()[1]
    return port


def descendants(pids: Iterable[int]) -> list[int]:
    """These processes, and what they have started in turn; not what has lost its parent."""
    return [one for pid in pids for one in (pid, *processes.descendants(pid))]


class Namespace:
    """A network of its own for one host, with a link to it that can be cut."""

    def __init__(self, number: int) -> None:
        self.name = f"rollmux-{os.getpid()}-{number}"
        self._here = f"rx{os.getpid() % 100_000}n{number}"
        # Out of what is kept for such things (RFC 2544), a piece of four for each.
        piece = (os.getpid() * 16 + number) % (2**17 // 4) * 4
        #: the machine's own address on the link, and the host's
        self.gateway, self.address = (
            f"198.{18 + (piece >> 16)}.{piece >> 8 & 255}.{piece + one & 255}" for one in (1, 2)
        )

    def make(self) -> None:
        """Raises CalledProcessError where that is not allowed."""
        there = f"{self._here}p"
        _ip("netns", "add", self.name)
        _ip("link", "add", self._here, "type", "veth", "peer", "name", there, "netns", self.name)
        _ip("address", "add", f"{self.gateway}/30", "dev", self._here)
        _ip("link", "set", self._here, "up")
        _ip("-n", self.name, "address", "add", f"{self.address}/30", "dev", there)
        _ip("-n", self.name, "link", "set", "lo", "up")
        self.mend()

    def cut(self) -> None:
        """Nothing comes through any more, without a word."""
        _ip("-n", self.name, "link", "set", f"{self._here}p", "down")

    def mend(self) -> None:
        """It comes through again."""
        _ip("-n", self.name, "link", "set", f"{self._here}p", "up")
        # To the machine's other addresses, where another link may end; it goes with the link.
        _ip("-n", self.name, "route", "replace", "default", "via", self.gateway)

    def inside(self, *argv: str) -> tuple[str, ...]:
        """The command that runs this one there."""
        return ("ip", "netns", "exec", self.name, *argv)

    def remove(self) -> None:
        """With its link."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._here)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", self.name)


def namespaces_can_be_made() -> bool:
    """Whether this user may, and has what it takes."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    trial = Namespace(15)
    try:
        trial.make()
    except subprocess.CalledProcessError:
        return False
    finally:
        trial.remove()
    return True


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
