"""Of whatever an operator does it is kept who did it, from where, when, and what came of it; of failed logins too."""

import pytest

from rollmuxd.core import facts as f
from rollmuxd.core.apply import apply
from rollmuxd.daemon.access.keys import Role
from rollmuxd.spi import DriverTraits

pytestmark = pytest.mark.asyncio

NODE = "h1/gpu0-1"


async def audited(world):
    return [fact for _, fact in await world.journal.read(0, 10_000) if isinstance(fact, f.Audited)]


async def test_what_an_operator_does_is_in_the_journal_with_name_place_request_and_both_sides_of_it(running):
    async with running() as world, world.client("root") as root:
        before = world.clock.now()
        answer = await root.post(
            f"/v1/nodes/{NODE}/drain", json={"reason": "new fans"}, headers={"X-Request-Id": "r17"}
        )
        assert answer.status_code == 200
        (fact,) = await audited(world)
    assert fact.action == "drain_node"
    assert (fact.who, fact.role, fact.about) == ("ops/op", "admin", NODE)
    assert fact.where == "127.0.0.1:123"
    assert (fact.request_id, fact.reason) == ("r17", "new fans")
    assert (fact.before, fact.after) == ("up", "drained")
    assert before <= fact.at <= world.clock.now()


async def test_at_the_unix_socket_the_place_is_a_uid_and_a_pid(running):
    async with running() as world, world.on_socket(0) as root:
        await root.post(f"/v1/nodes/{NODE}/drain")
        (fact,) = await audited(world)
    assert fact.where == "uid 0, pid 1"


ACTIONS = {
    "drain_node": ("POST", "/v1/nodes/h1/gpu0-1/drain", {"reason": "why"}),
    "drain_host": ("POST", "/v1/hosts/h1/drain", {"reason": "why"}),
    "undrain_node": ("POST", "/v1/nodes/h1/gpu0-1/undrain", None),
    "undrain_host": ("POST", "/v1/hosts/h1/undrain", None),
    "declare_node_clean": ("POST", "/v1/nodes/h1/gpu2-3/declare-clean", {"reason": "why"}),
    "declare_host_clean": ("POST", "/v1/hosts/h1/declare-clean", {"reason": "why"}),
    "revoke_slot": ("POST", "/v1/slots/{slot}/revoke", {"reason": "why"}),
    "pause_job": ("POST", "/v1/jobs/{job}/pause", None),
    "end_job": ("DELETE", "/v1/jobs/{job}", {"reason": "why"}),
    "add_key": ("POST", "/v1/keys", {"owner": "team", "user": "dan", "expires_s": 3600}),
    "revoke_key": ("DELETE", "/v1/keys/{key}", None),
}


@pytest.mark.parametrize("action", ACTIONS)
async def test_every_operator_action_is_audited_in_the_same_commit_as_what_it_did(running, action):
    method, path, body = ACTIONS[action]
    async with running() as world, world.client("root") as root, world.client("alice") as alice:
        job = await world.job(alice)
        slot = (await job.ask("rollout")).json()["slot"]
        await world.add_key("dan", "team", "dan", Role.VIEWER)
        path = path.format(job=job.id, slot=slot, key=world.secrets["dan"].split("_")[1])
        seen = world.writer.durable_seq
        answer = await root.request(method, path, json=body)
        assert answer.status_code < 300, answer.text
        said = [fact for fact in await audited(world) if fact.action == action]
        assert said, "nothing was written down"
        assert {(fact.who, fact.role) for fact in said} == {("ops/op", "admin")}
        if body and "reason" in body:
            assert {fact.reason for fact in said} == {"why"}
        new = await world.journal.read(seen, 100)
        assert new, "it was not durable when the answer came"


async def test_who_acts_on_anothers_job_is_written_down_and_who_acts_on_ones_own_is_not(running, body_of_job):
    async with running() as world, world.client("lead") as lead, world.client("alice") as alice:
        job = await world.job(alice)
        await alice.post(f"/v1/jobs/{job.id}/pause")
        await alice.post(f"/v1/jobs/{job.id}/resume")
        assert await audited(world) == []
        await lead.post(f"/v1/jobs/{job.id}/pause")
        await lead.post("/v1/jobs", json=body_of_job("math", replace=True))
        paused, replaced = await audited(world)
    assert (paused.action, paused.about, paused.role) == ("pause_job", job.id, "lead")
    assert "paused" in paused.after
    assert (replaced.action, replaced.about) == ("register_job", "team/math")
    assert "team/alice" in replaced.before
    assert "team/lea" in replaced.after


