"""The options of a host that is reached by SSH: ``[hosts.options]``, with ``[backends.ssh]`` as defaults."""

from typing import Annotated

from msgspec import Meta

from rollmuxd_backend_local.agent.reached import ReachedOptions


class SshOptions(ReachedOptions, frozen=True, kw_only=True):
    """What can be said of a host. What is not is as ``~/.ssh/config`` has it, and then as ``ssh`` would do it."""

    #: its name, address, or alias in the ssh configuration; not given: the host's id
    address: str = ""
    port: Annotated[int, Meta(ge=1, le=65_535)] | None = None
    #: the login
    user: str = ""
    #: private key files; an agent's keys and the usual files are tried where none is given
    keys: tuple[str, ...] = ()
    #: where its host key must be found
    known_hosts: str = ""
    #: hosts to jump over, as for ``ssh -J``
    jump: str = ""
    #: the ssh configuration that is read; not given: ``~/.ssh/config``
    config: str = ""
    #: a Python of the host, 3.8 or newer
    python: str = "python3"
    #: seconds that a connection may take to be made
    connect_s: Annotated[float, Meta(gt=0, le=600)] = 7.0
    #: seconds between two signs of life that a silent host is asked for; after three without an answer it is away
    alive_s: Annotated[float, Meta(gt=0, le=600)] = 5.0
