"""What a host says of one version: how large it is, how it is cut, and what each chunk must be.

The file is cut into chunks of equal size (the last is shorter). A chunk is what is checked, resumed and taken over. On
the wire a chunk is its own bytes, or a difference to the same chunk of ``base`` (:mod:`rollmuxd_weights.core.delta`).
All of a manifest comes from the network, so :func:`decode` bounds every part of it.
"""

import itertools
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from rollmuxd_weights.core.fence import Identity, parse

_MOST_CHUNKS: Final = 1 << 20
_U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Size = Annotated[int, Meta(ge=0, le=64 << 20)]
#: bytes per second, by slow line
Rates: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=300)], Annotated[float, Meta(ge=0, le=1e15)]], Meta(max_length=1 << 16)
]


class Manifest(Struct, frozen=True):
    """One version. Offsets and sizes are bytes, rates bytes per second."""

    id: str
    bytes: Annotated[int, Meta(ge=1, le=1 << 46)]
    chunk: Annotated[int, Meta(ge=1 << 10, le=64 << 20)]
    #: CRC-32 of each chunk of the file
    crc: Annotated[list[_U32], Meta(max_length=_MOST_CHUNKS)]
    #: what the differences are to; empty: there are none
    base: Annotated[str, Meta(max_length=80)] = ""
    #: bytes of each difference; 0: unchanged; as many as the chunk has: it is the chunk itself
    delta: Annotated[list[_Size], Meta(max_length=_MOST_CHUNKS)] = []
    #: what each slow line was measured to carry
    rates: Rates = {}

    @property
    def identity(self) -> Identity:
        """Of the version."""
        return parse(self.id)

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self.crc)

    def span(self, chunk: int) -> tuple[int, int]:
        """Where a chunk begins in the file, and where it ends."""
        begins = chunk * self.chunk
        return begins, min(begins + self.chunk, self.bytes)

    def offsets(self, *, delta: bool) -> list[int]:
        """Where each chunk begins on the wire, and at last where the last one ends."""
        if delta:
            return [0, *itertools.accumulate(self.delta)]
        return [*range(0, self.bytes, self.chunk), self.bytes]


def decode(body: bytes) -> Manifest:
    """Read a manifest. Raises ValueError where it is none, or contradicts itself."""
    try:
        found = msgspec.json.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise ValueError(f"this is no manifest of weights: {error}") from error
    parse(found.id)
    if found.chunks != -(-found.bytes // found.chunk):
        raise ValueError(
            f"the manifest of {found.id} has {found.chunks} sums for {found.bytes} bytes in chunks of {found.chunk}"
        )
    if found.base:
        parse(found.base)
        if len(found.delta) != found.chunks or any(
            size > end - begin
            for size, (begin, end) in zip(found.delta, map(found.span, range(found.chunks)), strict=True)
        ):
            raise ValueError(f"the manifest of {found.id} has differences that do not fit its chunks")
    return found
