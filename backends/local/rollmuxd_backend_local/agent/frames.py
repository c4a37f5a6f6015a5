"""What the daemon and the process that reaches a node send each other: JSON, each after its length; bytes as base64.

JSON of :data:`SHORT` to :data:`COMPRESSED` bytes goes compressed by zlib. srun sends 1,024 bytes at a time, and its
kernel lets the second such piece wait for an answer to the first: 40 ms.

JSON, since :mod:`rollmuxd_backend_local.agent.serve` reads it on nodes where nothing but Python is installed.
"""

import asyncio
import zlib
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

#: what a command gives back has two outputs of 8 MB; nothing longer is believed
LONGEST: Final = 64 * 2**20
#: below, JSON goes as it is; above, it costs more time than it saves
SHORT: Final = 500
COMPRESSED: Final = 2**16
_SIZE: Final = 4


class Node(Struct, frozen=True, tag_field="is"):
    """Which node is meant, where a connection reaches several."""

    #: name, host name or address; empty: what follows is enough
    name: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    resources: tuple[tuple[str, float], ...] = ()


class Run(Struct, frozen=True, tag_field="do"):
    """Run an argument vector. Answered by :class:`Ran`."""

    argv: tuple[str, ...]
    env: dict[str, str]
    stdin: bytes
    timeout_s: float


class Question(Struct, frozen=True, tag_field="do"):
    """Run a program that answers a question, of the modules that are there. Answered by :class:`Ran`."""

    #: empty: the Python that runs there
    python: str
    modules: tuple[str, ...]
    #: what the answer's line begins with
    mark: str
    question: dict[str, Any]
    timeout_s: float


class Exchange(Struct, frozen=True, tag_field="do"):
    """Open a connection, send a request of HTTP, and take in its answer. Answered by :class:`Data`."""

    address: str
    port: int
    data: bytes
    #: at most so many bytes are taken in
    most: int
    #: certificates that TLS trusts besides the node's own; empty: without TLS
    trust: str


class Look(Struct, frozen=True, tag_field="do"):
    """What the cluster says of the node. Answered by :class:`Data`, as JSON."""


Wish: TypeAlias = Run | Question | Exchange | Look


class Ask(Struct, frozen=True, tag=True):
    """Something to be done on a node; answered once, and within ``limit_s`` (0: whenever it is done)."""

    number: int
    node: Node
    #: what reaching the node may take
    reach_s: float
    limit_s: float
    wish: Wish


class Forget(Struct, frozen=True, tag=True):
    """The daemon wants this answer no longer: end what it is about."""

    number: int


class Beat(Struct, frozen=True, tag=True):
    """The daemon is there, and has nothing to say."""


class Ran(Struct, frozen=True, tag=True):
    """How a command ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Data(Struct, frozen=True, tag=True):
    """Bytes that came."""

    data: bytes = b""


class Failed(Struct, frozen=True, tag=True):
    """It was not done, for certain (``not_done``); or it is not known (``lost``)."""

    how: Literal["not_done", "lost"]
    why: str


class Answer(Struct, frozen=True, tag=True):
    """What became of the :class:`Ask` with this number."""

    number: int
    said: Ran | Data | Failed


Said: TypeAlias = Ask | Forget | Beat | Answer

_decoder: Final[msgspec.json.Decoder[Said]] = msgspec.json.Decoder(Said)


def write(writer: asyncio.StreamWriter, said: Said) -> None:
    """Put it on its way. Raises ValueError where it is too long."""
    body = msgspec.json.encode(said)
    if len(body) > LONGEST:
        raise ValueError(f"{len(body)} bytes at once; {LONGEST} are the most")
    if SHORT < len(body) <= COMPRESSED:
        body = zlib.compress(body, 1)
    writer.write(len(body).to_bytes(_SIZE, "big") + body)


async def read(reader: asyncio.StreamReader, breaks: tuple[type[Exception], ...] = (OSError,)) -> Said:
    """The next one. ``breaks``: what the reader raises where the connection breaks.

    Raises:
        EOFError: there is none any more; with a text: since the connection broke.
        ValueError: what came is none.
    """
    try:
        size = int.from_bytes(await reader.readexactly(_SIZE), "big")
        if size > LONGEST:
            raise ValueError(f"{size} bytes at once; {LONGEST} are the most")
        body = await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        raise EOFError from None
    except breaks as error:
        raise EOFError(str(error) or type(error).__name__) from error
    if not body.startswith(b"{"):
        try:
            body = zlib.decompressobj().decompress(body, COMPRESSED)
        except zlib.error as error:
            raise ValueError(str(error)) from error
    return _decoder.decode(body)
