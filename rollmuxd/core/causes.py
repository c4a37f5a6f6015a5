"""Why something happened, as data.

A fact keeps a code and its parts: ids, numbers, and what people, drivers and backends wrote. The sentence is made for
one reader, with the names of jobs that this reader may see (``rollmuxd.explain.causes``).
"""

from typing import Any

from msgspec import Struct


class Cause(Struct, frozen=True, omit_defaults=True):
    """Why something happened: a code, its parts, and the cause behind it, if there is one.

    A part ``job`` is the id of a job.
    """

    code: str
    data: dict[str, Any] = {}
    cause: "Cause | None" = None


def said(text: str) -> Cause:
    """What people, drivers, backends and policies wrote, as it is."""
    return Cause("said", {"text": text})
