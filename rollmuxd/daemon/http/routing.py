"""What every call has in common: one typed function per route, and everything else is done here, once.

A handler is a plain async function. Its signature is the whole description of its route::

    @routes.post("/v1/jobs/{job}/slots", problems=(404, 409))
    async def request_slot(call: Call, job: str, body: SlotBody) -> SlotView: ...

``body`` is decoded from JSON, ``query`` (a :class:`Query`) from the query string. The other parameters come from the
path, as text. The answer is encoded; an exception becomes problem+json. ``/v1/openapi.json`` is made of the same
signatures, so that it is always true.

The hot path (request, release, heartbeat) is: one match, one hash, one decode, the handler, one encode, one send. No
starlette Request or Response is made, and there is no middleware: ``BaseHTTPMiddleware`` would also hide the client's
disconnecting from the long polls.
"""

import asyncio
import itertools
import math
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_type_hints
from urllib.parse import parse_qsl

import anyio
import msgspec
import structlog
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollmuxd.core.decision import Answer
from rollmuxd.core.errors import Rejected, UnknownThing
from rollmuxd.core.facts import Audited
from rollmuxd.core.ids import JobId, Millis
from rollmuxd.core.inputs import Audit, Input
from rollmuxd.core.model import Job
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import PEER_EXTENSION, Caller, Gate, NotKnown, Peer
from rollmuxd.daemon.access.keys import Role
from rollmuxd.daemon.access.visibility import Visibility
from rollmuxd.daemon.http import limits, problems
from rollmuxd.daemon.http.limits import (
    LONG,
    PAGES,
    Account,
    Bytes,
    Lines,
    Paces,
    Questions,
)
from rollmuxd.daemon.http.origin_check import OriginCheck
from rollmuxd.daemon.http.problems import Refusal, problem_of
from rollmuxd.daemon.logs import Seldom
from rollmuxd.daemon.metrics import Metrics
from rollmuxd.daemon.services import Services
from rollmuxd.daemon.writer import Unavailable
from rollmuxd.wire.answers import Page
from rollmuxd.wire.requests import Request

T = TypeVar("T")
Handler: TypeAlias = Callable[..., Awaitable[Any]]
HandlerT = TypeVar("HandlerT", bound=Handler)

log = structlog.get_logger(__name__)

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")
#: a request that brings no id is counted: the system's randomness for each would cost as much as its routing
_THIS_DAEMON = secrets.token_hex(4)
_numbers = itertools.count(1)
#: of so much that is done again and again it is remembered that it was written down
WRITTEN_KEPT = 10_000
_encode = msgspec.json.Encoder().encode
_JSON = (b"content-type", b"application/json")
_PROBLEM = (b"content-type", problems.MEDIA_TYPE.encode())
# Answers hold fences and other people's business: no cache on the way is to keep them.
_NO_STORE = (b"cache-control", b"no-store")


