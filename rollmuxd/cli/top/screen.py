"""What the keys of ``rollmuxd top`` do. Pure: a key changes what is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

#: arrow and other special keys send several characters; several keys may come in one read
_KEYS: Final = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_ENTER: Final = frozenset("\r\n")
_ESCAPE: Final = "\x1b"
_ERASE: Final = frozenset("\x7f\x08")
#: Ctrl-C and Ctrl-D, also while a text is typed
_BREAK: Final = frozenset("\x03\x04")


@dataclass
class Screen:
    """What the keys have set."""

    #: only jobs with this text in their name, owner, group, phase or status
    filter: str = ""
    typing: bool = False
    over: bool = False

    def press(self, keys: str) -> None:
        """Take keys."""
        for key in _KEYS.findall(keys):
            if key in _BREAK or (key in "qQ" and not self.typing):
                self.over = True
            elif self.typing:
                self._type(key)
            elif key == "/":
                self.typing = True
            elif key == _ESCAPE:
                self.filter = ""

    def _type(self, key: str) -> None:
        if key == _ESCAPE:
            self.filter = ""
        elif key in _ERASE:
            self.filter = self.filter[:-1]
        elif key.isprintable() and len(self.filter) < 60:
            self.filter += key
        self.typing = key != _ESCAPE and key not in _ENTER

    def listed(self, jobs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The jobs to show: those that have a place, then those that wait for one."""
        text = self.filter.casefold()
        found = [job for job in jobs if text in "\n".join(_texts(job)).casefold()]
        waiting = [job for job in found if job["status"] == "waiting"]
        return sorted((job for job in found if job["status"] != "waiting"), key=_order) + waiting

    def keys(self) -> str:
        """The last line of the screen."""
        if self.typing:
            return f"filter: {self.filter}_  enter: keep it  esc: all jobs"
        shown = f" ({self.filter})" if self.filter else ""
        return f"q: quit  /: filter{shown}  esc: all jobs"


def _order(job: Mapping[str, Any]) -> tuple[int, str, str]:
    """By group, then by name."""
    group = job.get("group") or ""
    return len(group), group, job["name"]


def _texts(job: Mapping[str, Any]) -> list[str]:
    return [str(job.get(key) or "") for key in ("name", "owner", "group", "phase", "status")]
