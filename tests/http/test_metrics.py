"""What Prometheus scrapes: right, bounded, and readable by its own parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollmuxd.daemon.access.keys import Role
from rollmuxd.daemon.journal.store import DISK_FULL

pytestmark = pytest.mark.asyncio


async def scrape(client):
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_counters_follow_the_facts_and_gauges_the_state(running):
    async with running() as world, world.client() as client:
        job = await world.job(client, states={"rollout": {"gpu_gb": 1, "ram_gb": 1}})
        slot = (await job.ask("rollout")).json()
        figures = await scrape(client)
        assert figures["rollmux_gpus", ("pool", "rollout")] == 2
        assert figures["rollmux_gpus_running", ("pool", "rollout")] == 2
        assert figures["rollmux_gpus_held", ("pool", "train")] == 0
        assert figures["rollmux_nodes", ("pool", "train"), ("status", "up")] == 1
        assert figures["rollmux_nodes", ("pool", "train"), ("status", "lost")] == 0
        assert figures["rollmux_jobs", ("owner", "team"), ("status", "admitted")] == 1
        assert figures["rollmux_switch_seconds_count", ("kind", "load")] == 1
        assert figures["rollmux_slot_wait_seconds_count", ("owner", "team")] == 1
        # Prometheus sees no rise in a series that begins with a one: an alert on the first loss needs the zero before.
        for how in ("lost", "faulted"):
            assert figures["rollmux_slots_ended_total", ("how", how), ("owner", "team")] == 0
        assert figures["rollmux_switches_failed_total", ("kind", "park")] == 0
        world.clock.not_before(world.clock.now() + 50)
        await job.give_back(slot)
        await world.settle()  # sinks come after those who wait
        figures = await scrape(client)
        assert figures["rollmux_slots_ended_total", ("how", "released"), ("owner", "team")] == 1
        assert figures["rollmux_gpus_running", ("pool", "rollout")] == 0
        await job.ask("rollout")
        await client.delete(f"/v1/jobs/{job.id}")
        await world.settle()
        ended = await scrape(client)
        assert ended["rollmux_slots_ended_total", ("how", "revoked"), ("owner", "team")] == 1
        assert figures["rollmux_gpu_seconds_used_total", ("owner", "team")] >= 2 * 0.05
        calls = ("route", "/v1/slots/{slot}/release"), ("status", "200")
        assert figures["rollmux_http_requests_total", ("method", "POST"), *calls] == 1


async def test_a_journal_that_is_full_or_could_not_be_tended_is_told_by_readyz(running, tmp_path):
    async with running() as world, world.client() as client:
        world.journal.path = tmp_path / "journal.sqlite3"
        world.journal.path.touch()

        class Care:
            trouble = ""

        object.__setattr__(world.services, "today", Care())
        assert (await scrape(client))["rollmux_journal_retention_failed",] == 0
        assert (await client.get("/readyz")).json()["reason"] == ""
        Care.trouble = "fact 5 is damaged: the path and the rest are for those who may read the log"
        assert (await scrape(client))["rollmux_journal_retention_failed",] == 1
        ready = await client.get("/readyz")
        assert ready.status_code == 200
        assert "rollmuxd journal check" in ready.json()["reason"]
        assert "fact 5" not in ready.text
        world.journal.tight = True
        assert (await client.get("/readyz")).json()["reason"].startswith(DISK_FULL)


async def test_neither_jobs_nor_paths_that_people_make_up_become_labels(running):
    async with running() as world, world.client() as client:
        await world.job(client, "math-7b")
        for path in ("/v1/made-up-1", "/v1/made-up-2", "/v1/jobs/made-up-3"):
            await client.get(path)
        await client.request("BREW", "/v1/made-up-4")
        await client.request("BREW", "/v1/jobs")
        text = (await client.get("/metrics")).text
        for word in ("made-up", "math-7b", "j1", "BREW"):
            assert word not in text


async def test_no_series_tells_when_a_counter_was_made(running):
    async with running() as world, world.client() as client:
        await world.job(client)
        for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
            assert "_created" not in (await client.get("/metrics", headers={"accept": accept})).text


async def test_series_of_single_jobs_are_those_that_the_caller_may_see(running):
    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        job = await world.job(client, "math-7b", slo=2.0)
        world.state.jobs[job.id].progress.finished = 8
        name = ("job", "math-7b"), ("owner", "team")
        assert ("rollmux_job_credit_seconds", *name) in await scrape(client)
        assert ("rollmux_job_credit_seconds", *name) not in await scrape(stranger)


async def owners_of(client):
    return {value for name in await scrape(client) for key, value in name[1:] if key == "owner"}


async def test_of_owners_a_key_sees_its_own_and_a_monitors_key_all(running):
    async with running(owners={"others": {}, "guests": {}}) as world, world.client() as alice:
        for name, owner in (("watch", "monitoring"), ("guest", "guests"), ("mate", "team")):
            await world.add_key(name, owner, name, Role.VIEWER)
        for name, owner in (("newcomer", "newcomers"), ("watcher", "monitoring")):
            await world.add_key(name, owner, name, Role.USER)
        job = await world.job(alice, slo=2.0)
        await job.ask("rollout")
        async with world.client("stranger") as stranger:
            await world.job(stranger)
        seen = {}
        for name in ("root", "watch", "alice", "mate", "stranger", "guest", "newcomer"):
            async with world.client(name) as client:
                seen[name] = await owners_of(client)
                figures = await scrape(client)
                assert figures["rollmux_gpus", ("pool", "rollout")] == 2, "the inventory is everybody's"
        assert seen["root"] == seen["watch"] == {"team", "others"}
        assert seen["alice"] == seen["mate"] == {"team"}
        assert seen["stranger"] == {"others"}
        assert seen["guest"] == seen["newcomer"] == set(), "of an owner without jobs, too"
        # a monitor's owner that has jobs is an owner like any other
        async with world.client("watcher") as client, world.client("watch") as watch:
            await world.job(client)
            assert await owners_of(watch) == {"monitoring"}