class Query(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all query strings. An unknown parameter is refused by name.

    What may be left out has the type ``| UnsetType``, not ``| None``: msgspec takes a query's word ``null`` for None.
    """


Limit: TypeAlias = Annotated[int, Meta(ge=1, le=1000, description="items in a page")]
Id: TypeAlias = Annotated[str, Meta(max_length=200)]


class PageQuery(Query, frozen=True):
    """Which part of a list."""

    limit: Limit = 100
    after: Id | UnsetType = UNSET


class Plain(Struct, frozen=True):
    """An answer that is not JSON."""

    body: bytes
    media_type: str
    headers: tuple[tuple[str, str], ...] = ()


def status_of(state: State, about: str) -> str:
    """How a slot, a session, a node or a job is, in a few words, for the audit; a job also by its owner/name."""
    if (known := state.slots.get(about) or state.sessions.get(about)) is not None:
        return f"{known.status}, of job {known.job}"
    if (node := state.nodes.get(about)) is not None:
        not_clean = [name for name, gpu in node.gpus.items() if gpu.dirty_by or gpu.holder]
        jobs = f", of {len(node.pinned)} jobs" if node.pinned else ""
        return f"{node.status}{jobs}{', with something on ' + ', '.join(not_clean) if not_clean else ''}"
    if (job := state.jobs.get(state.names.get(about, about))) is not None:
        session = f", session {job.session}" if job.session else ""
        return f"{job.status}, run {job.run} of {job.owner}/{job.user}{session}"
    return ""


def find(noun: str, things: Mapping[str, T], name: str) -> T:
    """The thing of that name. Raises UnknownThing."""
    if (found := things.get(name)) is None:
        raise UnknownThing(noun, name)
    return found


class ClientGone(Exception):
    """The client has hung up: there is no caller to answer."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all calls of one app share."""

    services: Services
    gate: Gate
    metrics: Metrics
    body_limit: int
    lease_s: float
    heartbeat_s: float
    #: makes ``/v1/openapi.json``, when it is asked for
    openapi: Callable[[], bytes]
    #: of calls, by key, user or address; None: no caller is counted
    rates: Account | None
    #: under which names it is heard without a key
    origin_check: OriginCheck
    #: whether a failure is logged: each is a page, and a caller may know how to cause it again
    failures: Seldom = field(default_factory=Seldom)
    #: whether a failed login is written down: a caller that guesses keys must not fill the disk
    failed_logins: Seldom = field(default_factory=Seldom)
    #: which calls begin in this turn of the loop
    paces: Paces = field(default_factory=Paces)
    #: plans and explanations that are made now
    questions: Questions = field(default_factory=Questions)
    #: pages that are made now
    pages: Lines = field(default_factory=lambda: Lines(PAGES, "pages"))
    #: and reports
    reports: Lines = field(default_factory=lambda: Lines(PAGES, "reports"))
    #: bodies that have arrived in part
    bodies: Bytes = field(
        default_factory=lambda: Bytes(
            limits.BODIES, "bodies in calls that are not complete", "complete those calls first"
        )
    )
    #: long answers that were not taken yet
    unread: Bytes = field(
        default_factory=lambda: Bytes(limits.ANSWERS, "answers that were not taken", "read those answers first")
    )
    #: calls that wait for facts now, by owner; a heartbeat that is held back is one of them
    facts_waiting: Counter[str] = field(default_factory=Counter)
    #: requests that calls attend now, by (job, request id): the last call to go detaches the slot
    attended: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: for repeated actions: those already written down, by caller, action and object
    written: dict[tuple[str, str, str], None] = field(default_factory=dict)


@dataclass(slots=True)
class Call:
    """One request, as a handler sees it."""

    shared: Shared
    caller: Caller
    request_id: str
    status: int
    #: what is done, for the audit: the name of the handler
    action: str
    _scope: Scope
    _receive: Receive
    #: the job that it is about, if that is another user's; empty: it is not
    others: JobId = ""
    _is_noted: bool = False

    @property
    def services(self) -> Services:
        """The parts of the daemon."""
        return self.shared.services

    async def read(self, question: Callable[[Scheduler, Millis], T]) -> T:
        """Ask the core something; answered when all that was seen is durable."""
        return await self.shared.services.writer.read(question)

    def visibility(self, core: Scheduler) -> Visibility:
        """What this caller may see of how things are."""
        return Visibility(core, self.caller)

    async def act_on(self, find: Callable[..., T], ref: str) -> T:
        """The job, slot or session that the caller wants to act on; refuses a caller that may not.

        Looks at once, without waiting for the disk: whatever is submitted next is decided, and made durable, after
        what was seen here. A refusal is an answer, so it is made by a proper :meth:`read`.
        """
        try:
            found = find(self.services.writer.scheduler.state, self.caller, ref, act=True)
        except Rejected:
            found = await self.read(lambda core, now: find(core.state, self.caller, ref, act=True))
        job = found[-1] if isinstance(found, tuple) else found
        if isinstance(job, Job) and not self.caller.owns(job):
            self.others = job.id
        return found

    async def submit(
        self, given: Input, about: str, *, reason: str = "", once: str = "", always: bool = False
    ) -> Answer:
        """Have an input decided that is about what :meth:`act_on` has found.

        Of another's job, or ``always`` (what operators do), it is written down in the same commit which caller gave it
        and what came of it. What is refused is not. ``once`` names what may be said many times: it is written down the
        first time.
        """
        writer = self.services.writer
        self._is_noted = always or bool(self.others)
        if not self._is_noted or self._is_written(once):
            return await writer.submit(given)
        before = status_of(writer.scheduler.state, about)
        answer = await writer.submit(
            given, then=lambda: self.noted(about, before, status_of(writer.scheduler.state, about), reason=reason)
        )
        self._remember(once)
        return answer

    async def note(self, about: str, after: str, *, reason: str = "", once: str = "") -> None:
        """Write down what was done beside the core."""
        self._is_noted = True
        if not self._is_written(once):
            await self.services.writer.submit(self.noted(about, "", after, reason=reason))
            self._remember(once)

    async def note_what_was_not(self, *, operators: bool) -> None:
        """Write down what operators do, and what any caller does to another user's job."""
        if (operators or self.others) and not self._is_noted:
            about = self.others or self._scope["path"]
            await self.note(about, "done", once=self.others)

    def _is_written(self, once: str) -> bool:
        return bool(once) and (self.caller.name, self.action, once) in self.shared.written

    def _remember(self, once: str) -> None:
        written = self.shared.written
        if once:
            written[self.caller.name, self.action, once] = None
        if len(written) > WRITTEN_KEPT:
            del written[next(iter(written))]

    def noted(self, about: str, before: str, after: str, *, reason: str = "") -> Audit:
        """What is written down of this call."""
        self._is_noted = True
        fact = Audited(
            0,
            action=self.action,
            who=self.caller.name,
            role=str(self.caller.role),
            where=_where(self._scope),
            request_id=self.request_id,
            about=about,
            before=before,
            after=after,
            reason=reason,
        )
        return Audit(fact)

    def header(self, name: bytes) -> str | None:
        """A request header, by its name in lower case."""
        return _header(self._scope, name)

    async def page(
        self,
        query: PageQuery,
        things: Callable[[State], Mapping[str, T]],
        view: Callable[[Visibility, T, Millis], Struct],
        wanted: Callable[[State, T], bool] = lambda state, it: True,
    ) -> Page[Any]:
        """As many items as a page may have, in number and bytes; their views are encoded already.

        They are made a few at a time, and between them the loop is left to other calls. ``things`` gives all items by
        their keys. One that is gone when its turn comes is left out. Keys count up within their kind (``j2`` comes
        before ``j10``), so a page stays right while things come and go.
        """
        start = (-1, "") if query.after is UNSET else (len(query.after), query.after)
        views: list[Any] = []
        size, last, writer = 0, "", self.services.writer
        async with self.shared.pages.turn(self.caller.owner):
            slices, visibility = limits.Slices(), self.visibility(writer.scheduler)
            known = things(state := visibility.core.state)
            found = sorted(at for key, it in known.items() if (at := (len(key), key)) > start and wanted(state, it))
            following = found[query.limit - 1][1] if len(found) > query.limit else None
            for _, key in found[: query.limit]:
                if await slices.pause():
                    visibility = self.visibility(writer.scheduler)
                    known = things(visibility.core.state)
                if (it := known.get(key)) is None:
                    continue
                size += len(text := _encode(view(visibility, it, self.services.clock.now())))
                if views and size > limits.PAGE:
                    following = last
                    break
                views.append(msgspec.Raw(text))
                last = key
        await self.read(lambda core, now: None)  # all that was seen is durable
        return Page(items=views, next=following)

    def check_head(self, limit: int) -> None:
        """Refuse a body that is not JSON, or too large, by its head: before any of it is read."""
        kind = self.header(b"content-type")
        if kind is not None and (media := kind.partition(";")[0].strip().lower()) != "application/json":
            raise Refusal(problems.BAD_TYPE, f"the body is {media or 'nothing'}, and this takes application/json")
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise _too_large(limit)

    async def body(self, limit: int) -> bytes:
        """The body. What comes in parts is counted until all of it is here."""
        come = bytearray()
        try:
            while True:
                message = await self._receive()
                body: bytes = message.get("body", b"")
                if len(come) + len(body) > limit:
                    raise _too_large(limit)
                if not come and not message.get("more_body", False):
                    break
                self.shared.bodies.add(self.caller.owner, len(body))
                come += body
                if not message.get("more_body", False):
                    body = bytes(come)
                    break
        finally:
            self.shared.bodies.free(self.caller.owner, len(come))
        if message["type"] == "http.disconnect":
            raise ClientGone
        return body

    async def disconnected(self) -> None:
        """Return when the client hangs up. Only to be called after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count this call among those of its owner that wait for facts."""
        self.shared.facts_waiting[self.caller.owner] += 1
        try:
            yield
        finally:
            self.shared.facts_waiting[self.caller.owner] -= 1

    async def park(self, until: Callable[[], Awaitable[T]], seconds: float) -> T | None:
        """Wait for ``until``; None: it took longer than that. Raises ClientGone when the client hangs up."""
        # A task of asyncio's: a task group costs a parked call four turns of the loop on its way out.
        client = asyncio.get_running_loop().create_task(self.disconnected())
        try:
            with anyio.move_on_after(seconds) as scope:
                client.add_done_callback(lambda _: scope.cancel())
                return await until()
            if client.done():
                raise ClientGone
            return None
        finally:
            client.cancel()


@dataclass(slots=True)
class Endpoint:
    """One route: a method and a path, and what its handler takes and gives."""

    method: str
    path: str
    handler: Handler
    tag: str
    #: its owner pays for it with pauses (:class:`~rollmuxd.daemon.http.limits.Paces`)
    charged: bool
    #: the least role that may call it; None: no key is needed
    needs: Role | None
    status: int = 200
    #: other statuses of success that the handler may set
    also: tuple[int, ...] = ()
    #: statuses of refusals; those of bodies, and of things that there are not, are added
    problems: tuple[int, ...] = ()
    #: media types of answers that are not JSON
    produces: tuple[str, ...] = ()
    #: bytes of the body at most, where that is less than is configured; 0: as configured
    max_body: int = 0
    answer: Any = field(init=False)
    body: type[Struct] | None = field(init=False)
    query: type[Query] | None = field(init=False)
    path_names: tuple[str, ...] = field(init=False)
    #: an empty body is the same as ``{}``
    body_optional: bool = field(init=False)
    #: of calls that take no body: of nothing, or ``{}``
    decoder: msgspec.json.Decoder[Any] = field(init=False)

    def __post_init__(self) -> None:
        takes = get_type_hints(self.handler, include_extras=True)
        self.answer, self.body, self.query = takes.pop("return"), takes.pop("body", None), takes.pop("query", None)
        self.path_names = tuple(name for name in takes if name != "call")
        taken = self.body or Request
        self.body_optional = not any(item.required for item in msgspec.structs.fields(taken))
        self.decoder = msgspec.json.Decoder(taken)
        of_body = () if self.body is None else (400, 413, 415, 422)
        self.problems = (*of_body, *((404,) if self.path_names else ()), *self.problems)

    @property
    def format_path(self) -> str:
        """The path without converters: ``/v1/nodes/{node}``."""
        return re.sub(r":[a-z]+}", "}", self.path)

    async def perform(self, shared: Shared, scope: Scope, receive: Receive, request_id: str) -> tuple[int, Any]:
        """Everything from the caller's name to the handler's answer."""
        caller = await _identify(shared, scope, request_id, needed=self.needs is not None)
        scope[_OWNER] = caller.owner
        if (turn := shared.paces.take(caller.owner)) is not None:
            await turn
        if self.needs is not None and not caller.role.covers(self.needs):
            raise Refusal(
                problems.FORBIDDEN,
                f"this needs the role {self.needs}, and {caller.name} has the role {caller.role}",
                data={"needs": str(self.needs), "role": str(caller.role)},
            )
        journal = shared.services.journal.id
        if (_header(scope, JOURNAL_HEADER) or journal) != journal:
            raise Refusal(
                problems.ANOTHER_JOURNAL,
                "this daemon's journal is not the one that you registered with, and it knows nothing of your job: "
                "register again",
                data={"journal": journal},
            )
        arguments: dict[str, Any] = scope["path_params"]
        query = _decode_query(self.query or Query, scope["query_string"])
        if self.query is not None:
            arguments["query"] = query
        call = Call(shared, caller, request_id, self.status, self.handler.__name__, scope, receive)
        if not self.charged:
            return await self._done(call, arguments)
        return await limits.metered(self._done(call, arguments), partial(shared.paces.charge, caller.owner))

    async def _done(self, call: Call, arguments: dict[str, Any]) -> tuple[int, Any]:
        """Read the body, and do it."""
        shared = call.shared
        most = min(self.max_body or shared.body_limit, shared.body_limit)
        call.check_head(most)
        if self.charged:
            if (turn := shared.paces.take(call.caller.owner, charged=True)) is not None:
                await turn
            if self.method != "GET":
                shared.paces.charge(call.caller.owner, limits.COMMIT_S)
        if self.method != "GET":
            body = _decode_body(self.decoder, await call.body(most), optional=self.body_optional)
            if self.body is not None:
                arguments["body"] = body
        answer = await self.handler(call, **arguments)
        if self.method != "GET":
            await call.note_what_was_not(operators=self.needs is Role.ADMIN)
        return call.status, answer


class Routes:
    """Collects the endpoints of one file of ``routes``."""

    def __init__(self, tag: str, *, charged: bool = True) -> None:
        self.tag = tag
        self.charged = charged
        self.endpoints: list[Endpoint] = []

    def get(self, path: str, *, needs: Role | None = Role.VIEWER, **details: Any) -> Callable[[HandlerT], HandlerT]:
        """A route that only reads. ``details``: of :class:`Endpoint`."""
        return self._route("GET", path, needs=needs, **details)

    def post(self, path: str, *, needs: Role = Role.USER, **details: Any) -> Callable[[HandlerT], HandlerT]:
        """A route that changes something."""
        return self._route("POST", path, needs=needs, **details)

    def delete(self, path: str, *, needs: Role = Role.USER, **details: Any) -> Callable[[HandlerT], HandlerT]:
        """A route that ends something."""
        return self._route("DELETE", path, needs=needs, **details)

    def _route(self, method: str, path: str, **details: Any) -> Callable[[HandlerT], HandlerT]:
        def add(handler: HandlerT) -> HandlerT:
            self.endpoints.append(Endpoint(method, path, handler, self.tag, self.charged, **details))
            return handler

        return add


class PathApp:
    """All methods of one path, as an ASGI app."""

    def __init__(self, shared: Shared, endpoints: list[Endpoint]) -> None:
        self.shared = shared
        self.path = endpoints[0].format_path
        self.methods = {endpoint.method: endpoint for endpoint in endpoints}
        if "GET" in self.methods:
            self.methods["HEAD"] = self.methods["GET"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        what: Endpoint | Refusal | None = self.methods.get(scope["method"])
        if what is None:
            allow = ", ".join(self.methods)
            what = Refusal(
                problems.BAD_METHOD,
                f"{self.path} has the methods {allow}",
                data={"allow": list(self.methods)},
                headers=(("allow", allow),),
            )
        await _answer(self.shared, self.path, scope, send, what, receive)


def router(shared: Shared, endpoints: list[Endpoint]) -> ASGIApp:
    """One starlette route per path, in the order of the endpoints: the hot ones come first."""
    by_path: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, []).append(endpoint)

    async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
        detail = f"there is nothing at {scope['path']}; /v1/openapi.json lists what there is"
        await _answer(shared, "", scope, send, Refusal(problems.UNKNOWN, detail), receive)

    routes = [Route(path, PathApp(shared, methods)) for path, methods in by_path.items()]
    return Router(routes, redirect_slashes=False, default=not_found)


async def _answer(
    shared: Shared, path: str, scope: Scope, send: Send, what: Endpoint | Exception, receive: Receive
) -> None:
    """Do it, and send exactly one answer: the handler's, or a problem."""
    request_id = _request_id(scope)
    headers = [(b"x-request-id", request_id.encode()), _NO_STORE]
    unread = 0
    try:
        if isinstance(what, Exception):
            raise what
        status, value = await what.perform(shared, scope, receive, request_id)
        if isinstance(value, Plain):
            body, kind = value.body, (b"content-type", value.media_type.encode())
            headers += [(name.encode(), text.encode()) for name, text in value.headers]
        else:
            body, kind = _encode(value), _JSON
        if len(body) > LONG:
            shared.unread.add(scope[_OWNER], len(body))
            unread = len(body)
    except ClientGone:
        return
    except Exception as error:
        problem, more = problem_of(error, request_id)
        status, body, kind = problem.status, _encode(problem), _PROBLEM
        headers += [(name.encode(), text.encode()) for name, text in more]
        if status == 500 and (left_out := shared.failures.take()) is not None:
            log.exception(
                "http_failed", request_id=request_id, method=scope["method"], path=path, left_out_before=left_out
            )
    headers += [kind, (b"content-length", str(len(body)).encode())]
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    if scope["method"] == "HEAD":
        body = b""
    try:
        await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": unread > 0})
        if unread:
            await asyncio.sleep(0)  # what is written is sent at the end of a turn of the loop
            await send({"type": "http.response.body", "body": b""})  # waits until nearly all of it was taken
    finally:
        # People make up methods: only those that a route has become labels.
        shared.metrics.answered(path, "any" if isinstance(what, Exception) else scope["method"], status)
        if unread:
            shared.unread.free(scope[_OWNER], unread)


#: the owner of a call's caller, in its scope
_OWNER: Final = "rollmuxd.owner"
#: names the journal in which the ids of a call were given
JOURNAL_HEADER: Final = b"rollmux-journal"
_NOBODY = Caller(owner="", user="", role=Role.VIEWER, name="nobody")


async def _identify(shared: Shared, scope: Scope, request_id: str, *, needed: bool) -> Caller:
    """The caller, if that matters; refuses one that calls too often."""
    if not needed:
        _count(shared, _from(scope))
        return _NOBODY
    try:
        caller = await shared.gate.who(_header(scope, b"authorization"), _peer(scope))
    except NotKnown as error:
        _count(shared, _from(scope))
        if error.login and (left_out := shared.failed_logins.take()) is not None:
            told = Audited(
                0,
                action="login_failed",
                who=error.tried,
                where=_where(scope),
                request_id=request_id,
                reason=str(error),
                count=left_out + 1,
            )
            with suppress(Unavailable):  # the caller is refused all the same
                await shared.services.writer.submit(Audit(told))
        raise
    _count(shared, caller.key or _from(scope))
    if not caller.key:
        shared.origin_check.check(*(_header(scope, name) for name in (b"host", b"sec-fetch-site", b"origin")))
    return caller


def _count(shared: Shared, who: str) -> None:
    if shared.rates is None:
        return
    if wait_s := shared.rates.pause_s(who):
        again_s, most = math.ceil(wait_s), shared.services.settings.limits.calls_per_s
        raise Refusal(
            problems.TOO_FAST,
            f"more than {most:g} calls a second came from {who}; continue in {again_s} s, or have "
            "limits.calls_per_s raised",
            headers=(("retry-after", str(again_s)),),
        )
    shared.rates.charge(who, 1)


def _peer(scope: Scope) -> Peer | None:
    return (scope.get("extensions") or {}).get(PEER_EXTENSION)


def _from(scope: Scope) -> str:
    """Whose calls are counted together where there is no key: a user's, or a machine's."""
    peer = _peer(scope)
    if peer is not None:
        return f"uid {peer.uid}"
    return str((scope.get("client") or ("nowhere",))[0])


def _where(scope: Scope) -> str:
    """Where a call is from, as it is written down."""
    peer = _peer(scope)
    if peer is not None:
        return f"uid {peer.uid}, pid {peer.pid}"
    host, port = scope.get("client") or ("nowhere", 0)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def _request_id(scope: Scope) -> str:
    given = _header(scope, b"x-request-id")
    return given if given and _SANE_REQUEST_ID.fullmatch(given) else f"{_THIS_DAEMON}{next(_numbers):08x}"


def _decode_body(decoder: msgspec.json.Decoder[Any], raw: bytes, *, optional: bool) -> Any:
    try:
        return decoder.decode(raw or b"{}") if optional else decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), "body") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(problems.BAD_REQUEST, f"the body is not JSON: {error}", data={"in": "body"}) from None


