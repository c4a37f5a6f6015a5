"""Where samples come from: any OpenAI-compatible URL, a rollout gateway among them."""

from types import TracebackType
from typing import Any, Final, Protocol, Self

import httpx
from msgspec import Struct

#: no key or a wrong one, not allowed, no such path or model, another kind of server
_REFUSES: Final = (401, 403, 404, 405)


class Response(Struct, frozen=True):
    """One sample."""

    text: str
    tokens: int
    #: the version of the weights that made it, where the engine says so
    weights: str = ""
    #: why it ended: ``stop``, ``length``
    finish: str = ""
    #: the engine's whole answer
    raw: Any = None


class Unavailable(Exception):
    """Nothing could make this sample now, for no fault of its prompt. ``after_s``: seconds to wait, as the server said.

    It is made again, and does not count towards ``max_failures``.
    """

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class Refused(Exception):
    """The server makes a sample of no prompt at all, since URL, key or model are wrong. The round ends with it."""


class Generate(Protocol):
    """Makes one sample. Cancelled, it stops generating. May raise: the sample is then made again."""

    async def __call__(self, prompt: Any, sample: int) -> Response:
        """``sample`` counts the samples of a prompt, also those that are made again."""
        ...


class OpenAI:
    """``POST /v1/completions``, one call for each sample. A call that is cancelled closes its connection.

    ``params`` go along with each call (``model``, ``max_tokens``, ``temperature``, ...). ``limit_s`` bounds one call.
    Raises ValueError for a URL that is none.
    """

    def __init__(self, url: str, *, api_key: str = "", limit_s: float = 3600.0, **params: Any) -> None:
        scheme, _, host = url.partition("://")
        if scheme not in ("http", "https") or not host:
            raise ValueError(f"{url!r} is no address of a server; write http://HOST:PORT")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._client = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, limits=limits, timeout=limit_s)
        self._params = params

    async def __call__(self, prompt: Any, sample: int) -> Response:
        """One completion.

        Raises Unavailable for 503, where nothing listens and where a connection breaks, and Refused where the server
        takes no call like this. Raises httpx.HTTPError (no answer within ``limit_s`` is one), and ValueError for an
        answer that is none, or was aborted.
        """
        try:
            answer = await self._client.post("/v1/completions", json={"prompt": prompt, **self._params})
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unavailable(f"{self._client.base_url} does not answer: {error}") from error
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise Unavailable(f"the connection to {self._client.base_url} broke off: {error!r}") from error
        if answer.status_code == 503:
            after = answer.headers.get("retry-after", "")
            raise Unavailable(f"{answer.url} answered 503", float(after) if after.isdecimal() else 0.0)
        if answer.status_code in _REFUSES:
            raise Refused(
                f"{answer.url} answered {answer.status_code}: {answer.text[:500]}; look at the URL, api_key and model "
                "that OpenAI() was given"
            )
        answer.raise_for_status()
        body = answer.json()
        try:
            choice, usage = body["choices"][0], body.get("usage") or {}
            text, finish = choice["text"], choice.get("finish_reason") or ""
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{answer.url} did not answer as /v1/completions does") from error
        if finish == "abort":
            raise ValueError(f"{answer.url} has aborted this sample")
        weights = str((body.get("rollmux") or {}).get("weights", ""))
        return Response(text, int(usage.get("completion_tokens", 0)), weights, finish, body)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._client.aclose()
