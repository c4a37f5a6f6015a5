"""What residency drivers of inference engines have in common: engines by URL on the host, one verdict, starts and ends
by commands. :class:`EngineDriver` does that; a driver adds how its engine is talked to.

At a first load, an engine that is not started yet is no error. The job builds it in its ``init`` phase, alone on its
GPUs.

A job says where its engines listen, and the daemon calls there with rights that the job does not have. So a job names a
port of a loopback and nothing else of a call. None of the operator's headers are sent there, and no text is passed on
before an engine has answered. For more, an operator has to name the URLs.

Needs httpx and anyio; not imported by :mod:`rollmuxd.spi`.
"""

import contextlib
import ipaddress
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar, Final, Self

import anyio
import httpx
from msgspec import Struct, structs

from rollmuxd.core.config import DriverTraits
from rollmuxd.core.ids import OrderId
from rollmuxd.core.model import OrderKind
from rollmuxd.core.spec import StateSpec, engines_on
from rollmuxd.spi import http
from rollmuxd.spi.backend import runs_commands
from rollmuxd.spi.errors import ContactLost, NotDone, PluginError
from rollmuxd.spi.http import NotThere
from rollmuxd.spi.options import FIELDS, Options, check_fields, filled, of_state
from rollmuxd.spi.residency import Channel, Probed, StateOrder

#: a question to an engine, which it answers without moving anything
ASK_S: Final = 15.0
#: how much of an engine's error is passed on
_ERROR_TOLD: Final = 600
#: orders of which is remembered that they were told
_TOLD_KEPT: Final = 10_000
_PAUSE_S: Final = (0.05, 1.0)
#: what a URL may be, filled in or not: nothing after the path, where a driver's own follows; numbers in the port
_URL: Final = re.compile(
    r"https?://(?P<host>(?:[A-Za-z0-9._-]|\{host\})+|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<port>(?:[0-9]|\{(?:gpu|run|pid)\})+))?"
    r"(?P<path>(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*)/?"
)


class Engine(Struct):
    """One engine of an order, and how it is talked to."""

    url: str
    order: StateOrder
    headers: Mapping[str, str]
    #: it is known to be an engine: an operator has named its URL, or its answer showed it (a driver sets it then). Text
    #: from anything else is not passed on, since the job that named the port could read it
    vouched: bool = False

    def __str__(self) -> str:
        return f"{self.url} on {self.order.host}"

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        limit_s: float | None = None,
        missing: str = "",
    ) -> httpx.Response:
        """Send one request and take in its answer, whole. ``limit_s`` None: for as long as the order may take.

        Raises NotThere. Raises NotDone for an answer that is no success (``missing`` says what a 404 means). Raises
        ContactLost for a line that broke: then the outcome is not known.
        """
        more = {"params": params, "json": json, "headers": self.headers, "limit_s": limit_s}
        try:
            url = self.url.rstrip("/") + path
            answer = await http.request(self.order.backend, self.order.host, method, url, **more)
        except NotThere as error:
            raise NotThere(f"nothing listens at {self}: {error}") from error
        except TimeoutError as error:
            raise ContactLost(f"{method} {path} of {self}: no answer within {limit_s or 0:g} s") from error
        except http.BrokeOff as error:
            why = str(error) if self.vouched else "what listens there does not answer as HTTP has it"
            raise ContactLost(f"{method} {path} of {self} broke off: {why}") from error
        if answer.status_code == httpx.codes.NOT_FOUND and missing:
            raise NotDone(f"{self} knows no {method} {path}: {missing}")
        if not answer.is_success:
            said = "its answer is shown for engines only, and none has answered there yet"
            if self.vouched:
                said = " ".join(answer.text.split())[:_ERROR_TOLD]
            raise NotDone(f"{method} {path} of {self} was answered {answer.status_code}: {said}")
        return answer

    async def answers(self, path: str) -> bool:
        """Whether the engine is there and says that it is well."""
        try:
            await self.call("GET", path, limit_s=ASK_S)
        except PluginError:
            return False
        return True


def from_json(answer: httpx.Response) -> Any:
    """What an answer says; None where it is no JSON."""
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return None


