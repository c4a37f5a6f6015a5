"""Who may do what: every route, for every kind of caller. A route that this table does not know fails the test."""

import json

import pytest

from rollmuxd.core import facts as f
from rollmuxd.core.model import JobStatus
from rollmuxd.daemon.access.keys import Role

pytestmark = pytest.mark.asyncio

OK = "ok"  # what the route answers to whom it serves; written beside its rule below

#: callers, and who they are to the job in question, which is team/alice's
CALLERS = {
    "no key": "sends none",
    "wrong key": "the right id, and another secret",
    "revoked key": "alice's, revoked",
    "expired key": "alice's, expired",
    "viewer": "of the same owner",
    "user": "alice herself",
    "colleague": "another user of the same owner",
    "stranger": "a lead of another owner",
    "lead": "of the same owner",
    "admin": "an operator",
    "uid": "a user at the Unix socket, who is an owner by himself",
    "root": "uid 0 at the Unix socket",
}
SHUT_OUT = {"no key": 401, "wrong key": 401, "revoked key": 401, "expired key": 401}
SERVED = {name: OK for name in CALLERS if name not in SHUT_OUT}

ANYBODY = dict.fromkeys(CALLERS, OK)
READER = {**SHUT_OUT, **SERVED}
OF_THE_OWNER = {**READER, "stranger": 404, "uid": 404}
WRITER = {**READER, "viewer": 403}
IN_CHARGE = {**OF_THE_OWNER, "viewer": 403, "colleague": 403}
OPERATOR = {**SHUT_OUT, **dict.fromkeys(SERVED, 403), "admin": OK, "root": OK}

#: rule, and what the route answers to whom it serves
ROUTES = {
    "GET /healthz": (ANYBODY, 200),
    "GET /readyz": (ANYBODY, 200),
    "GET /v1/openapi.json": (ANYBODY, 200),
    "GET /": (ANYBODY, 200),
    "GET /web/{file}": (ANYBODY, 200),
    "GET /v1/me": (READER, 200),
    "GET /metrics": (READER, 200),
    "GET /v1/jobs": (READER, 200),
    "GET /v1/jobs/{job}": (OF_THE_OWNER, 200),
    "GET /v1/jobs/{job}/explain": (OF_THE_OWNER, 200),
    "GET /v1/jobs/{job}/logs": (IN_CHARGE, 404),
    "GET /v1/slots": (READER, 200),
    "GET /v1/slots/{slot}": (OF_THE_OWNER, 200),
    "GET /v1/nodes": (READER, 200),
    "GET /v1/nodes/{node}": (READER, 200),
    "GET /v1/hosts": (READER, 200),
    "GET /v1/hosts/{host}": (READER, 200),
    "GET /v1/pools": (READER, 200),
    "GET /v1/groups": (READER, 200),
    "GET /v1/groups/{group}": (READER, 200),
    "GET /v1/facts": (READER, 200),
    "GET /v1/report": (READER, 200),
    "GET /v1/overview": (READER, 200),
    "POST /v1/plan": (WRITER, 200),
    "POST /v1/jobs": (WRITER, 201),
    "POST /v1/jobs/{job}/pause": (IN_CHARGE, 200),
    "POST /v1/jobs/{job}/resume": (IN_CHARGE, 200),
    "POST /v1/jobs/{job}/reinstate": (IN_CHARGE, 409),  # it is not quarantined
    "DELETE /v1/jobs/{job}": (IN_CHARGE, 200),
    "POST /v1/jobs/{job}/sessions": (IN_CHARGE, 201),
    "POST /v1/jobs/{job}/slots": (IN_CHARGE, 200),
    "POST /v1/sessions/{session}/heartbeat": (IN_CHARGE, 200),
    "POST /v1/sessions/{session}/give-back": (IN_CHARGE, 200),
    "DELETE /v1/sessions/{session}": (IN_CHARGE, 200),
    "DELETE /v1/slots/{slot}": (IN_CHARGE, 409),  # it runs
    "POST /v1/slots/{slot}/release": (IN_CHARGE, 200),
    "POST /v1/slots/{slot}/shrink": (IN_CHARGE, 200),
    "POST /v1/slots/{slot}/grow": (IN_CHARGE, 200),
    "GET /v1/channel/{job}/orders": (IN_CHARGE, 200),
    "POST /v1/channel/{job}/results": (IN_CHARGE, 200),
    "POST /v1/slots/{slot}/revoke": (OPERATOR, 200),
    "POST /v1/nodes/{node}/drain": (OPERATOR, 200),
    "POST /v1/nodes/{node}/undrain": (OPERATOR, 200),
    "POST /v1/nodes/{node}/declare-clean": (OPERATOR, 409),  # a slot runs there
    "POST /v1/hosts/{host}/drain": (OPERATOR, 200),
    "POST /v1/hosts/{host}/undrain": (OPERATOR, 200),
    "POST /v1/hosts/{host}/declare-clean": (OPERATOR, 200),  # of the other node
    "GET /v1/fabrics": (READER, 200),
    "POST /v1/fabrics/{fabric}/degrade": (OPERATOR, 200),
    "POST /v1/fabrics/{fabric}/restore": (OPERATOR, 200),
    "GET /v1/keys": (OPERATOR, 200),
    "POST /v1/keys": (OPERATOR, 201),
    "DELETE /v1/keys/{key}": (OPERATOR, 200),
}


