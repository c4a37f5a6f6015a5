"""Which hosts take part, and at which addresses: the same file on every host.

    [trainers]
    train0 = ["10.0.0.1:7501"]

    [rollouts]
    roll0 = ["10.1.0.1:7501"]
    roll1 = ["10.1.0.2:7501"]

A host with several network cards has an address for each, in the same order on every host. Card by card they make the
slow lines and the rails of the fabric.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from rollmuxd_weights.store import checked_name

_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]{1,253}):(\d{1,5})")
_MOST: Final = 4096


class Address(NamedTuple):
    """Where one network card of a host listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


class Hosts(NamedTuple):
    """Addresses by host, trainers and rollout hosts apart."""

    trainers: Mapping[str, tuple[Address, ...]]
    rollouts: Mapping[str, tuple[Address, ...]]

    def of(self, host: str) -> tuple[Address, ...]:
        """Return a host's addresses. Raises ValueError for one that is not in the file."""
        found = self.rollouts.get(host) or self.trainers.get(host)
        if found is None:
            raise ValueError(
                f"host {host!r} is not in the hosts file, which has {', '.join([*self.trainers, *self.rollouts])}; "
                "say which one this is (me=, --host)"
            )
        return found


def address(text: str) -> Address:
    """Read ``HOST:PORT``. Raises ValueError for anything else."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise ValueError(f"{text[:200]!r} is no address; it is HOST:PORT, such as 10.0.0.1:7501, port 1 to 65535")
    return Address(found[1].strip("[]"), int(found[2]))


def read(path: Path) -> Hosts:
    """Read a hosts file. Raises ValueError with the line's name for what it must not have."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path}: there is no such file; it has [trainers] and [rollouts], and is on every host"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return hosts(given, str(path))


def hosts(given: Mapping[str, Any], where: str = "hosts") -> Hosts:
    """The same from a mapping: ``{"trainers": {"train0": ["10.0.0.1:7501"]}, "rollouts": {...}}``."""
    if stray := sorted(set(given) - {"trainers", "rollouts"}):
        raise ValueError(f"{where}: {stray[0]!r} is unknown; it has [trainers] and [rollouts]")
    sides = [_side(given.get(side), f"{where}: [{side}]") for side in ("trainers", "rollouts")]
    if both := sorted(set(sides[0]) & set(sides[1])):
        raise ValueError(f"{where}: {both[0]} is in [trainers] and in [rollouts]")
    users: dict[Address, str] = {}
    for host, at in ((host, at) for side in sides for host, addresses in side.items() for at in addresses):
        if at in users:
            raise ValueError(
                f"{where}: {at} is an address of {users[at]} and of {host}: give each host, and each of its network "
                "cards, an address of its own"
            )
        users[at] = host
    return Hosts(*sides)


def _side(given: Any, where: str) -> dict[str, tuple[Address, ...]]:
    if not isinstance(given, Mapping) or not 0 < len(given) <= _MOST:
        raise ValueError(f"{where} is missing: at least one host, as in train0 = ['10.0.0.1:7501']")
    found = {}
    for name, addresses in given.items():
        checked_name(name, f"{where}: a host's name")
        if not isinstance(addresses, list) or not 0 < len(addresses) <= 64:
            raise ValueError(f"{where} {name}: a list of addresses, one for each network card, 64 at most")
        try:
            found[name] = tuple(address(str(one)) for one in addresses)
        except ValueError as error:
            raise ValueError(f"{where} {name}: {error}") from error
    return found
