"""The feed: in order, complete, and to each what is theirs."""

import asyncio

import anyio
import pytest
from patience import eventually

from rollmuxd.core.facts import Audited, JobRegistered, SlotOver, SlotQueued
from rollmuxd.core.spec import JobSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.access.audience import Audience, wanted
from rollmuxd.daemon.access.gate import Caller
from rollmuxd.daemon.access.keys import Role

pytestmark = pytest.mark.asyncio
#: the longest that a call may wait, and a limit for what comes before that
WAIT_MS, SOONER_S = 60_000, 50


async def read(client, **params):
    return (await client.get("/v1/facts", params=params)).json()


async def test_the_feed_is_the_journal_in_order_and_goes_on_where_it_was_left(running):
    async with running() as world, world.client() as client, world.client("root") as root:
        await (await world.job(client)).ask("rollout")
        whole = (await read(root))["facts"]
        assert [fact["seq"] for fact in whole] == list(range(1, world.writer.durable_seq + 1))
        assert [fact["fact"] for fact in whole][-2:] == ["slot_claimed", "slot_granted"]
        parts, after = [], 0
        while (page := await read(root, after=after, limit=3))["facts"]:
            parts, after = parts + page["facts"], page["last"]
        assert parts == whole


async def test_who_is_to_go_on_elsewhere_is_told_of_what_is_written_down_only(running, monkeypatch):
    """What is not may be taken back, and its number given to another fact: which who goes on after it would miss."""
    async with running() as world, world.client() as client, world.client("root") as root:
        job = await world.job(client)
        append, durable, held = world.journal.append, world.writer.durable_seq, []

        def late(facts):
            held.append((facts, asyncio.get_running_loop().create_future()))
            return held[-1][1]

        monkeypatch.setattr(world.journal, "append", late)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.post, f"/v1/jobs/{job.id}/pause")
            while not held:
                await anyio.sleep(0)
            gone = await root.get("/v1/facts", params={"after": 1_000_000})
            for facts, durable_now in held:
                await append(facts)
                durable_now.set_result(None)
        assert (gone.status_code, gone.json()["data"]["last"]) == (410, durable)


async def test_who_follows_is_woken_by_the_next_fact(running):
    async with running() as world, world.client() as client, world.client("root") as root:
        after = world.writer.durable_seq
        pages = []

        async def follow() -> None:
            pages.append(await read(root, after=after, wait_ms=WAIT_MS))

        with anyio.fail_after(SOONER_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow)
                await world.settle()
                await world.job(client)
        assert pages[0]["facts"][0]["fact"] == "job_registered"


async def test_a_follower_waits_on_while_only_others_have_news_and_is_told_how_far_it_is(running):
    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        after = world.writer.durable_seq
        await (await world.job(client)).ask("rollout")
        page = await read(stranger, after=after, wait_ms=100)
        assert page == {"facts": [], "last": world.writer.durable_seq, "first": 1, "unreadable": []}


async def test_others_than_admins_see_the_inventory_and_their_own_owners_jobs(running):
    async with running() as world, world.client() as alice, world.client("stranger") as eve:
        for client, name in ((alice, "alices-job"), (eve, "eves-job")):
            job = await world.job(client, name)
            slot = (await job.ask("rollout", wait_s=0)).json()
            if slot["status"] == "running":
                await job.give_back(slot)
        seen = (await read(eve))["facts"]
        text = str(seen)
        assert "host_added" in text
        assert "node_up" in text
        assert "eves-job" in text
        assert "alices" not in text
        assert {fact.get("slot") for fact in seen} == {None, "s2"}
        async with world.client("root") as root:
            assert len((await read(root))["facts"]) == world.writer.durable_seq


async def test_a_fact_about_a_slot_that_nobody_remembers_is_shown_to_admins_only():
    belongs, forgotten = Audience(), SlotOver(at=1, slot="s77")
    team, admin = Caller("team", "alice", Role.LEAD, "alice"), Caller("ops", "op", Role.ADMIN, "op")

    def shown(caller):
        return not wanted(caller).isdisjoint(belongs.topics(forgotten, State()))

    assert not shown(team)
    assert shown(admin)
    belongs.topics(JobRegistered(0, "j9", "team", "alice", 1, JobSpec("a", (), ())), State())
    belongs.topics(SlotQueued(1, "s77", "j9", 1, "e1", "train", "r"), State())
    assert shown(team)


async def test_of_one_job_only_what_is_about_it(running):
    async with running() as world, world.client() as client:
        a, b = await world.job(client, "a"), await world.job(client, "b")
        slot = (await a.ask("rollout")).json()
        await b.ask("rollout", wait_s=0)
        await a.give_back(slot)
        await world.settle()
        page, everything = await read(client, job="a"), await read(client)
        kinds = [fact["fact"] for fact in page["facts"]]
        assert {"job_registered", "session_opened", "slot_queued", "slot_granted", "slot_released"} <= set(kinds)
        assert not {"daemon_started", "node_added"} & set(kinds)
        assert {fact["job"] for fact in page["facts"] if "job" in fact} == {a.id}
        assert {fact["slot"] for fact in page["facts"] if "slot" in fact} == {slot["slot"]}
        assert page["last"] == everything["last"]
        assert (await client.get("/v1/facts", params={"job": "nope"})).status_code == 404


async def test_older_facts_are_read_up_to_a_number_and_that_is_not_waited_for(running):
    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        await (await world.job(client)).ask("rollout")
        last = world.writer.durable_seq
        with anyio.fail_after(SOONER_S):
            page = await read(client, after=3, until=7, wait_ms=WAIT_MS)
            assert [fact["seq"] for fact in page["facts"]] == [4, 5, 6, 7]
            assert page["last"] == 7
            # To whom none of them is shown is told how far they went, and no further.
            assert (await read(stranger, after=last - 3, until=last - 1, wait_ms=WAIT_MS))["last"] == last - 1