#: what leaves no audit fact though a lead or an operator does it to alice's job, and why
NOT_AUDITED = {
    "POST /v1/plan": "changes nothing",
    "POST /v1/jobs": "it is a job of one's own here; another's, and what is run for it: test_audit.py",
}


#: what leaves no audit fact, and why
NOT_AUDITED = {
    "POST /v1/plan": "it changes nothing",
    "POST /v1/jobs": "the job is one's own here; of another's, and of what is run for it, tells test_audit.py",
}
#: what does so also if one does it to one's own job
ALWAYS_AUDITED = {"POST /v1/jobs/{job}/reinstate"}
WHO = {
    "user": ("team/alice", "user"),
    "lead": ("team/lea", "lead"),
    "admin": ("ops/op", "admin"),
    "root": ("root", "admin"),
}


class Callers:
    """A client for each kind of caller."""

    def __init__(self, world):
        self.world = world
        self.spare = ""

    async def make(self):
        await self.world.add_key("admin", "ops", "op", Role.ADMIN)
        await self.world.add_key("user", "team", "alice", Role.USER)
        await self.world.add_key("colleague", "team", "bob", Role.USER)
        await self.world.add_key("revoked key", "team", "alice", Role.USER)
        await self.world.add_key("expired key", "team", "alice", Role.USER, expires_at=self.world.clock.now())
        right = self.world.secrets["user"]
        self.world.secrets["wrong key"] = right[:-4] + ("aaaa" if right[-4:] != "aaaa" else "bbbb")
        revoked = self.world.secrets["revoked key"].split("_")[1]
        await self.world.journal.revoke_key(revoked, self.world.clock.now())

    def client(self, name):
        match name:
            case "no key":
                return self.world.client(None)
            case "uid":
                return self.world.on_socket(54321)
            case "root":
                return self.world.on_socket(0)
        return self.world.client(name)


