"""Logs: structlog to stderr, for people or as one JSON object a line. Facts are the most of it.

Every line about a job or a slot has its ``job`` and ``slot``. No secret is logged. An idempotency key opens sessions,
so it is left out. A job's specification is named, not printed, and tracebacks show no variables.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, Processor

from rollmuxd.core import facts as f
from rollmuxd.core.facts import Fact
from rollmuxd.daemon.entries import Entry

log = structlog.get_logger("rollmuxd.facts")

#: parts of facts that are no business of a log
LEFT_OUT: Final = frozenset({"at", "idempotency_key", "spec", "schedule"})
#: what an operator may have to look after
WARNINGS: Final[tuple[type[Fact], ...]] = (
    f.GpusNotClean,
    f.JobLost,
    f.JobQuarantined,
    f.LoopStalled,
    f.NodeLost,
    f.NodeQuarantined,
    f.OrderContactLost,
    f.OrderFaulted,
    f.SessionLost,
    f.SlotOverran,
    f.SlotTakenAway,
)


def set_up(level: str = "info", format: Literal["console", "json"] = "console", stream: TextIO | None = None) -> None:
    """Write logs to stderr (or ``stream``), those of the standard library too: uvicorn, plugins."""
    out = Unfailing(stream if stream is not None else sys.stderr)
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Not as rich would have it: that shows variables, and where a call breaks the caller's API key is in one.
    last: list[Processor] = [structlog.processors.format_exc_info, _as_json if format == "json" else _as_text]
    # Our own lines go straight to the stream: the way round by the standard library costs four times as much.
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", out)),
        cache_logger_on_first_use=False,
    )
    foreign = logging.StreamHandler(cast("TextIO", out))
    foreign.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [foreign]
    root.setLevel(number)
    # Of every connection and request there would be a line; requests are the HTTP layer's to log.
    for name in ("httpx", "httpcore", "asyncio", "asyncssh"):
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    # It warns of every call that it cannot parse: a client that sends rubbish would fill the disk.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(max(number, logging.ERROR))
    # What they log has a traceback of a page, and a client may know how to cause it.
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).filters[:] = [Seldom()]


class Seldom(logging.Filter):
    """Lets ``at_most`` lines a minute through, or other records; the next one says how many were left out."""

    AT_MOST: Final = 20
    EVERY_S: Final = 60.0

    def __init__(self, now: Callable[[], float] = time.monotonic, at_most: int = AT_MOST) -> None:
        super().__init__()
        self._now, self._at_most = now, at_most
        self._since = now()
        self._number = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        left_out = self.take()
        if left_out:
            record.msg = f"{record.msg} ({left_out} lines before it were left out)"
        return left_out is not None

    def take(self) -> int | None:
        """How many lines before this one were left out, if that is to be said; None: this one is, too."""
        now, left_out = self._now(), 0
        if now - self._since >= self.EVERY_S:
            left_out = max(0, self._number - self._at_most)
            self._since, self._number = now, 0
        self._number += 1
        return left_out if self._number <= self._at_most else None


class Unfailing:
    """A stream that loses lines rather than fail.

    The disk that the log lies on may be full, or the log's reader gone. That must not keep the daemon from anything.
    Above all not when it has to log that the journal, on the same disk, cannot be written.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, if that is possible."""
        with suppress(OSError, ValueError):  # ValueError: it was closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Have what was written leave the process, if that is possible."""
        with suppress(OSError, ValueError):
            self._stream.flush()


def write_facts(facts: Sequence[Entry]) -> None:
    """A sink that writes a line for each fact. Lines of a replay are not written: they were."""
    to = log.bind()
    for entry in facts:
        fact = entry.fact
        beyond = isinstance(fact, f.ResidualMemoryObserved) and fact.mb > fact.agreed_mb
        tell = to.warning if beyond or isinstance(fact, WARNINGS) else to.info
        tell(f.name(fact), seq=entry.seq, **_said(entry))


def _said(entry: Entry) -> dict[str, Any]:
    """What a fact says, with the job and slot that it is about."""
    fact = entry.fact
    said = {name: _plain(value) for name in fact.__struct_fields__ if (value := getattr(fact, name)) not in _EMPTY}
    for name in LEFT_OUT:
        said.pop(name, None)
    if isinstance(fact, f.JobRegistered):
        said["name"] = fact.spec.name
    if entry.slot is not None:
        said.setdefault("slot", entry.slot.id)
    if entry.job is not None:
        said.setdefault("job", entry.job.id)
    return said


_EMPTY: Final[tuple[Any, ...]] = ("", None, (), {}, [])


def _plain(value: Any) -> Any:
    """A value as a log line has it: structs by their JSON, ids and numbers as they are."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return msgspec.to_builtins(value)


def _as_text(logger: Any, method: str, event: EventDict) -> str:
    """A line for people; each hand-over of GPUs is ten of them. structlog's own costs twice as much."""
    at, level, name = event.pop("timestamp"), event.pop("level"), event.pop("event")
    exception = event.pop("exception", "")
    said = " ".join([f"{key}={_shown(event[key])}" for key in sorted(event)])
    named = str(name).replace("\n", "\\n")
    line = f"{at} [{level:<9}] {named:<20} {said}".rstrip(" ")
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], f"{line}\n{exception}" if exception else line)


# What a client sends must not reach the terminal of the log's reader: values are quoted, and no other text has these.
_QUOTED: Final = re.compile("[\\x00-\\x20\\x7f-\\x9f=\"']")
_OBEYED: Final = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f]")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and not _QUOTED.search(value) else repr(value)


def _as_json(logger: Any, method: str, event: EventDict) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()
