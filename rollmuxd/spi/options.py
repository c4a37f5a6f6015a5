"""Reading options: of ``[residency.NAME]``, of a backend's tables, and of a job's states. A typo is reported with
what was meant, and what can be filled in (``http://127.0.0.1:80{gpu}``) with what there is.
"""

import difflib
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from rollmuxd.core.spec import StateSpec
from rollmuxd.spi.residency import StateOrder

T = TypeVar("T")

#: the longest time that an option may ask for
DAY_S = 86_400

#: what may stand in braces in an option that is filled in for each order
FIELDS = ("job", "name", "owner", "run", "pool", "node", "host", "gpu", "gpus", "pid", "kind", "order", "warm")


class Options:
    """A table of options. Each getter raises ValueError naming the table, the key and what it has to be."""

    def __init__(self, where: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
        self._where = where
        self._given = given
        names = tuple(known)
        for key in given:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names) or 'none'}"
                raise ValueError(f"{key} is not an option of {where}; {hint}")

    def __contains__(self, key: str) -> bool:
        return key in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def text(self, key: str, default: str) -> str:
        """A string."""
        return self._typed(key, default, str, "a string")

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self._typed(key, default, bool, "true or false")

    def seconds(self, key: str, default: float) -> float:
        """A number of seconds, from 0 to a day."""
        value = self._given.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= DAY_S:
            raise self._wrong(key, "seconds, 0 or more, and at most 86400")
        return float(value)

    def one_of(self, key: str, default: T, choices: Iterable[T]) -> T:
        """One of some values."""
        value = self._given.get(key, default)
        among = tuple(choices)
        if not any(value == choice and type(value) is type(choice) for choice in among):
            raise self._wrong(key, f"one of {', '.join(map(repr, among))}")
        return value  # type: ignore[no-any-return]

    def texts(self, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """A list of strings; a single string is a list of one."""
        value = self._given.get(key, default)
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings")
        return tuple(value)

    def argv(self, key: str) -> tuple[str, ...]:
        """An argument vector, program first; empty where it is not given."""
        value = self._given.get(key, ())
        if isinstance(value, str) or (key in self._given and not value):
            raise self._wrong(key, 'a list, program first: ["/opt/engine/stop", "--now"] (no shell reads it)')
        argv = self.texts(key)
        for text in argv:
            check_fields(f"{key} of {self._where}", text)
        return argv

    def table(self, key: str) -> Mapping[str, Any]:
        """A table."""
        return self._typed(key, {}, dict, "a table")

    def _typed(self, key: str, default: T, kind: type[T], what: str) -> T:
        value = self._given.get(key, default)
        if not isinstance(value, kind):
            raise self._wrong(key, what)
        return value

    def _wrong(self, key: str, what: str) -> ValueError:
        return ValueError(f"{key} of {self._where} is {self._given.get(key)!r}; it must be {what}")


def of_state(state: StateSpec, known: Iterable[str]) -> Options:
    """What a job gives its driver to know of a state."""
    return Options(f"driver {state.driver}", dict(state.options), known)


def check_fields(where: str, text: str) -> None:
    """Raise ValueError for braces that :func:`filled` could not fill."""
    try:
        for _, field, spec, conversion in string.Formatter().parse(text):
            if field is not None and (field not in FIELDS or spec or conversion):
                raise ValueError(f"{{{field}}} is none of {', '.join(FIELDS)}")
    except ValueError as error:
        raise ValueError(f"{where}: {text!r}: {error} (a brace itself is written twice)") from error


def filled(text: str, order: StateOrder) -> str:
    """The text with what stands in braces filled in for an order; ``{gpu}`` is the number of the first of its GPUs."""
    return text.format_map(dict(_fields(order)))


def _fields(order: StateOrder) -> Iterator[tuple[str, str]]:
    numbers = [gpu.rpartition("/gpu")[2] for gpu in order.gpus]
    yield "gpu", numbers[0] if numbers else ""
    yield "gpus", ",".join(numbers)
    yield "kind", order.kind.value
    yield "warm", str(int(order.warm))
    for name in ("job", "name", "owner", "run", "pool", "node", "host", "pid", "order"):
        yield name, str(getattr(order, name))
