"""How plugins are asked: for so long and no longer, and what they answer is looked at before it is believed.

What may be relied on: a question ends in its time and in one of the ways that :func:`ask` names, whatever a plugin
does. Its answer is of the contract's types and can be journalled. A fact with something else in it could be written,
and the daemon could never read its journal again.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import anyio
import msgspec
import structlog

from rollmuxd.spi import ContactLost, NotDone

T = TypeVar("T")

#: a cancelled call has so long to stop; then the daemon waits no longer
STOPS_S: Final = 5.0
#: of what a plugin says about an error
TEXT_KEPT: Final = 4_000
CANCELLED: Final = "the plugin's own call was cancelled, and not by the daemon"

log = structlog.get_logger("rollmuxd.plugins")

#: so many calls for one purpose may be cancelled and not stop: no further ones are made until one of them has ended
STUCK_AT_MOST: Final = 8
REMEDY: Final = "if they never end, restart the daemon: jobs continue"
#: calls that were cancelled and have not stopped yet, and the purpose of those that do not stop. A task without a
#: reference would be collected before its end
_stuck: dict[asyncio.Task[Any], str] = {}


class NoAnswer(ContactLost):
    """The time was up."""


async def ask(limit_s: float, call: Coroutine[Any, Any, T], *, of_s: float | None = None, purpose: str = "") -> T:
    """What a plugin answers. ``of_s``: the limit to tell of, where ``limit_s`` is what is left of it.

    ``purpose``: what is asked again and again has a name; what does not stop must not become ever more.

    In a task of its own, for two reasons. A plugin may be cancelled from within (it waited for a connection that
    another task was making, for example). That would else end the caller, without an error. And a plugin that cannot be
    stopped (a bare ``except`` in a loop) would keep the caller for ever.

    Raises:
        NoAnswer: none came in time, and the call was stopped, or left to itself where it does not stop. Or the plugin
            was not asked, as too many calls for this purpose do not stop.
        ContactLost: the plugin's call was cancelled from within, or wanted to end the process.
        Exception: whatever else the plugin raises.
    """
    if purpose and list(_stuck.values()).count(purpose) >= STUCK_AT_MOST:
        call.close()
        raise NoAnswer(f"not asked: {STUCK_AT_MOST} calls before it do not let themselves be stopped; {REMEDY}")
    task = asyncio.get_running_loop().create_task(_kept_in(call), name=getattr(call, "__qualname__", ""))
    task.add_done_callback(_heard)
    try:
        await asyncio.sleep(0)  # what a plugin answers at once needs no timer
        if not task.done():
            await asyncio.wait({task}, timeout=limit_s)
    finally:
        in_time = task.done()
        if not in_time:
            await _stop(task, purpose)
    if not task.done():
        raise NoAnswer(f"no answer within {of_s or limit_s:g} s, and it does not let itself be stopped")
    if task.cancelled() and in_time:
        raise ContactLost(CANCELLED)  # by itself
    if task.cancelled():
        raise NoAnswer(f"no answer within {of_s or limit_s:g} s")
    return task.result()


async def _kept_in(call: Coroutine[Any, Any, T]) -> T:
    """The call, whose cancelling of itself and whose exits are errors like others."""
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # we have asked for it, or the call itself has
        raise ContactLost(CANCELLED) from error
    except SystemExit as error:
        raise ContactLost(f"the plugin wanted to end the process (SystemExit: {error})") from error


async def _stop(task: "asyncio.Task[Any]", purpose: str) -> None:
    """Cancel it, and wait until it has stopped, but not for ever."""
    # Before the wait, in which the caller may be cancelled (the shield holds against scopes alone).
    _stuck[task] = ""
    task.add_done_callback(_stuck.pop)
    task.cancel()
    with anyio.CancelScope(shield=True):
        await asyncio.wait({task}, timeout=STOPS_S)
    if not task.done():
        _stuck[task] = purpose
        reason = f"cancelled {STOPS_S:g} s ago"
        log.warning("does_not_stop", call=task.get_name(), purpose=purpose, reason=reason, remedy=REMEDY)


def _heard(task: "asyncio.Task[Any]") -> None:
    """Its error is not for the loop to report, also where the asker is gone by now."""
    if not task.cancelled():
        task.exception()


def checked(answer: object, kind: type[T], of: str) -> T:
    """An answer as the contract has it, every part of it. Raises ContactLost for another."""
    try:
        return msgspec.json.decode(msgspec.json.encode(answer), type=kind)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ContactLost(f"{of} cannot be used: {said(error)}") from error


def said(error: BaseException) -> str:
    """An error in words: its own, where it has some and is meant to be read."""
    try:
        words = text(str(error))
    except Exception:
        words = ""  # it cannot even say it
    if isinstance(error, NotDone | ContactLost) and words:
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def text(words: str) -> str:
    """Words that can be written down (file names may hold bytes that are no text), and are no book."""
    kept = words if len(words) <= TEXT_KEPT else f"{words[:TEXT_KEPT]} [...]"
    return kept.encode(errors="backslashreplace").decode()
