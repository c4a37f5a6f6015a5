"""The cross-connects of a Polatis switch: ``/api/data/optical-switch:cross-connects``, a list of ``pair``.

Ports that send light into the switch are 1 to n (``ingress``), those that it leaves by n+1 to 2n (``egress``). Here a
port is a number from 1 to n with both sides, so circuit (a, b) is ingress a and egress n+b.

An order replaces the whole list by one PUT, which the switch does or refuses as one. (A POST goes into the candidate
datastore of some releases, and is gone after seconds.) Circuits of others are read first, and kept. The list has no
room for a stamp: orders of another controller are not refused, and one between our reading and our PUT is undone.
"""

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self

import httpx
import msgspec

from rollmuxd.spi import ContactLost, NotDone
from rollmuxd.spi.fabric import Circuit, FabricOrder, Ports, after
from rollmuxd.spi.options import Options

_PATH: Final = "/api/data/optical-switch:cross-connects"
_KEY: Final = "optical-switch:cross-connects"
_JSON: Final = "application/yang-data+json"
#: of an answer; 10,000 pairs are 400 kB
_MOST: Final = 2_000_000
_DRIVER: Final = "fabric driver polatis"


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    #: ``http://switch:8008``
    url: str
    #: the switch's size: its ports with both sides
    ports: int
    user: str = "admin"
    #: a file with the password, and nothing else
    password_file: str = ""
    protected: tuple[int, ...] = ()
    switch_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.025
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    #: a PEM file, where the switch's certificate is of an authority of your own
    ca_file: str = ""


class _Pair(msgspec.Struct, frozen=True):
    ingress: int
    egress: int


class _Pairs(msgspec.Struct, frozen=True):
    pair: tuple[_Pair, ...] = ()


class _Body(msgspec.Struct, frozen=True):
    connects: _Pairs = msgspec.field(name=_KEY, default=_Pairs())


class PolatisFabric:
    """One switch."""

    def __init__(self, ports: Ports, client: httpx.AsyncClient) -> None:
        self._ports = ports
        self._client = client
        self._stamp = 0

    @classmethod
    async def open(cls, options: Mapping[str, Any]) -> Self:
        """Make one; the options are those of ``_Options``.

        Raises ValueError for an option that cannot be.
        """
        given = _checked(options)
        if not given.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {given.url!r}: it begins with http:// or https://")
        try:
            if not httpx.URL(given.url).host:
                raise ValueError(f"url = {given.url!r}: it has no host; http://switch:8008 has one")
        except httpx.InvalidURL as error:
            raise ValueError(f"url = {given.url!r}: {error}") from None
        if not 2 <= given.ports <= 10_000:
            raise ValueError(f"ports = {given.ports}: a number from 2 to 10,000")
        ports = Ports(given.ports, given.protected, given.switch_s)
        try:
            password = _read(given.password_file) if given.password_file else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"password_file = {given.password_file}: {error}") from None
        try:
            verify = ssl.create_default_context(cafile=given.ca_file) if given.ca_file else True
        except OSError as error:  # ssl.SSLError, of a file without certificates, is one
            raise ValueError(f"ca_file = {given.ca_file}: {error}; a PEM file with certificates is needed") from None
        client = httpx.AsyncClient(
            base_url=given.url.rstrip("/"),
            auth=httpx.BasicAuth(given.user, password),
            headers={"Accept": _JSON},
            timeout=given.timeout_s,
            follow_redirects=False,
            trust_env=False,
            verify=verify,
        )
        return cls(ports, client)

    async def ports(self) -> Ports:
        """As configured: the switch does not say which ports are protected."""
        return self._ports

    async def seen(self) -> frozenset[Circuit]:
        """The circuits that there are, those of others too.

        Raises ContactLost where the switch has more ports than configured: its egress numbers mean something else then.
        """
        count = self._ports.count
        pairs = await self._pairs()
        for pair in pairs:
            if not 1 <= pair.ingress <= count < pair.egress <= 2 * count:
                raise ContactLost(
                    f"the switch leads {pair.ingress} to {pair.egress}, which a switch of {count} ports cannot: set "
                    f"ports to its size"
                )
        return frozenset((pair.ingress, pair.egress - count) for pair in pairs)

    async def set(self, order: FabricOrder) -> None:
        """Do the order, by one PUT of the whole list."""
        if order.stamp <= self._stamp:
            raise NotDone(f"order {order.stamp} is not newer than order {self._stamp}")
        self._stamp = order.stamp
        seen = await self.seen()
        if self._stamp != order.stamp:  # a newer one came while this one read
            raise NotDone(f"order {order.stamp} is not newer than order {self._stamp}")
        then = after(order, seen, self._ports)
        body = _Body(_Pairs(tuple(_Pair(a, b + self._ports.count) for a, b in sorted(then))))
        answer = await self._call("PUT", msgspec.json.encode(body))
        if not answer.is_success:
            raise NotDone(f"the switch refused the circuits: {answer.status_code} {_words(answer)}")

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def _pairs(self) -> tuple[_Pair, ...]:
        answer = await self._call("GET")
        if answer.status_code in (204, 404):  # a list without entries is not there
            return ()
        if not answer.is_success:
            raise ContactLost(f"the switch does not say its circuits: {answer.status_code} {_words(answer)}")
        try:
            return msgspec.json.decode(answer.content, type=_Body).connects.pair
        except msgspec.MsgspecError as error:
            raise ContactLost(f"what the switch says of its circuits cannot be read: {error}") from None

    async def _call(self, method: str, content: bytes | None = None) -> httpx.Response:
        """One request; the answer's body is bounded."""
        try:
            headers = {"Content-Type": _JSON} if content is not None else {}
            async with self._client.stream(method, _PATH, content=content, headers=headers) as answer:
                read = bytearray()
                async for part in answer.aiter_bytes():
                    read += part
                    if len(read) > _MOST:
                        raise ContactLost(f"the switch's answer is longer than {_MOST:,} bytes")
        except httpx.ConnectError as error:  # nothing was sent
            raise ContactLost(f"the switch cannot be reached: {error}") from None
        except httpx.HTTPError as error:
            raise ContactLost(f"the switch does not answer: {str(error) or type(error).__name__}") from None
        if answer.status_code >= 500:
            raise ContactLost(f"the switch failed: {answer.status_code}")
        return httpx.Response(answer.status_code, content=bytes(read))


def _read(file: str) -> str:
    return Path(file).read_text(encoding="utf-8").strip()


def _checked(options: Mapping[str, Any]) -> _Options:
    """The options as they are given. Raises ValueError for one that is missing, unknown or cannot be, by its name."""
    Options(_DRIVER, options, _Options.__struct_fields__)
    for key, like in (("url", '"http://switch:8008"'), ("ports", "16")):
        if key not in options:
            raise ValueError(f"{key} of {_DRIVER} is missing: give it in options, such as {key} = {like}")
    try:
        return msgspec.convert(dict(options), _Options)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        key = re.split(r"[.\[`]", path)[0]
        raise ValueError(f"{key} of {_DRIVER} is {options.get(key)!r}: {what[0].lower()}{what[1:]}") from None


def _words(answer: httpx.Response) -> str:
    return answer.content[:300].decode(errors="replace")