async def test_who_follows_one_owners_jobs_costs_anothers_hand_overs_nothing(running, monkeypatch):
    """Each who waits was woken by every commit, read the journal itself, found nothing, and waited again."""
    async with running() as world, world.client() as alice, world.client("stranger") as eve:
        mine, job = await world.job(eve, "mine"), await world.job(alice)
        slot = (await job.ask("rollout")).json()
        await world.settle()
        asked, reads = [], []
        facts_after, journal_read = world.writer.facts_after, world.journal.read

        async def counted(*given):
            asked.append(given)
            return await facts_after(*given)

        async def counted_read(*given):
            reads.append(given)
            return await journal_read(*given)

        monkeypatch.setattr(world.writer, "facts_after", counted)
        monkeypatch.setattr(world.journal, "read", counted_read)
        after, pages = world.writer.durable_seq, []
        with anyio.fail_after(SOONER_S):
            async with anyio.create_task_group() as tasks:

                async def one(**params) -> None:
                    pages.append(await read(eve, after=after, wait_ms=WAIT_MS, **params))

                for _ in range(20):
                    tasks.start_soon(lambda: one(job=mine.id))
                await eventually("all of them wait", lambda: len(asked) == 20)
                for _ in range(10):
                    await job.give_back(slot)
                    slot = (await job.ask("rollout")).json()
                await world.settle()
                assert len(asked) == 20, "they were woken"
                commits = world.writer.durable_seq - after
                assert commits > 50
                await mine.ask("rollout", wait_s=0)
        # Now they all have news, and one reading in memory is enough for them all.
        assert [[fact["fact"] for fact in page["facts"]] for page in pages] == [["slot_queued"]] * 20
        assert [page["facts"][0]["seq"] for page in pages] == [after + commits + 1] * 20
        assert reads == []


async def test_who_follows_everything_is_woken_by_what_it_is_shown_only(running):
    async with running() as world, world.client() as alice, world.client("root") as root:
        job, after = await world.job(alice), world.writer.durable_seq
        told = {}
        with anyio.fail_after(SOONER_S):
            async with anyio.create_task_group() as tasks:

                async def one(name, **params) -> None:
                    async with world.client(name) as client:
                        page = await read(client, after=after, wait_ms=WAIT_MS, **params)
                    told[(name, *params)] = [fact["fact"] for fact in page["facts"]]

                for name in ("alice", "viewer", "stranger", "root"):
                    tasks.start_soon(one, name)
                tasks.start_soon(lambda: one("root", audit=True))
                await world.settle()
                await alice.post(f"/v1/jobs/{job.id}/pause")
                await eventually("three of them are told", lambda: len(told) >= 3)
                paused = ["job_paused"]
                assert told == {("alice",): paused, ("viewer",): paused, ("root",): paused}
                await root.post("/v1/nodes/h1/gpu0-1/drain", json={"reason": "a fan"})
        assert told["root", "audit"] == ["audited"]
        assert "node_draining" in told["stranger",]
        assert "audited" not in told["stranger",]


async def test_the_audit_trail_of_days_that_are_deleted_comes_before_that_of_the_others(running, monkeypatch):
    async with running() as world, world.client("root") as root:
        await root.post("/v1/nodes/h1/gpu0-1/drain", json={"reason": "a fan"})
        (did,) = (await read(root, audit=True))["facts"]
        first = did["seq"]

        async def audited(after, limit):
            old = [(seq, Audited(seq, "drain_node", "ops/op")) for seq in (1, 3) if after < seq]
            return old[:limit]

        monkeypatch.setattr(world.journal, "first", first)
        monkeypatch.setattr(world.journal, "audited", audited)
        for after, limit, expected in ((0, 10, [1, 3, first]), (0, 2, [1, 3]), (1, 1, [3]), (3, 10, [first])):
            page = await read(root, after=after, limit=limit, audit=True)
            assert [fact["seq"] for fact in page["facts"]] == expected
            assert page["last"] >= expected[-1]
        assert (await root.get("/v1/facts", params={"after": 1})).status_code == 410


async def test_an_owner_has_so_many_calls_that_wait_for_facts_and_others_have_theirs(running):
    async with running(limits={"max_facts_waiting": 3}) as world, world.client() as alice, world.client("bob") as bob:
        after, pages = world.writer.durable_seq, []
        with anyio.fail_after(SOONER_S):
            async with anyio.create_task_group() as tasks:

                async def one(client) -> None:
                    pages.append(await read(client, after=after, wait_ms=WAIT_MS))

                for client in (alice, alice, bob):
                    tasks.start_soon(one, client)
                await world.settle()
                for client in (alice, bob):
                    full = await client.get("/v1/facts", params={"after": after, "wait_ms": 1})
                    assert full.status_code == 429
                    assert full.json()["type"] == "urn:rollmux:problem:too_many"
                    assert "limits.max_facts_waiting" in full.json()["detail"]
                    assert int(full.headers["retry-after"]) >= 1
                assert (await read(alice, after=after))["last"] == after, "who does not wait is answered"
                async with world.client("stranger") as eve, world.client("root") as root:
                    for other in (eve, root):
                        assert (await other.get("/v1/facts", params={"after": after, "wait_ms": 1})).status_code == 200
                await world.job(alice)
        assert len(pages) == 3
        # Whoever is answered, or hangs up, makes room.
        after = world.writer.durable_seq
        for _ in range(4):
            assert (await alice.get("/v1/facts", params={"after": after, "wait_ms": 1})).status_code == 200
