"""The container of a version: a safetensors file, which torch, vLLM, SGLang and transformers read.

Eight bytes say how long the header is. The header is JSON with each tensor's type, shape and place, and the rest is raw
bytes. That library (https://github.com/huggingface/safetensors) is not used, because the file is written once, straight
into host memory, while sums are made of it. See docs/decisions/0043.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

_LENGTH: Final = struct.Struct("<Q")
#: the longest header that is read (the library's own limit)
MOST_HEADER: Final = 100_000_000
#: bytes of one element
SIZES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_Extent = Annotated[int, Meta(ge=0, lt=1 << 53)]


class Tensor(Struct, frozen=True):
    """Where one tensor is: ``data_offsets`` are bytes from the end of the header."""

    dtype: str
    shape: Annotated[list[_Extent], Meta(max_length=16)]
    data_offsets: tuple[_Extent, _Extent]


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, range]]:
    """Return the head of a file with these types and shapes, and where in the file each tensor's bytes belong."""
    placed: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in SIZES:
            raise ValueError(f"tensor {name} is of type {dtype}; safetensors has {', '.join(SIZES)}")
        size = SIZES[dtype] * math.prod(shape)
        placed[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(placed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begins = _LENGTH.size + len(text)
    spans = {name: range(*(begins + edge for edge in one["data_offsets"])) for name, one in placed.items()}
    return _LENGTH.pack(len(text)) + text, spans


def tensors(file: memoryview) -> Iterator[tuple[str, Tensor, memoryview]]:
    """Return name, type and shape, and bytes of each tensor of a file. Raises ValueError for what is no such file."""
    if len(file) < _LENGTH.size:
        raise ValueError("this is no safetensors file: it is shorter than its head")
    (length,) = _LENGTH.unpack_from(file)
    if length > min(MOST_HEADER, len(file) - _LENGTH.size):
        raise ValueError(f"this is no safetensors file: its header would have {length} bytes")
    body = file[_LENGTH.size + length :]
    try:
        raw = msgspec.json.decode(file[_LENGTH.size : _LENGTH.size + length], type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        placed = {name: msgspec.json.decode(one, type=Tensor) for name, one in raw.items()}
    except msgspec.DecodeError as error:
        raise ValueError(f"this is no safetensors file: {error}") from error
    for name, one in placed.items():
        begin, end = one.data_offsets
        size = SIZES[one.dtype] * math.prod(one.shape) if one.dtype in SIZES else -1
        if not 0 <= begin <= end <= len(body) or end - begin != size:
            raise ValueError(f"tensor {name[:200]} ({one.dtype[:20]}, {one.shape}) does not fit bytes {begin} to {end}")
    return ((name, one, body[slice(*one.data_offsets)]) for name, one in placed.items())
