"""What must be so of a TRL for the hook to be right, read from its source. Standard library only: no TRL is imported.

The hook rests on methods with a leading underscore, which TRL may change in any release. So it looks before training
starts: the version must be one whose trainer was looked at, the methods must have the parameters that they had, and
must call each other as they did. ``tests/drift.py`` holds any released version against the same list.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, Final

#: releases whose trainer was looked at: from the first, to before the last
KNOWN: Final = ((1, 0), (1, 17))

#: method: its parameters (... for: and any others), and which methods of its own it must call
METHODS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "_prepare_inputs": (("self", "generation_batch"), ("_generate_and_score_completions",)),
    "_generate_and_score_completions": (
        ("self", "inputs"),
        ("_generate", "_calculate_rewards", "_get_per_token_logps_and_entropies"),
    ),
    "_generate": (("self", "prompts"), ("_generate_single_turn",)),
    "_calculate_rewards": (("self", "inputs", "prompts", "completions", "completion_ids_list"), ()),
    "_get_per_token_logps_and_entropies": (("self", "model", "..."), ()),
    "compute_loss": (("self", "model", "inputs", "return_outputs", "num_items_in_batch"), ()),
    "prediction_step": (("self", "model", "inputs", "..."), ("_prepare_inputs", "compute_loss")),
    "_save_checkpoint": (("self", "model", "trial"), ()),
}
#: what the trainer's source must speak of: how it is known that weights are about to be sent, and where
MENTIONS: Final = ("self._last_loaded_step", "self.vllm_generation.sync_weights", "self.use_vllm", "self.reward_funcs")
#: what a class between ours and TRL's may override only by calling TRL's
CHAINED: Final = ("_prepare_inputs", "_generate_and_score_completions", "_generate", "compute_loss")

_TAKE_OUT: Final = "or take the hook out again: from trl import GRPOTrainer"


class UnknownTrl(ImportError):
    """The installed TRL, or a trainer class made from it, is none that the hook knows; nothing has begun."""


def differences(version: str, facts: Mapping[str, Any]) -> list[str]:
    """Return in words what is not as it must be; nothing, if the hook is right for this TRL."""
    found = []
    first, last = KNOWN
    if not first <= _release(version) < last:
        found.append(
            f"the hook knows TRL {first[0]}.{first[1]} to {last[0]}.{last[1] - 1}, and this is {version or 'unknown'}"
        )
    methods = facts["methods"]
    for name, (parameters, calls) in METHODS.items():
        if name not in methods:
            found.append(f"GRPOTrainer has no method {name}")
            continue
        has = methods[name]
        if not _fits(has["parameters"], parameters):
            found.append(
                f"GRPOTrainer.{name} is known as ({', '.join(parameters)}), not ({', '.join(has['parameters'])})"
            )
        found += [f"GRPOTrainer.{name} does not call {call}" for call in calls if call not in has["calls"]]
    return found + [f"GRPOTrainer does not speak of {what}" for what in MENTIONS if what not in facts["mentions"]]


def facts_of(source: str) -> dict[str, Any]:
    """Return what :func:`differences` needs to know of ``trl/trainer/grpo_trainer.py``, from its text."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "GRPOTrainer":
            named = {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Attribute)}
            return {
                "methods": {
                    method.name: {
                        "parameters": [argument.arg for argument in method.args.args],
                        "calls": sorted(_own_calls(method)),
                    }
                    for method in node.body
                    if isinstance(method, ast.FunctionDef) and method.name in METHODS
                },
                "mentions": [what for what in MENTIONS if what in named],
            }
    return {"methods": {}, "mentions": []}


def check(version: str, source: str) -> None:
    """Raise :class:`UnknownTrl` if the hook is not right for this TRL."""
    found = differences(version, facts_of(source))
    if found:
        raise UnknownTrl(
            f"rollmuxd_hook_trl cannot tell when this TRL rolls out and trains: {'; '.join(found)}. Install a known "
            f"one, {_TAKE_OUT}"
        )


def check_class(trainer: type, hook: type, trls: type) -> None:
    """Raise :class:`UnknownTrl` for a class on the way from ours to TRL's that hides what the hook looks at."""
    order = trainer.__mro__
    for between in order[: order.index(trls)]:
        if between is hook:
            continue
        for name in CHAINED:
            method = vars(between).get(name)
            if isinstance(method, FunctionType) and name not in inspect.unwrap(method).__code__.co_names:
                raise UnknownTrl(
                    f"{between.__name__}.{name} takes the place of TRL's, which the hook needs to be called: call "
                    f"super().{name}(...) in it, {_TAKE_OUT}"
                )


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(int(part) for part in found.groups()) if found else ()


def _fits(has: list[str], parameters: tuple[str, ...]) -> bool:
    if parameters[-1] == "...":
        return has[: len(parameters) - 1] == list(parameters[:-1])
    return has == list(parameters)


def _own_calls(method: ast.FunctionDef) -> Iterator[str]:
    seen = set()
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "self"
            and (node.func.attr in METHODS or node.func.attr == "_generate_single_turn")
            and node.func.attr not in seen
        ):
            seen.add(node.func.attr)
            yield node.func.attr
