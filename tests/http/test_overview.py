"""One call has what the lists have, each for whom it is; and to ask again costs nothing while nothing happens."""

import pytest

from rollmuxd.daemon.hosts.actuator import Seen
from rollmuxd.daemon.http.routes import overview
from rollmuxd.explain.explainer import Explainer

pytestmark = pytest.mark.asyncio
LISTS = ("pools", "nodes", "hosts", "groups", "jobs")


async def asked(client, **query):
    answer = await client.get("/v1/overview", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_it_has_what_the_lists_have_as_each_caller_sees_them(running):
    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        job = await world.job(client)
        await job.ask("rollout")
        for whoever in (client, stranger):
            seen = await asked(whoever)
            for name in LISTS:
                assert seen["lists"][name] == (await whoever.get(f"/v1/{name}")).json(), name
            assert seen["me"].keys() == (await whoever.get("/v1/me")).json().keys()
        assert [item["name"] for item in (await asked(client))["lists"]["jobs"]["items"]] == ["math"]
        assert (await asked(stranger))["lists"]["jobs"]["items"] == []


async def test_while_nothing_happens_the_tag_is_all_of_the_answer(running):
    async with running() as world, world.client() as client:
        await world.job(client)
        first = await asked(client)
        again = await asked(client, since=first["tag"])
        assert (again["tag"], again["lists"]) == (first["tag"], None)
        await world.job(client, "other")
        later = await asked(client, since=first["tag"])
        assert later["tag"] != first["tag"]
        assert [item["name"] for item in later["lists"]["jobs"]["items"]] == ["math", "other"]


async def test_a_tag_is_good_for_who_got_it_and_for_what_was_asked(running):
    async with (
        running() as world,
        world.client() as client,
        world.client("bob") as bob,
        world.client("stranger") as stranger,
    ):
        await world.job(client)
        tag = (await asked(client))["tag"]
        for whoever in (stranger, bob):
            assert (await asked(whoever, since=tag))["lists"] is not None
        for other in ({"over": "false"}, {"slots": "open"}, {"limit": 1}, {"owner": "team"}):
            assert (await asked(client, since=tag, **other))["lists"] is not None
        assert (await asked(client, since="made up"))["lists"] is not None


async def test_what_was_seen_on_gpus_is_worth_a_new_answer_now_and_then(running):
    async with running() as world, world.client() as client:
        await world.job(client)
        tag = (await asked(client))["tag"]
        for at, news in ((1, False), (2, False), (overview.OBSERVATIONS_MS, True)):
            world.backends.seen["h1/gpu0"] = Seen(7, (), at)
            assert ((await asked(client, since=tag))["lists"] is not None) == news


async def test_slots_are_those_that_are_open_or_hold_gpus_and_a_queued_one_is_not_thought_about(running, monkeypatch):
    async with running() as world, world.client() as client:
        one, other = await world.job(client), await world.job(client, "other")
        done = (await one.ask("rollout")).json()
        await one.give_back(done)
        held = (await other.ask("rollout")).json()["slot"]
        waits = (await one.ask("rollout", wait_s=0)).json()["slot"]
        monkeypatch.setattr(Explainer, "why_slot_waits", None)
        monkeypatch.setattr(Explainer, "slot_position", None)

        async def shown(which):
            lists = (await asked(client, slots=which))["lists"]
            return lists["slots"] and {item["slot"]: item["status"] for item in lists["slots"]["items"]}

        assert await shown("none") is None
        assert await shown("holding") == {held: "running"}
        assert await shown("open") == {held: "running", waits: "queued"}


async def test_jobs_that_are_over_can_be_left_out_and_a_long_list_goes_on_in_its_own_route(running):
    async with running() as world, world.client() as client:
        for name in ("a", "b", "c"):
            await world.job(client, name)
        await client.delete("/v1/jobs/a")
        jobs = (await asked(client, over="false", limit=1))["lists"]["jobs"]
        rest = (await client.get("/v1/jobs", params={"over": "false", "after": jobs["next"]})).json()
        assert [item["name"] for item in (*jobs["items"], *rest["items"])] == ["b", "c"]
        assert len((await asked(client))["lists"]["jobs"]["items"]) == 3
