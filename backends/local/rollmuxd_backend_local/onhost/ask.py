"""What a host can be asked: a table of questions, each answered from what is on the machine now.

An answer is ``{"said": ...}``; ``{"refused": why}``: for certain not done; or ``{"unknown": why}``: it is not known.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from . import gpus, machine


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer a question (``ask`` names it). Never raises."""
    try:
        return {"said": _ASKS[question["ask"]](question)}
    except machine.Refused as error:
        return {"refused": str(error)}
    except (machine.Unknown, OSError) as error:
        return {"unknown": str(error)}
    except Exception as error:
        return {"unknown": f"{type(error).__name__}: {error}"}


def look(question: dict[str, Any]) -> dict[str, Any]:
    """GPUs, RAM and boot; NVML is started for it, unless ``nvml`` is in the question: then it was."""
    nvml = question.get("nvml")
    if nvml is None:
        nvml = gpus.nvml(question.get("made_up", ""))
    return {**gpus.look(nvml), "boot_id": machine.boot_id(), "ram_mb": machine.ram()["total_mb"]}


def _about(question: dict[str, Any]) -> dict[str, Any]:
    """Everything for an operator; what is wrong with the GPUs is part of it."""
    about: dict[str, Any] = {"machine": machine.about()}
    try:
        about["gpus"] = look(question)
    except (machine.Unknown, OSError) as error:
        about["no_gpus"] = str(error)
    return about


def _of_processes(*needed: str) -> Callable[[dict[str, Any]], Any]:
    """What the function of the question's name says of the owner and so much of the question."""

    def said(question: dict[str, Any]) -> Any:
        from . import processes  # imported where it is needed: a look has no time to lose

        return getattr(processes, question["ask"])(question["owner"], **{name: question[name] for name in needed})

    return said


def _output(question: dict[str, Any]) -> dict[str, Any]:
    import base64

    after = question["after"]
    path = os.path.expanduser(question["log"])
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)  # the job can put a link there
    except OSError:
        return {"data": "", "next": max(0, after)}
    with open(opened, "rb") as file:
        if after < 0:
            after = max(0, os.fstat(opened).st_size + after)
        file.seek(after)
        data = file.read(question["limit"])
    return {"data": base64.b64encode(data).decode(), "next": after + len(data)}


_ASKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "look": look,
    "about": _about,
    "start": _of_processes("order"),
    "stop": _of_processes("launch"),
    "alive": _of_processes("launch"),
    "kill": _of_processes("pid", "started", "job", "login"),
    "output": _output,
}
