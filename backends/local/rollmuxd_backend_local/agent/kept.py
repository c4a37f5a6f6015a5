"""Inputs of commands that a connection has carried, so that it need not carry them again.

Each question and each move sends its whole program as such an input.

Both ends keep the same ones: they see the same commands in the same order. Standard library only, as ``serve``.
"""

from __future__ import annotations

#: at each end of a connection; inputs of other lengths are not kept
_MOST = 16
_SHORTEST, _LONGEST = 300, 2**16


class Kept:
    """The inputs that were used last, by name."""

    def __init__(self) -> None:
        self._inputs: dict[str, str] = {}

    def name(self, stdin: bytes) -> str:
        """What to keep it under; empty: it is not kept."""
        import hashlib  # only the daemon makes names, and a node starts without it

        return hashlib.sha256(stdin).hexdigest()[:24] if _SHORTEST <= len(stdin) <= _LONGEST else ""

    def has(self, name: str) -> bool:
        """Whether it was carried already."""
        return name in self._inputs

    def whole(self, name: str, stdin: str) -> str:
        """The input of a command that was sent with this name; KeyError where it was not carried yet."""
        if not name:
            return stdin
        whole = self._inputs.pop(name, "") or stdin
        if not whole:
            raise KeyError(f"input {name} is not kept")
        self._inputs[name] = whole
        if len(self._inputs) > _MOST:
            del self._inputs[next(iter(self._inputs))]
        return whole