class EngineDriver:
    """Base of drivers that talk to engines over HTTP. ``name``, ``traits``, ``own_options`` and the verbs are the
    driver's; ``[residency.NAME]`` may say:

    urls            the only ones that jobs may name, each as it has to be written; also beyond the host's loopback.
                    Without it they may name ports of that
    headers         sent along with each call. Takes ``urls``: any process that listens at a URL gets them

    Options of a job's state, besides the driver's own:

    url             where its engines listen, as the host understands it; one, or several that are one verdict. With
                    ``engine_gpus`` in the state, each so many GPUs have an engine, and ``{gpu}`` is its first GPU. A
                    load wakes the engines within the order's GPUs; any other order is for all of them
    start, stop     argument vectors, run on the host. ``start`` starts an engine that is not there (must return; may
                    run twice), ``stop`` ends it at a discard. Only admins may give them
    end_wait_s      how long a discard waits for an engine to be gone (default 10)
    """

    name: ClassVar[str]
    traits: DriverTraits
    #: options of a state that the driver itself reads
    own_options: ClassVar[tuple[str, ...]] = ()
    default_url: ClassVar[str]
    #: answered with 200 once a started engine is ready
    health: ClassVar[str] = "/health"
    #: answered in any way, at once, by an engine that is there, though it is parked
    presence: ClassVar[str] = "/health"
    admin_options = frozenset({"start", "stop"})

    def __init__(self, *, urls: Sequence[str] = (), headers: Mapping[str, str] | None = None) -> None:
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._headers = dict(headers or {})
        #: orders that were told, and whether they were done
        self._told: dict[OrderId, bool] = {}

    @classmethod
    async def open(cls, channel: Channel, options: Mapping[str, Any]) -> Self:
        """Make the driver. Raises ValueError for an option that it does not know."""
        given = Options(f"residency driver {cls.name}", options, ("headers", "urls"))
        headers = given.table("headers")
        if not all(isinstance(value, str) for value in headers.values()):
            raise ValueError(f"headers of residency driver {cls.name} are {headers!r}; each must be a string")
        urls = given.texts("urls")
        if headers and not urls:
            raise ValueError(
                f"residency driver {cls.name} has headers, and no urls that they are for: any process at a "
                f'job\'s URL would get them; say urls = ["{cls.default_url}"], or whatever jobs may name'
            )
        driver = cls(headers=headers, urls=urls)
        for url in urls:
            driver._check_template(url)
        return driver

    async def close(self) -> None:
        """Nothing is kept open."""

    # ---- what a driver adds -----------------------------------------------------------------------------------------

    async def wake(self, engine: Engine) -> None:
        """Bring an engine that is there onto its GPUs; of one that is awake: done."""
        raise NotImplementedError

    async def sleep(self, engine: Engine) -> None:
        """Bring an engine off its GPUs, as far as it can be."""
        raise NotImplementedError

    async def drop(self, engine: Engine) -> None:
        """Make an engine that will not be woken again free all it can, until it ends. What fails does not matter."""
        raise NotImplementedError

    async def look(self, engine: Engine, kind: OrderKind) -> Probed:
        """What the engine says about an order to load or park it that was begun."""
        raise NotImplementedError

    def check_own(self, options: Options) -> None:
        """Raise ValueError for what the driver's own options cannot be."""

    def more_options(self, state: StateSpec) -> tuple[str, ...]:
        """Options whose names depend on what else the job says."""
        return ()

    def started(self, engine: Engine) -> None:
        """A new engine is there: what was known of its forerunner is not so any more."""

    # ---- the protocol -----------------------------------------------------------------------------------------------

    def check(self, state: StateSpec) -> None:
        """Raise ValueError for a state whose options cannot be."""
        options = self.options(state)
        urls = options.texts("url", (self.default_url,))
        if not urls:
            raise ValueError(f"url of driver {self.name} is empty; say where its engines listen")
        for url in urls:
            self._check_template(url)
            if state.engine_gpus and "{gpu}" not in url:
                raise ValueError(
                    f"url of driver {self.name} is {url!r}, and each {state.engine_gpus} GPUs have an engine of their "
                    "own (engine_gpus): say {gpu} in its port, the number of the engine's first GPU"
                )
        options.argv("start")
        options.argv("stop")
        options.seconds("end_wait_s", 10.0)
        self.check_own(options)

    async def load(self, order: StateOrder) -> None:
        """Wake all engines; start those that are not there, where that is said how."""
        await self._all(order, self._load)

    async def park(self, order: StateOrder) -> None:
        """Bring all engines to sleep."""
        await self._all(order, self.sleep)

    async def discard(self, order: StateOrder) -> None:
        """End all engines, by ``stop`` or by waiting for their end."""
        await self._all(order, self._discard)

    async def probe(self, order: StateOrder) -> Probed:
        """What became of an order that this process told; of others nothing is known."""
        done = self._told.get(order.order)
        if done is None:
            return Probed(known=False)
        if done:
            return Probed(known=True, done=True)
        found = [await self._found(engine, order.kind) for engine in self.engines(order)]
        if any(one.known and not one.done for one in found):
            return Probed(known=True, error="; ".join(one.error for one in found if one.error))
        return Probed(known=all(one.known for one in found), done=all(one.done for one in found))

    def options(self, state: StateSpec) -> Options:
        """What the job says about a state."""
        return of_state(state, ("url", "start", "stop", "end_wait_s", *self.own_options, *self.more_options(state)))

    def engines(self, order: StateOrder) -> tuple[Engine, ...]:
        """The engines of an order, each with an order for its own GPUs.

        Raises NotDone for a URL that, filled in, is not one to be talked to, and for GPUs on which no engine is.
        """
        found = []
        for part, url in product(_parts(order), self.options(order.state).texts("url", (self.default_url,))):
            leads_to = filled(url, part)
            try:
                self._check_url(url, leads_to)
            except ValueError as error:
                raise NotDone(str(error)) from error
            found.append(Engine(leads_to, part, self._headers, vouched=bool(self._urls)))
        if not found:
            raise NotDone(
                f"none of the engines of {order.state.engine_gpus} GPUs on {order.node} lies within "
                f"{', '.join(order.gpus)}: let its phase have whole engines (min_gpus)"
            )
        return tuple(found)

    # ---- inside -----------------------------------------------------------------------------------------------------

    async def _all(self, order: StateOrder, do: Callable[[Engine], Awaitable[None]]) -> None:
        """Do it with all engines at once, and let each come to its end: one verdict, in which errors count first."""
        engines = self.engines(order)
        self._told[order.order] = False
        while len(self._told) > _TOLD_KEPT:
            del self._told[next(iter(self._told))]
        failed: list[PluginError] = []

        async def one(engine: Engine) -> None:
            try:
                await do(engine)
            except PluginError as error:
                failed.append(error)

        async with anyio.create_task_group() as group:
            for engine in engines:
                group.start_soon(one, engine)
        if failed:
            raise _verdict(failed, len(engines))
        self._told[order.order] = True

    async def _load(self, engine: Engine) -> None:
        try:
            await self.wake(engine)
        except NotThere as error:
            if engine.order.warm:
                raise NotDone(f"{error}; it was parked there, so it has died since: start the job again") from error
            if start := self.options(engine.order.state).argv("start"):
                await run(engine.order, start)
                await until(lambda: engine.answers(self.health))
                self.started(engine)
                await self.wake(engine)
            # else the job will start it, in its init phase

    async def _discard(self, engine: Engine) -> None:
        options = self.options(engine.order.state)
        if stop := options.argv("stop"):
            await run(engine.order, stop)
        else:
            with contextlib.suppress(NotDone, ContactLost):
                await self.drop(engine)
        wait_s = options.seconds("end_wait_s", 10.0)
        with anyio.move_on_after(wait_s):
            await until(lambda: self._is_gone(engine))
            self.started(engine)
            return
        raise NotDone(
            f"the engine at {engine} still runs {wait_s:g} s after it was to end, and keeps what it cannot give back "
            "on its GPUs: end its process"
        )

    async def _found(self, engine: Engine, kind: OrderKind) -> Probed:
        try:
            if kind is OrderKind.DISCARD:
                gone = await self._is_gone(engine)
                return Probed(known=True, done=gone, error="" if gone else f"the engine at {engine} still runs")
            return await self.look(engine, kind)
        except NotThere as error:
            return Probed(known=True, error=str(error))
        except PluginError as error:
            return Probed(known=False, error=str(error))

    async def _is_gone(self, engine: Engine) -> bool:
        """Raises ContactLost where the host cannot say."""
        try:
            await engine.call("GET", self.presence, limit_s=ASK_S)
        except NotThere:
            return True
        except NotDone:
            return False
        except ContactLost:
            # It may be just ending; a host that is away is not known to be free of it.
            with contextlib.suppress(NotThere):
                await engine.call("GET", self.presence, limit_s=ASK_S)
                return False
            return True
        return False

    def _check_template(self, url: str) -> None:
        """Raise ValueError for a URL that cannot lead where one may, whatever is filled in."""
        check_fields(f"url of driver {self.name}", url)
        self._check_url(url, url.format_map(dict.fromkeys(FIELDS, "1")))

    def _check_url(self, url: str, leads_to: str) -> None:
        """Raise ValueError for a URL that is not to be talked to, as a job has it and as it was filled in."""
        if self._urls and url.rstrip("/") not in self._urls:
            raise ValueError(
                f"url of driver {self.name} is {url!r}; jobs may name {', '.join(self._urls)} "
                f"([residency.{self.name}] urls)"
            )
        if not (_URL.fullmatch(url) and _is_address(leads_to)):
            into = f" (filled in: {leads_to})" if "{" in url else ""
            raise ValueError(
                f"url of driver {self.name} is {url!r}{into}; it must be like {self.default_url}: with only a "
                "host and a port, in which a number may be filled in ({gpu})"
            )
        if not (self._urls or _is_on_loopback(leads_to)):
            raise ValueError(
                f"url of driver {self.name} is {url!r}; engines are talked to on the host's own loopback only "
                "(127.0.0.1), with nothing filled in but the port, and no path, unless "
                f"[residency.{self.name}] urls has it"
            )


