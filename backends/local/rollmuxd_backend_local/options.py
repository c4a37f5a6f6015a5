"""Options of a host that is asked by its own Python: ``[hosts.options]``, with ``[backends.NAME]`` as defaults."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field


class HostOptions(Struct, frozen=True, kw_only=True):
    """What can be said of a host, however it is reached."""

    #: ``on_loss = "kill"`` really ends the process of a lost session (SIGKILL, with its descendants). It has to run
    #: under the login that ``users`` has for the job's owner; if ``users`` is empty, under the login with the owner's
    #: name
    owns_sessions: bool = False
    #: jobs' processes may be started here, as that user: a user that may register such a job may run anything
    starts_processes: bool = False
    #: folder for what these write, on the host; empty: it is thrown away
    logs: str = "~/.local/state/rollmux/logs"
    #: whose processes may be started here as which user: of an owner, a login; all as that user where it is empty
    users: dict[str, str] = field(default_factory=dict)
    #: GPUs that are made up in this file of the host, instead of its own: for tests and for the demo
    #: (see :mod:`rollmuxd_backend_local.onhost.made_up`)
    made_up_gpus: str = ""


Options = TypeVar("Options", bound=HostOptions)
AnyOptions = TypeVar("AnyOptions", bound=Struct)


def read(kind: type[AnyOptions], backend: str, where: str, given: Mapping[str, Any]) -> AnyOptions:
    """The options of one host; ``where`` names it in errors.

    Raises:
        ValueError: an unknown key, a value of another type or out of range.
    """
    known = kind.__struct_fields__
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"{where}: options.{key} is not an option of backend {backend}; {hint}")
    for key, value in given.items():
        try:
            msgspec.convert({key: value}, kind)
        except msgspec.ValidationError as error:
            needed = str(error).split(" - at ")[0]
            raise ValueError(f"{where}: options.{key} is {value!r}: {needed[0].lower()}{needed[1:]}") from None
    return msgspec.convert(dict(given), kind)
