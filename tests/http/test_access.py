"""Nobody without a key or the right uid does anything; a user touches only their own jobs; no secret is told twice."""

import os

import pytest

from rollmuxd.daemon.http.app import ENDPOINTS

pytestmark = pytest.mark.asyncio

ANYBODY, VIEWER, USER, LEAD, ADMIN = "anybody", "viewer", "user", "lead", "admin"

#: Who may call what, written down a second time: the least role, and whether it is about one job.
RULES = {
    "GET /healthz": (ANYBODY, ""),
    "GET /readyz": (ANYBODY, ""),
    "GET /v1/openapi.json": (ANYBODY, ""),
    "GET /metrics": (VIEWER, ""),
    "GET /v1/jobs": (VIEWER, ""),
    "GET /v1/jobs/{job}": (VIEWER, "job"),
    "GET /v1/jobs/{job}/explain": (VIEWER, "job"),
    "GET /v1/slots": (VIEWER, ""),
    "GET /v1/slots/{slot}": (VIEWER, "job"),
    "GET /v1/nodes": (VIEWER, ""),
    "GET /v1/nodes/{node}": (VIEWER, ""),
    "GET /v1/hosts": (VIEWER, ""),
    "GET /v1/hosts/{host}": (VIEWER, ""),
    "GET /v1/pools": (VIEWER, ""),
    "GET /v1/pools/{pool}": (VIEWER, ""),
    "GET /v1/groups": (VIEWER, ""),
    "GET /v1/groups/{group}": (VIEWER, ""),
    "GET /v1/facts": (VIEWER, ""),
    "GET /v1/report": (VIEWER, ""),
    "POST /v1/jobs": (USER, ""),
    "POST /v1/jobs/{job}/pause": (USER, "job"),
    "POST /v1/jobs/{job}/resume": (USER, "job"),
    "POST /v1/jobs/{job}/reinstate": (USER, "job"),
    "DELETE /v1/jobs/{job}": (USER, "job"),
    "POST /v1/jobs/{job}/sessions": (USER, "job"),
    "POST /v1/jobs/{job}/slots": (USER, "job"),
    "POST /v1/sessions/{session}/heartbeat": (USER, "job"),
    "DELETE /v1/sessions/{session}": (USER, "job"),
    "DELETE /v1/slots/{slot}": (USER, "job"),
    "POST /v1/slots/{slot}/release": (USER, "job"),
    "POST /v1/slots/{slot}/shrink": (USER, "job"),
    "GET /v1/channel/{job}/orders": (USER, "job"),
    "POST /v1/channel/{job}/ranks/{rank}": (USER, "job"),
    "POST /v1/channel/{job}/results": (USER, "job"),
    "POST /v1/slots/{slot}/revoke": (ADMIN, ""),
    "POST /v1/nodes/{node}/drain": (ADMIN, ""),
    "POST /v1/nodes/{node}/undrain": (ADMIN, ""),
    "POST /v1/nodes/{node}/declare-clear": (ADMIN, ""),
    "POST /v1/hosts/{host}/drain": (ADMIN, ""),
    "POST /v1/hosts/{host}/undrain": (ADMIN, ""),
    "POST /v1/hosts/{host}/declare-clear": (ADMIN, ""),
    "GET /v1/keys": (ADMIN, ""),
    "POST /v1/keys": (ADMIN, ""),
    "DELETE /v1/keys/{key}": (ADMIN, ""),
}
ORDER = (ANYBODY, VIEWER, USER, LEAD, ADMIN)

BODIES = {
    "POST /v1/jobs/{job}/sessions": {},
    "POST /v1/jobs/{job}/slots": {"phase": "rollout", "request_id": "r", "session": "e1", "wait_s": 0},
    "POST /v1/slots/{slot}/release": {"fence": "9.9"},
    "POST /v1/slots/{slot}/shrink": {"fence": "9.9", "keep": ["h1/gpu0"]},
    "POST /v1/channel/{job}/ranks/{rank}": {"session": "e1"},
    "POST /v1/channel/{job}/results": {"session": "e1", "rank": 0, "order": "o1", "ok": True},
    "POST /v1/keys": {"owner": "team", "user": "new"},
}
QUERIES = {"GET /v1/channel/{job}/orders": {"session": "e1", "rank": 0}}


async def test_every_route_has_a_rule_and_every_rule_a_route():
    assert {f"{endpoint.method} {endpoint.format_path}" for endpoint in ENDPOINTS} == set(RULES)