def _parts(order: StateOrder) -> tuple[StateOrder, ...]:
    """The order for each engine that it is about."""
    each = order.state.engine_gpus
    if not each:
        return (order,)
    engines = engines_on(order.node_gpus or order.gpus, each)
    if order.kind is OrderKind.LOAD:  # the other engines' GPUs may be held by another job
        engines = tuple(gpus for gpus in engines if set(gpus) <= set(order.gpus))
    return tuple(structs.replace(order, gpus=gpus) for gpus in engines)


async def run(order: StateOrder, argv: Sequence[str], *, limit_s: float = 86_400.0) -> str:
    """Run a command of a job's options on its host; what it printed. Raises NotDone where it failed."""
    filled_in = [filled(text, order) for text in argv]
    ran = await runs_commands(order.backend).run(order.host, filled_in, timeout_s=limit_s)
    if ran.exit_code:
        raise NotDone(f"{filled_in[0]} on {order.host} ended with {ran.in_words()}")
    return ran.stdout.decode(errors="replace")


def _verdict(failed: Sequence[PluginError], engines: int) -> PluginError:
    """One error of many: what is certain first, and a loss of contact only where nothing is certain."""
    certain = [error for error in failed if isinstance(error, NotDone)]
    told: Sequence[PluginError] = certain or failed
    if engines == 1:
        return told[0]
    text = f"{len(failed)} of {engines} engines: " + "; ".join(str(error) for error in told[:4])
    return NotDone(text) if certain else ContactLost(text)


async def until(there: Callable[[], Awaitable[object]]) -> None:
    """Ask again and again, until the answer is yes."""
    pause_s = _PAUSE_S[0]
    while not await there():
        await anyio.sleep(pause_s)
        pause_s = min(_PAUSE_S[1], pause_s * 1.5)


def _is_address(url: str) -> bool:
    """Whether a URL that was filled in leads to a host and a port, and says nothing more of a call."""
    found = _URL.fullmatch(url)
    if found is None or "{" in url or not 0 < int(found["port"] or 80) < 65536:
        return False
    if _is_loopback(found["host"]):  # a state may name hundreds of these, and httpx takes long for each
        return True
    try:
        return bool(httpx.URL(url).host)
    except (httpx.InvalidURL, ValueError):
        return False


def _is_on_loopback(url: str) -> bool:
    """Whether a URL that was filled in leads to a port of the loopback, and to nothing special there."""
    found = _URL.fullmatch(url)
    return found is not None and not found["path"] and _is_loopback(found["host"])


def _is_loopback(host: str) -> bool:
    try:
        if host.startswith("["):
            return ipaddress.IPv6Address(host[1:-1]) == ipaddress.IPv6Address("::1")
        return host.lower() == "localhost" or ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False
