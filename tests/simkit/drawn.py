"""A machine whose steps are drawn: which of its rules comes next, and with which arguments.

Each sequence leaves some rules out, so that the others come more often: what needs many of one kind is found sooner.
A sequence that fails says its steps, as code. Hypothesis draws steps too, and takes twice as long for it as the core.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from random import Random
from typing import Any, TypeAlias

#: a rule's argument, drawn
Draw: TypeAlias = Callable[[Random], Any]


def one_of(*values: Any) -> Draw:
    """One of these; what is named twice comes twice as often."""
    return lambda rng: rng.choice(values)


def within(least: int, most: int) -> Draw:
    """One from the least to the most."""
    return lambda rng: rng.randint(least, most)


def some_of(values: Sequence[Any], least: int, most: int) -> Draw:
    """So many of them, each as often as it happens."""
    return lambda rng: rng.choices(values, k=rng.randint(least, most))


def shuffled(values: Sequence[Any]) -> Draw:
    """All of them, in some order."""
    return lambda rng: rng.sample(values, len(values))


FLAG = one_of(False, True)


class Failed(AssertionError):
    """A sentence was not true; ``steps`` led there."""

    def __init__(self, wrong: str, steps: list[str]) -> None:
        super().__init__("\n".join([wrong, *steps]))
        self.wrong, self.steps = wrong, steps


def rule(when: Callable[[Any], bool] = lambda _: True, **drawn: Draw) -> Callable[[Any], Any]:
    """Mark a method as a step that may come at any time, or only where ``when`` holds."""

    def mark(method: Any) -> Any:
        method.when, method.drawn = when, drawn
        return method

    return mark


class Machine:
    """Its methods marked with :func:`rule` are its steps. The one named ``begin`` comes first, and only then."""

    def holds(self) -> None:
        """Raise where a sentence is not true; asked after every step."""

    def end(self) -> None:
        """Raise where a sentence is not true in the end."""

    @classmethod
    def rules(cls) -> dict[str, Any]:
        """Its steps, by name."""
        return {name: method for name in dir(cls) if hasattr(method := getattr(cls, name), "drawn")}

    def take(self, step: str, known: dict[str, Any]) -> None:
        """Take a step that was written down, where it may come."""
        if getattr(self, step.removeprefix("state.").partition("(")[0]).when(self):
            eval(step, known | {"state": self})
            self.holds()

    @classmethod
    def plays(cls, rng: Random, count: int) -> None:
        """Draw so many steps, and take them. Raises :class:`Failed`."""
        rules = cls.rules()
        begin, likely = rules.pop("begin"), rng.uniform(0.3, 1)
        kept = [it for it in rules.values() if rng.random() < likely] or [*rules.values()]
        machine = cls()
        taken: list[str] = []
        try:
            for _ in range(count):
                method = rng.choice([it for it in kept if it.when(machine)]) if taken else begin
                given = {name: draw(rng) for name, draw in method.drawn.items()}
                taken.append(f"state.{method.__name__}({', '.join(f'{it}={_code(given[it])}' for it in given)})")
                method(machine, **given)
                machine.holds()
            machine.end()
        except Exception as no:
            raise Failed(f"{type(no).__name__}: {no}", taken) from no


def _code(value: Any) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)
