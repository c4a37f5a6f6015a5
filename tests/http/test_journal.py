"""What callers are told of facts that are not kept any more: never less than there was, without a word."""

import pytest

pytestmark = pytest.mark.asyncio


async def test_facts_that_were_compacted_away_are_410_with_the_first_that_is_there(running):
    async with running() as world, world.client() as client:
        await world.job(client)
        world.journal.first = 5
        page = (await client.get("/v1/facts")).json()
        assert (page["first"], page["facts"][0]["seq"]) == (5, 5)
        assert (await client.get("/v1/facts?after=4")).json()["facts"][0]["seq"] == 5
        gone = await client.get("/v1/facts?after=2")
        assert gone.status_code == 410
        assert gone.json()["type"] == "urn:rollmux:problem:gone"
        assert gone.json()["data"] == {"first": 5}
        assert "facts 3 to 4 were compacted away; continue after 4" in gone.json()["detail"]


@pytest.mark.parametrize("read", [0, 1], ids=["before-the-first-fact", "within-a-page"])
async def test_facts_that_are_compacted_away_while_they_are_read_end_the_page(running, monkeypatch, read):
    async with running() as world, world.client() as client:
        await world.job(client)
        whole, batches = world.writer.facts_after, []

        async def compacted_meanwhile(seq, wait_ms, limit, topics):
            batches.append(seq)
            if len(batches) > read:
                world.journal.first = 5
            return await whole(seq, wait_ms, min(limit, 1), topics)

        monkeypatch.setattr(world.writer, "facts_after", compacted_meanwhile)
        page = (await client.get("/v1/facts")).json()
        assert page["facts"][0]["seq"] == (5 if read == 0 else 1)
        assert page["first"] == 5
        if read:
            assert page["last"] == 1
            assert (await client.get("/v1/facts?after=1")).status_code == 410


async def test_who_knows_of_facts_that_are_not_there_is_told_that_the_journal_is_another(running):
    async with running() as world, world.client() as client:
        await world.job(client)
        last = (await client.get("/v1/facts")).json()["last"]
        assert (await client.get(f"/v1/facts?after={last}")).status_code == 200
        ahead = await client.get(f"/v1/facts?after={last + 1}&wait_ms=60000")
        assert ahead.status_code == 410
        assert ahead.json()["data"] == {"first": 1, "last": last}
        assert "restored from a backup" in ahead.json()["detail"]


async def test_a_report_that_hangs_on_facts_that_are_gone_is_410(running):
    async with running() as world, world.client() as client:
        await world.job(client)
        world.journal.first = 5
        answer = await client.get("/v1/report")
        assert answer.status_code == 410
        assert "the facts before 5 were compacted away" in answer.json()["detail"]