async def called(world, callers, name, route, registration, ready=None):
    """Call the route as somebody, about a job of alice's that holds a slot; gives the answer, and the facts of it.

    ``ready`` sees to it that who may call the route is served, and gives what else it is to be about.
    """
    async with world.client("alice") as alice:
        job = await world.job(alice, f"for-{name.replace(' ', '-')}")
        slot = (await job.ask("rollout")).json()
    world.hub.dial(job.id, job.session, 0, 1)
    world.spare += 1
    await world.add_key(f"spare{world.spare}", "team", "dan", Role.VIEWER)
    spare = world.secrets[f"spare{world.spare}"].split("_")[1]
    method, _, path = route.partition(" ")
    about = {
        "job": job.id, "slot": slot["slot"], "session": job.session, "node": "h1/gpu0-1", "host": "h1", "pool": "train",
        "group": world.state.jobs[job.id].group, "rank": 0, "key": spare, "file": "main.js", "fabric": "ocs",
    }  # fmt: skip
    path = path.format(**{**about, **(await ready(world, job) if ready is not None else {})})
    body = {
        "POST /v1/jobs": registration(f"by-{name.replace(' ', '-')}"),
        "POST /v1/jobs/{job}/sessions": {},
        "POST /v1/jobs/{job}/slots": {"phase": "train", "request_id": "r", "session": job.session, "wait_s": 0},
        "POST /v1/slots/{slot}/release": {"fence": slot["fence"]},
        "POST /v1/slots/{slot}/shrink": {"fence": slot["fence"], "keep": ["h1/gpu0"]},
        "POST /v1/slots/{slot}/grow": {"fence": slot["fence"]},
        "POST /v1/channel/{job}/results": {"session": job.session, "rank": 0, "order": "o1", "ok": True},
        "POST /v1/keys": {"owner": "team", "user": "new"},
        "POST /v1/plan": {"jobs": [registration("planned")]},
    }.get(route)
    query = {"session": job.session, "rank": 0} if route == "GET /v1/channel/{job}/orders" else None
    before = world.writer.durable_seq
    async with callers.client(name) as client:
        answer = await client.request(method, path, json=body, params=query)
    said = [fact for _, fact in await world.journal.read(before, 1000)]
    # What is left of it must not be in the way of the next one.
    async with world.client("root") as root:
        for known in [known for known in world.state.jobs.values() if known.live]:
            assert (await root.delete(f"/v1/jobs/{known.id}")).status_code == 200
        await root.post("/v1/hosts/h1/undrain")
    await world.settle()
    return answer, said


async def test_every_route_that_is_described_has_a_rule_and_every_rule_a_route(running):
    async with running() as world, world.client(None) as anybody:
        paths = (await anybody.get("/v1/openapi.json")).json()["paths"]
    described = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert described == set(ROUTES)


@pytest.mark.parametrize("route", ROUTES)
async def test_each_caller_is_answered_as_the_table_says_and_who_is_refused_changes_nothing(
    running, body_of_job, route
):
    rule, served = ROUTES[route]
    assert set(rule) == set(CALLERS)
    async with running() as world:
        world.spare = 0
        callers = Callers(world)
        await callers.make()
        for name, who in CALLERS.items():
            answer, said = await called(world, callers, name, route, body_of_job)
            expected = served if rule[name] is OK else rule[name]
            assert answer.status_code == expected, f"{name} ({who}): {answer.text}"
            if rule[name] is not OK:
                assert answer.headers["content-type"] == "application/problem+json"
                done = [fact for fact in said if getattr(fact, "action", "") != "login_failed"]
                assert done == [], f"{name} was refused, and something has changed"
                for secret in world.secrets.values():
                    assert secret not in json.dumps(answer.json())


async def quarantined(world, job):
    known = world.state.jobs[job.id]
    known.status, known.slot = JobStatus.QUARANTINED, None
    return {}


async def queued(world, job):
    async with world.client("alice") as alice:
        other = await world.job(alice, f"second-{world.spare}")
        return {"slot": (await other.ask("rollout", wait_s=0)).json()["slot"]}


async def elsewhere(world, job):
    return {"node": "h1/gpu2-3"}


#: of routes that would refuse everybody in the world of the first test
READY = {
    "POST /v1/jobs/{job}/reinstate": quarantined,
    "DELETE /v1/slots/{slot}": queued,
    "POST /v1/nodes/{node}/declare-clean": elsewhere,
}


@pytest.mark.parametrize("route", [route for route in ROUTES if not route.startswith("GET ")])
async def test_of_what_is_done_to_another_users_job_and_of_what_operators_do_it_is_written_down_who_did_it(
    running, body_of_job, route
):
    rule, _ = ROUTES[route]
    async with running() as world:
        world.spare = 0
        callers = Callers(world)
        await callers.make()
        for name, who in WHO.items():
            if rule[name] is not OK:
                continue
            answer, said = await called(world, callers, name, route, body_of_job, READY.get(route))
            assert answer.status_code < 300, f"{name}: {answer.text}"
            noted = {(fact.who, fact.role) for fact in said if isinstance(fact, f.Audited)}
            audited = (name != "user" or route in ALWAYS_AUDITED) and route not in NOT_AUDITED
            assert noted == ({who} if audited else set()), name
