"""A call that names another journal changes nothing: its ids are those of other jobs here."""

import pytest

pytestmark = pytest.mark.asyncio
REGISTRATION = {
    "name": "a",
    "phases": [{"name": "rollout", "pools": ["rollout"]}, {"name": "train", "pools": ["train"]}],
    "wants": {"rollout": {}, "train": {}},
}
ANOTHER = {"rollmux-journal": "0" * 32}


async def test_a_registration_and_a_session_say_which_journal_it_is(running):
    async with running() as world, world.client() as client:
        registered = (await client.post("/v1/jobs", json=REGISTRATION)).json()
        opened = await client.post(f"/v1/jobs/{registered['job']}/sessions", json={"pid": 1, "host": "h1"})
        assert registered["journal"] == opened.json()["journal"] == world.journal.id


async def test_whatever_a_client_of_another_journal_calls_is_410_and_changes_nothing(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        slot = (await job.ask("rollout")).json()
        before = world.writer.last_seq
        for method, path, body in (
            ("POST", f"/v1/jobs/{job.id}/sessions", {"pid": 9, "host": "h9"}),
            ("POST", f"/v1/sessions/{job.session}/heartbeat", {}),
            ("DELETE", f"/v1/sessions/{job.session}", None),
            ("POST", f"/v1/jobs/{job.id}/slots", {"phase": "train", "request_id": "x", "session": job.session}),
            ("POST", f"/v1/slots/{slot['slot']}/release", {"fence": slot["fence"]}),
            ("DELETE", f"/v1/slots/{slot['slot']}", None),
            ("GET", f"/v1/channel/{job.id}/orders?session={job.session}&rank=0", None),
            ("POST", f"/v1/channel/{job.id}/results", {"session": job.session, "rank": 0, "order": "o1", "ok": True}),
            ("GET", f"/v1/jobs/{job.id}", None),
            ("DELETE", f"/v1/jobs/{job.id}", {}),
        ):
            refused = await client.request(method, path, json=body, headers=ANOTHER)
            assert refused.status_code == 410, path
            assert refused.json()["type"] == "urn:rollmux:problem:another_journal"
            assert "register again" in refused.json()["detail"]
        assert world.writer.last_seq == before


async def test_a_call_that_names_this_journal_or_none_is_answered(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        for headers in ({}, {"rollmux-journal": world.journal.id}):
            beat = await client.post(f"/v1/sessions/{job.session}/heartbeat", json={}, headers=headers)
            assert beat.status_code == 200