async def test_a_process_that_the_daemon_is_to_start_takes_an_admin_and_is_written_down(running, body_of_job):
    async with running() as world, world.client("lead") as lead, world.client("root") as root:
        body = body_of_job("math", launch={"argv": ["python", "train.py"]})
        seq = world.writer.durable_seq
        assert (await lead.post("/v1/jobs", json=body)).status_code == 403
        assert world.writer.durable_seq == seq
        assert (await root.post("/v1/jobs", json=body)).status_code == 201
        (started,) = await audited(world)
    assert (started.action, started.who, started.about) == ("register_job", "ops/op", "ops/math")
    assert started.reason == "to be started"


async def test_what_is_refused_is_not_written_down_as_done(running):
    async with running() as world, world.client("root") as root:
        assert (await root.post("/v1/nodes/none/drain")).status_code == 404
        assert (await root.delete("/v1/keys/none")).status_code == 404
        assert await audited(world) == []


async def test_a_failed_login_is_written_down_with_the_keys_id_and_nothing_else_of_what_was_sent(running):
    async with running() as world, world.client(None) as client:
        secret = world.secrets["alice"]
        key_id = secret.split("_")[1]
        for sent in (secret + "x", "rmx_thisisasecret_x", "nonsense"):
            assert (await client.get("/v1/jobs", headers={"Authorization": f"Bearer {sent}"})).status_code == 401
        tried = await audited(world)
        assert [fact.who for fact in tried] == [key_id, "", ""]
        assert {fact.action for fact in tried} == {"login_failed"}
        assert {fact.where for fact in tried} == {"127.0.0.1:123"}
        assert "thisisasecret" not in str(tried)
        await client.get("/v1/jobs")  # nobody tried to log in
        assert len(await audited(world)) == len(tried)


async def test_a_thousand_failed_logins_are_a_few_facts_that_count_those_in_between(running):
    at = 0.0
    async with running() as world, world.client(None) as client:
        logins = world.app.routes[0].endpoint.shared.failed_logins
        logins._now, logins._since = lambda: at, at
        for at in (0.0,) * 1000 + (60.0,):  # noqa: B007  (read by the lambda)
            await client.get("/v1/jobs", headers={"Authorization": "Bearer rmx_00000000_x"})
        assert [fact.count for fact in await audited(world)] == [1] * 20 + [981]


async def test_admins_are_shown_what_is_audited_and_others_are_not(running):
    async with running() as world, world.client("root") as root, world.client("lead") as lead:
        await root.post(f"/v1/nodes/{NODE}/drain")
        await root.post(f"/v1/nodes/{NODE}/undrain")
        shown = (await root.get("/v1/facts", params={"audit": "true"})).json()["facts"]
        assert [fact["action"] for fact in shown] == ["drain_node", "undrain_node"]
        assert {fact["fact"] for fact in shown} == {"audited"}
        assert (await lead.get("/v1/facts", params={"audit": "true"})).status_code == 403
        assert "audited" not in (await lead.get("/v1/facts")).text


async def test_a_restart_forgets_nothing_of_it_and_nothing_hangs_on_it(running):
    async with running() as world, world.client("root") as root:
        await root.post(f"/v1/nodes/{NODE}/drain", json={"reason": "new fans"})
        live = world.state
        replayed = type(live)()
        for _, fact in world.journal.facts():
            apply(replayed, fact)
        assert replayed.nodes == live.nodes
        assert replayed.at == live.at


def commits(world):
    """What is appended to the journal from now on, commit by commit."""
    seen, append = [], world.journal.append

    def spied(facts):
        seen.append([fact for _, fact in facts])
        return append(facts)

    world.journal.append = spied
    return seen


def with_who(seen, kind):
    """Who is written down in the commits in which there are such facts."""
    found = [commit for commit in seen if any(isinstance(fact, kind) for fact in commit)]
    assert found, f"there was no {kind.__name__}"
    return [[fact.who for fact in commit if isinstance(fact, f.Audited)] for commit in found]


