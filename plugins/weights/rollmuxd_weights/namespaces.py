"""Two clusters on one Linux machine: a network namespace per host, and lines between them of the rates you say.

Nothing is made in the machine's own namespace: the bridges are in one of their own, so to remove the namespaces is to
remove all. Rates are kept by ``tbf``, which minimal kernels have. Delay and loss would need ``netem``, which they may
not have. Root is needed.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, Self

_made: Final = itertools.count()
#: a queue that is shorter drops packets in slow start, and short transfers take twice as long
_SHAPED: Final = "burst 128kb latency 1s"


def unavailable() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2)"
    probe = f"rwprobe{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "set", "lo", "up")
        _run(["tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1mbit", *_SHAPED.split()])
    except subprocess.CalledProcessError as error:
        return f"no shaped namespaces can be made here: {error.stderr.strip()}"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", probe)
    return None


class Clusters:
    """So many hosts in each cluster. A context manager; leaving it ends what runs in the namespaces, and removes them.

    Rates are Mbit/s. ``slow``: of each host's line between the clusters; ``fast``: of each rollout host's line to the
    others. ``rails``: network cards of each host, each with lines of its own. ``shared``: one line between the clusters
    that all share, too.
    """

    def __init__(
        self, train: int, rollout: int, *, slow: float, fast: float, rails: int = 1, shared: float | None = None
    ) -> None:
        self.trainers = [f"train{number}" for number in range(train)]
        self.rollouts = [f"roll{number}" for number in range(rollout)]
        self.slow, self.fast, self.rails, self.shared = slow, fast, rails, shared
        self._prefix = f"rw{os.getpid():x}-{next(_made)}"
        self._spaces: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()

    @property
    def hosts(self) -> dict[str, dict[str, list[str]]]:
        """As a hosts file has it."""
        return {
            "trainers": {
                host: [f"{self._wan(host, rail)}:7501" for rail in range(self.rails)] for host in self.trainers
            },
            "rollouts": {
                host: [f"{self._fab(host, rail)}:7501" for rail in range(self.rails)] for host in self.rollouts
            },
        }

    def command(self, host: str, *words: str) -> list[str]:
        """What runs a command on a host."""
        return ["ip", "netns", "exec", self._space(host), *words]

    def cut(self, host: str, rail: int = 0) -> None:
        """Take a host's line between the clusters down."""
        _ip("-n", self._space(host), "link", "set", f"wan{rail}", "down")

    def mend(self, host: str, rail: int = 0) -> None:
        """And up again."""
        _ip("-n", self._space(host), "link", "set", f"wan{rail}", "up")

    def crossed(self) -> int:
        """Bytes that rollout hosts have received between the clusters, with all headers, since they were made."""
        found = 0
        for host, rail in itertools.product(self.rollouts, range(self.rails)):
            path = f"/sys/class/net/wan{rail}/statistics/rx_bytes"
            found += int(_run(self.command(host, "cat", path)))
        return found

    def remove(self) -> None:
        """End what runs in the namespaces, and remove them."""
        for space in reversed(self._spaces):
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in _run(["ip", "netns", "pids", space]).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", space)
        self._spaces.clear()

    # ---- making ------------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        switch = self._space("switch")
        self._add(switch)
        bridges = [f"{side}{rail}" for side in ("wa", "wb", "fab") for rail in range(self.rails)]
        lines = [f"link add {bridge} type bridge\nlink set {bridge} up" for bridge in bridges]
        for rail in range(self.rails):  # between the clusters' halves
            lines += [f"link add a{rail} type veth peer name b{rail}"]
            lines += [f"link set {side}{rail} master w{side}{rail} up" for side in "ab"]
        _batch("ip", switch, lines)
        if self.shared is not None:
            ends = [f"{side}{rail}" for side in "ab" for rail in range(self.rails)]
            _batch("tc", switch, [_tbf(end, self.shared) for end in ends])
        for number, host in enumerate([*self.trainers, *self.rollouts]):
            self._add_host(switch, number, host)

    def _add_host(self, switch: str, number: int, host: str) -> None:
        space = self._space(host)
        self._add(space)
        far, near, shaped, far_shaped = [], ["link set lo up"], [], []
        trains = host in self.trainers
        for rail in range(self.rails):
            cards = [(f"wan{rail}", f"{'wa' if trains else 'wb'}{rail}", self._wan(host, rail), self.slow)]
            if not trains:
                cards.append((f"fab{rail}", f"fab{rail}", self._fab(host, rail), self.fast))
            for card, bridge, address, rate in cards:
                port = f"{card[0]}{rail}h{number}"
                far += [f"link add {port} type veth peer name {card} netns {space}"]
                far += [f"link set {port} master {bridge} up"]
                near += [f"addr add {address}/16 dev {card}", f"link set {card} up"]
                shaped += [_tbf(card, rate)]
                far_shaped += [_tbf(port, rate)]
        _batch("ip", switch, far)
        _batch("ip", space, near)
        _batch("tc", space, shaped)
        _batch("tc", switch, far_shaped)

    def _add(self, space: str) -> None:
        _ip("netns", "add", space)
        self._spaces.append(space)

    def _space(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _wan(self, host: str, rail: int) -> str:
        trains = host in self.trainers
        place = (self.trainers if trains else self.rollouts).index(host)
        return f"10.{10 + rail}.{0 if trains else 1}.{place + 1}"

    def _fab(self, host: str, rail: int) -> str:
        return f"10.{100 + rail}.1.{self.rollouts.index(host) + 1}"


def _tbf(device: str, mbit: float) -> str:
    return f"qdisc add dev {device} root tbf rate {int(mbit * 1000)}kbit {_SHAPED}"


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _batch(tool: str, space: str, lines: Sequence[str]) -> None:
    _run([tool, "-n", space, "-batch", "-"], input="\n".join(lines) + "\n")


def _run(words: Sequence[str], **more: Any) -> str:
    try:
        ran = subprocess.run(words, check=True, capture_output=True, text=True, timeout=120, **more)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise
    return str(ran.stdout)


@contextlib.contextmanager
def removed_on_signals() -> Iterator[None]:
    """SIGTERM leaves the block as Ctrl-C does, so that what it has made is removed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