@pytest.mark.parametrize("route", RULES)
async def test_each_role_may_call_what_the_table_says_and_nothing_else(running, body_of_job, route):
    least, about = RULES[route]
    # Those who are refused come first, so that nothing has changed for those who come after.
    callers = {
        None: ANYBODY,
        "viewer": VIEWER,
        "stranger": LEAD,
        "bob": USER,
        "alice": USER,
        "lead": LEAD,
        "root": ADMIN,
    }
    async with running() as world, world.client("alice") as alice:
        for name, role in callers.items():
            job = await world.job(alice, f"for-{name}")
            slot = (await job.ask("rollout", wait_s=0)).json()["slot"]
            method, _, path = route.partition(" ")
            path = path.format(
                job=job.id, slot=slot, session=job.session, node="h1/gpu0-1", host="h1", pool="train",
                group="g1", rank=0, key="none",
            )  # fmt: skip
            body = body_of_job(f"by-{name}") if route == "POST /v1/jobs" else BODIES.get(route)
            before = world.driver.durable_seq
            async with world.client(name) as caller:
                answer = await caller.request(method, path, json=body, params=QUERIES.get(route))
            if ORDER.index(role) < ORDER.index(least):
                expected = 401 if name is None else 403
            elif about == "job" and name == "stranger":
                expected = 404
            elif about == "job" and name == "bob" and least == USER:
                expected = 403
            else:
                assert answer.status_code not in (401, 403), (name, answer.text)
                continue
            assert answer.status_code == expected, (name, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
            assert world.driver.durable_seq == before, f"{name} was refused, and something has changed"


async def test_to_a_stranger_a_foreign_job_and_no_job_look_the_same(running):
    async with running() as world, world.client("alice") as alice, world.client("stranger") as stranger:
        await world.job(alice, "hers")
        foreign, none = await stranger.get("/v1/jobs/j1"), await stranger.get("/v1/jobs/j2")
        assert foreign.status_code == none.status_code == 404
        assert foreign.json()["detail"].replace("j1", "j2") == none.json()["detail"]
        assert (await stranger.get("/v1/jobs")).json()["items"] == []
        assert (await stranger.get("/v1/slots", params={"job": "j1"})).status_code == 404


async def test_a_job_is_found_by_its_name_within_the_callers_owner_only(running):
    async with running() as world, world.client("alice") as alice, world.client("stranger") as stranger:
        mine, theirs = await world.job(alice, "math"), await world.job(stranger, "math")
        assert (await alice.get("/v1/jobs/math")).json()["job"] == mine.id
        assert (await stranger.get("/v1/jobs/math")).json()["job"] == theirs.id
        async with world.client("root") as root:
            ambiguous = await root.get("/v1/jobs/math")
            assert ambiguous.status_code == 403
            assert mine.id in ambiguous.json()["detail"]


async def test_a_user_cannot_end_a_colleagues_run_by_registering_its_name(running, body_of_job):
    async with running() as world, world.client("alice") as alice, world.client("bob") as bob:
        await world.job(alice, "math")
        answer = await bob.post("/v1/jobs", json=body_of_job("math", replace=True))
        assert answer.status_code == 403
        assert world.state.jobs["j1"].user == "alice"
        assert world.state.jobs["j1"].run == 1


async def test_owner_and_user_come_from_the_key_and_a_body_cannot_say_them(running, body_of_job):
    async with running() as world, world.client("alice") as alice:
        answer = await alice.post("/v1/jobs", json=body_of_job("math", owner="others"))
        assert answer.status_code == 422
        assert answer.json()["data"]["field"] == "owner"
        view = (await alice.post("/v1/jobs", json=body_of_job("math"))).json()
        assert (view["owner"], view["user"]) == ("team", "alice")


async def test_at_the_unix_socket_the_uid_is_owner_and_user_and_root_is_admin(running, body_of_job):
    async with running() as world, world.on_socket(54321) as nobody, world.on_socket(0) as root:
        view = (await nobody.post("/v1/jobs", json=body_of_job("math"))).json()
        assert (view["owner"], view["user"]) == ("uid54321", "uid54321")
        assert (await nobody.get("/v1/keys")).status_code == 403
        assert (await root.get("/v1/keys")).status_code == 200
        assert (await root.get(f"/v1/jobs/{view['job']}")).status_code == 200
    async with running() as world, world.on_socket(os.getuid()) as own:
        assert (await own.get("/v1/keys")).status_code == 200


async def test_a_wrong_key_is_401_at_the_unix_socket_too(running):
    async with running() as world, world.on_socket(0) as root:
        answer = await root.get("/v1/jobs", headers={"Authorization": "Bearer rmx_00000000_nonsense"})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("sent", ["", "Bearer", "Bearer ", "Basic eDp5", "Bearer rmx", "Bearer rmx__x", "Bearer \xff"])
async def test_whatever_stands_for_a_key_and_is_none_is_401(running, sent):
    async with running() as world, world.client(None) as client:
        answer = await client.get("/v1/jobs", headers=[(b"authorization", sent.encode("latin-1"))])
        assert answer.status_code == 401


async def test_a_key_works_from_its_making_until_it_is_revoked_and_its_secret_is_told_once(running, capsys):
    async with running() as world, world.client("root") as root:
        made = (await root.post("/v1/keys", json={"owner": "team", "user": "dan", "role": "viewer"})).json()
        secret = made["secret"]
        assert secret.startswith(f"rmx_{made['key']}_")
        world.secrets["dan"] = secret
        async with world.client("dan") as dan:
            assert (await dan.get("/v1/jobs")).status_code == 200
            listed = await root.get("/v1/keys")
            assert made["key"] in listed.text
            kept = [str(key) for key in await world.journal.list_keys()]
            for text in (listed.text, *kept, str(await world.journal.read(0, 1000))):
                assert secret not in text
                assert secret.split("_", 2)[2] not in text
            assert (await root.delete(f"/v1/keys/{made['key']}")).json()["revoked"] is True
            assert (await dan.get("/v1/jobs")).status_code == 401
        said = capsys.readouterr()
        assert secret not in said.out + said.err


async def test_without_required_keys_whoever_reaches_the_port_is_an_operator(running):
    async with running(access={"require_keys": False}) as world, world.client(None) as client:
        assert (await client.get("/v1/keys")).status_code == 200
