"""One question to a host over plain HTTP: bounded in bytes and time."""

import http.client
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from rollmuxd_weights.hosts import Address, Hosts
from rollmuxd_weights.publish import the_key
from rollmuxd_weights.serve import JOB

TIMEOUT_S: Final = 5.0
#: a line over which no connection is made in so long is taken for dead: time for a lost SYN to be sent again
CONNECT_S: Final = 2.0
MOST_BYTES: Final = 64 << 20


def headers(key: str, job: str) -> dict[str, str]:
    """Of every request. A host that serves another job's weights refuses it."""
    return {JOB: job, **({"Authorization": f"Bearer {key}"} if key else {})}


def ask(
    at: Address,
    path: str,
    key: str,
    job: str,
    *,
    body: Any = None,
    timeout_s: float = TIMEOUT_S,
    opened: Callable[[http.client.HTTPConnection], None] = lambda _: None,
) -> bytes:
    """Return the answer's body. ``opened`` gets the connection, to shut it. Raises OSError and ValueError."""
    connection = http.client.HTTPConnection(at.host, at.port, timeout=min(CONNECT_S, timeout_s))
    try:
        packed = None if body is None else msgspec.json.encode(body)
        connection.connect()
        connection.sock.settimeout(timeout_s)
        opened(connection)
        connection.request("GET" if body is None else "POST", path, packed, headers(key, job))
        answer = connection.getresponse()
        found = answer.read(MOST_BYTES + 1)
    except http.client.RemoteDisconnected as error:
        raise ConnectionError(f"{at} has closed the connection without an answer: it has just ended") from error
    except http.client.HTTPException as error:
        raise ValueError(f"{at} does not speak HTTP: {error!r}") from error
    finally:
        connection.close()
    if answer.status != 200 or len(found) > MOST_BYTES:
        raise ValueError(f"{at} answers {answer.status} to {path}: {found[:300].decode(errors='replace')}")
    return found


def status(job: str, hosts: Hosts, key: str | None = None) -> dict[str, dict[str, Any]]:
    """What each host has and pulls, and why it has nothing newer, or does not answer."""

    def one(asked: tuple[str, str, Address]) -> tuple[str, dict[str, Any]]:
        side, host, at = asked
        try:
            told = msgspec.json.decode(ask(at, "/weights/current", the_key(key), job), type=dict[str, Any])
            pulling, why = list(map(str, told["pulling"])), str(told["failure"])[:500]
            known = {"answers": True, "id": str(told["id"]), "pulling": pulling, "error": why}
        except (OSError, ValueError, KeyError, TypeError) as error:
            known = {"answers": False, "id": "", "pulling": [], "error": str(error) or type(error).__name__}
        return host, {"side": side, **known}

    sides = (("trainer", hosts.trainers), ("rollout", hosts.rollouts))
    asked = [(side, host, addresses[0]) for side, of in sides for host, addresses in of.items()]
    with ThreadPoolExecutor(max_workers=32) as pool:
        return dict(pool.map(one, asked))
