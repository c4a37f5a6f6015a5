"""Sends calls and runs flows, blocking. :class:`Daemon` is also what the command line talks through."""

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

from msgspec import structs

from rollmuxd.client import discovery, fakes
from rollmuxd.client.calls import GRACE_S, PROMPT_S, QUESTION_S, Call
from rollmuxd.client.discovery import Address
from rollmuxd.client.errors import RollmuxError
from rollmuxd.client.retry import Flow, Pause

if TYPE_CHECKING:
    from httpx import Client

T = TypeVar("T")


class Daemon:
    """A daemon, over TCP or its Unix socket. Opens its connection at the first call; not for several threads at once.

    Raises :class:`~rollmuxd.client.errors.NoDaemon` where there is none.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, address: Address | None = None) -> None:
        self.address = address or discovery.need(url, api_key)
        #: the journal that each call names; see :class:`~rollmuxd.client.calls.Call`
        self.journal = ""
        self._client: Client | None = None
        self._leads_to: Address | None = None

    def call(self, call: Call[T]) -> T:
        """Send once, without retries. Raises :class:`Unreachable`, :class:`Refused` and :class:`BadAnswer`."""
        from rollmuxd.client import transport

        if self._client is None or self._leads_to is not self.address:
            self.close()
            self._client, self._leads_to = transport.client(self.address), self.address
        if self.journal:
            call = structs.replace(call, journal=self.journal)
        try:
            response = self._client.request(**transport.request(call))
        except Exception as error:
            if transport.is_untrusted(error):
                with suppress(RollmuxError):
                    self._client = transport.client(self.address)
            raise transport.translated(error, self.address) from error
        return transport.understood(call, response)

    def get(self, path: str, *, timeout_s: float = PROMPT_S, **params: Any) -> Any:
        """Return the decoded JSON of a path, such as ``/v1/jobs``; ``wait_s`` and ``wait_ms`` lengthen the time-out."""
        waits_s = float(params.get("wait_s") or 0) + float(params.get("wait_ms") or 0) / 1000
        timeout_s = waits_s + GRACE_S if waits_s else timeout_s
        return self.call(Call("GET", path, Any, params=params, timeout_s=timeout_s))

    def post(self, path: str, body: Any = None, *, timeout_s: float = QUESTION_S) -> Any:
        """Post a body (a wire struct, or plain data); returns the decoded JSON."""
        return self.call(Call("POST", path, Any, body, timeout_s=timeout_s, repeat=False))

    def delete(self, path: str, body: Any = None) -> Any:
        """Delete; returns the decoded JSON."""
        return self.call(Call("DELETE", path, Any, body, timeout_s=60.0))

    def run(self, flow: Flow[T]) -> T:
        """Run a flow to its end. What interrupts a call or a pause is thrown into it, so that it can clean up."""
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                step = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = error = None
            try:
                if isinstance(step, Pause):
                    time.sleep(fakes.scaled(step.seconds))
                else:
                    answer = self.call(step)
            except BaseException as interrupted:
                error = interrupted

    def close(self) -> None:
        """Close the connections. The next call would open them again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