def _too_large(limit: int) -> Refusal:
    return Refusal(problems.TOO_LARGE, f"a body may have {limit} bytes here", data={"limit": limit})


def _decode_query(shape: type[Query], raw: bytes) -> Query:
    values: dict[str, str] = {}
    try:
        # Blank values count: ``?limit=`` is a mistake to be told, not to be passed over.
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict") if raw else []
    except ValueError as error:
        raise Refusal(problems.BAD_REQUEST, f"the query cannot be read: {error}", data={"in": "query"}) from None
    for name, value in pairs:
        if name in values:
            raise Refusal(problems.INVALID, f"the query has {name} more than once", data={"in": "query", "field": name})
        values[name] = value
    try:
        return msgspec.convert(values, shape, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), "query") from None


_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:key in )?`(?P<path>\$[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"field `(?P<field>[^`]*)`")


#: by which msgspec says that a text is no name
_OF_A_NAME = "matching regex '^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


def _invalid(message: str, where: str) -> Refusal:
    """A refusal that names the field: msgspec says ``Expected `int`, got `str` - at `$.phases[0].min_gpus```."""
    match = _WHERE.match(message)
    assert match is not None
    path = (match["path"] or "$").removeprefix("$").removeprefix(".")
    # Of an unknown or missing field msgspec tells the object that it is about, and the name in the sentence.
    if named := _NAMED.search(match["what"]):
        path = f"{path}.{named['field']}" if path else named["field"]
    what = match["what"].replace("`", "")
    if _OF_A_NAME in what:
        what = "letters, digits, . _ - are needed (first a letter or digit), at most 100 of them"
    detail = f"{path}: {what[:1].lower()}{what[1:]}" if path else f"{what[:1].lower()}{what[1:]}"
    return Refusal(problems.INVALID, f"{where}: {detail}", data={"in": where, "field": path})
