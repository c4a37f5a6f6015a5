"""What the keys of ``rollmuxd top`` do. Pure: a key changes what is shown, or names a call to make."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

#: arrow and other special keys send several characters; several keys may come in one read
_KEYS: Final = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_DOWN: Final = frozenset(("\x1b[B", "\x1bOB", "j"))
_UP: Final = frozenset(("\x1b[A", "\x1bOA", "k"))
_ENTER: Final = frozenset("\r\n")
_ESCAPE: Final = "\x1b"
_ERASE: Final = frozenset("\x7f\x08")
_QUIT: Final = frozenset("qQ\x03\x04")


class Action(NamedTuple):
    """A call about one job: ``explain``, ``pause``, ``resume`` or ``end``."""

    verb: str
    job: str
    name: str


@dataclass
class Screen:
    """What the keys have set."""

    #: only jobs with this text in their name, owner, group, phase or status
    filter: str = ""
    typing: bool = False
    #: the id of the job that ``e``, ``p`` and ``x`` act on
    chosen: str | None = None
    #: an action that waits for a ``y``
    asked: Action | None = None
    #: how the last action ended
    said: str = ""
    #: what the daemon explains, in place of the tables
    page: Sequence[str] | None = None
    over: bool = False

    def press(self, keys: str, jobs: Sequence[dict[str, Any]]) -> list[Action]:
        """Take keys, and return the calls to make. ``jobs``: those of the last look, all of them."""
        return [action for key in _KEYS.findall(keys) if (action := self._press(key, jobs)) is not None]

    def _press(self, key: str, jobs: Sequence[dict[str, Any]]) -> Action | None:
        if key in ("\x03", "\x04"):
            self.over = True
        elif self.page is not None:
            self.page = None
        elif self.asked is not None:
            action, self.asked = self.asked, None
            return action if key in "yY" else None
        elif self.typing:
            self._type(key)
        elif key in _QUIT:
            self.over = True
        else:
            self.said = ""
            return self._command(key, self.listed(jobs))
        return None

    def _type(self, key: str) -> None:
        if key == _ESCAPE:
            self.filter = ""
        elif key in _ERASE:
            self.filter = self.filter[:-1]
        elif key.isprintable() and len(self.filter) < 60:
            self.filter += key
        self.typing = key != _ESCAPE and key not in _ENTER

    def _command(self, key: str, listed: Sequence[dict[str, Any]]) -> Action | None:
        if key == "/":
            self.typing = True
        elif key == _ESCAPE:
            self.filter, self.chosen = "", None
        elif key in _DOWN | _UP and listed:
            ids = [job["job"] for job in listed]
            step = 1 if key in _DOWN else -1
            at = ids.index(self.chosen) + step if self.chosen in ids else 0
            self.chosen = ids[min(max(0, at), len(ids) - 1)]
        elif key in "epx":
            job = next((job for job in listed if job["job"] == self.chosen), None)
            if job is None:
                self.said = "choose a job with the arrow keys first"
                return None
            verb = {"e": "explain", "x": "end", "p": "resume" if job["status"] == "paused" else "pause"}[key]
            action = Action(verb, job["job"], job["name"])
            if verb == "explain":
                return action
            self.asked = action
        return None

    def listed(self, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The jobs to show, in the order of the arrow keys: those that have a place, then those that wait for one."""
        text = self.filter.casefold()
        found = [job for job in jobs if text in "\n".join(_texts(job)).casefold()]
        waiting = [job for job in found if job["status"] == "waiting"]
        return sorted((job for job in found if job["status"] != "waiting"), key=_order) + waiting

    def keys(self) -> str:
        """The last line of the screen."""
        if self.page is not None:
            return "any key: back"
        if self.asked is not None:
            return f"{self.asked.verb} {self.asked.name}?  y: yes  any other key: no"
        if self.typing:
            return f"filter: {self.filter}_  enter: keep it  esc: all jobs"
        if self.said:
            return self.said
        shown = f" ({self.filter})" if self.filter else ""
        return f"q: quit  /: filter{shown}  ↑↓: choose  e: explain  p: pause, resume  x: end"


def _order(job: dict[str, Any]) -> tuple[int, str, str]:
    """By group, then by name."""
    group = job.get("group") or ""
    return len(group), group, job["name"]


def _texts(job: dict[str, Any]) -> list[str]:
    return [str(job.get(key) or "") for key in ("name", "owner", "group", "phase", "status")]