async def test_who_opens_a_session_on_anothers_job_or_releases_its_slot_stands_in_the_commit_of_that(running):
    async with running() as world, world.client("alice") as alice, world.client("lead") as lead:
        job = await world.job(alice)
        slot = (await job.ask("rollout")).json()
        seen = commits(world)
        fence = (await lead.get(f"/v1/slots/{slot['slot']}")).json()["fence"]
        assert (await lead.post(f"/v1/slots/{slot['slot']}/release", json={"fence": fence})).status_code == 200
        assert with_who(seen, f.SlotReleased) == [["team/lea"]]
        opened = await lead.post(f"/v1/jobs/{job.id}/sessions", json={"pid": 2, "host": "h1"})
        assert with_who(seen, f.SessionOpened) == [["team/lea"]]
        assert (await alice.post(f"/v1/sessions/{job.session}/heartbeat", json={})).status_code == 409
        released, session = await audited(world)
    assert (session.action, session.about, session.role) == ("open_session", job.id, "lead")
    assert session.before.endswith(f"session {job.session}")
    assert session.after.endswith(f"session {opened.json()['session']}")
    assert (released.action, released.about) == ("release_slot", slot["slot"])
    assert released.before == f"running, of job {job.id}"
    assert released.after == f"over, of job {job.id}"


async def test_what_one_does_to_ones_own_job_is_in_no_audit(running):
    async with running() as world, world.client("alice") as alice:
        job = await world.job(alice)
        slot = (await job.ask("rollout")).json()
        for _ in range(2):
            assert (await alice.post(f"/v1/sessions/{job.session}/heartbeat", json={})).status_code == 200
        assert (await job.give_back(slot)).status_code == 200
        assert (await alice.delete(f"/v1/sessions/{job.session}")).status_code == 200
        assert await audited(world) == []


async def test_heartbeats_and_requests_that_are_made_again_are_written_down_once_for_each_who_makes_them(running):
    async with running() as world, world.client("alice") as alice:
        job, other = await world.job(alice), await world.job(alice, "code")
        await other.ask("rollout")
        for name in ("lead", "root", "lead"):
            async with world.client(name) as client:
                for _ in range(3):
                    assert (await client.post(f"/v1/sessions/{job.session}/heartbeat", json={})).status_code == 200
                    body = {"phase": "rollout", "request_id": "r", "session": job.session, "wait_s": 0}
                    assert (await client.post(f"/v1/jobs/{job.id}/slots", json=body)).json()["status"] == "queued"
        said = [(fact.action, fact.who, fact.about) for fact in await audited(world)]
        assert said == [
            ("heartbeat", "team/lea", job.session),
            ("request_slot", "team/lea", job.id),
            ("heartbeat", "ops/op", job.session),
            ("request_slot", "ops/op", job.id),
        ]


async def test_what_was_refused_the_first_time_is_written_down_when_it_is_done(running):
    async with running() as world, world.client("alice") as alice, world.client("lead") as lead:
        job = await world.job(alice)
        body = {"phase": "nonsense", "request_id": "r", "session": job.session, "wait_s": 0}
        assert (await lead.post(f"/v1/jobs/{job.id}/slots", json=body)).status_code >= 400
        assert await audited(world) == []
        assert (await lead.post(f"/v1/jobs/{job.id}/slots", json={**body, "phase": "rollout"})).status_code == 200
        (asked,) = await audited(world)
    assert (asked.action, asked.reason) == ("request_slot", "phase rollout")


class RunsCommands:
    """A driver with options that only admins may give, and one for everybody."""

    traits = DriverTraits()
    admin_options = frozenset({"load", "park"})

    def check(self, state):
        pass


async def test_commands_that_an_admin_has_a_job_run_are_written_down(running, body_of_job):
    options = {"load": ["/bin/true"], "park": ["/bin/true"], "level": 1}
    state = {"driver": "channel", "gpu_gb": 10, "options": options}
    async with running() as world, world.client("root") as root:
        world.services.drivers["channel"] = RunsCommands()
        plain = await root.post("/v1/jobs", json=body_of_job("plain"))
        assert (plain.status_code, await audited(world)) == (201, [])
        answer = await root.post("/v1/jobs", json=body_of_job("math", states={"rollout": state}))
        assert answer.status_code == 201, answer.text
        (said,) = await audited(world)
    assert (said.action, said.who, said.about) == ("register_job", "ops/op", "ops/math")
    assert said.reason == "has states.rollout.options.load, states.rollout.options.park run"


async def test_what_anothers_rank_is_said_to_have_done_is_written_down_once_for_each_order(running):
    async with running() as world, world.client("alice") as alice, world.client("lead") as lead:
        job = await world.job(alice)
        world.hub.dial(job.id, job.session, 0, 1)
        for client in (alice, lead):
            for order in ("o1", "o2", "o1"):
                body = {"session": job.session, "rank": 0, "order": order, "ok": True}
                assert (await client.post(f"/v1/channel/{job.id}/results", json=body)).status_code == 200
        said = [(fact.action, fact.who, fact.about) for fact in await audited(world)]
        assert said == [("result", "team/lea", "o1"), ("result", "team/lea", "o2")]
