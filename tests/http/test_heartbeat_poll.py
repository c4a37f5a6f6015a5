"""The heartbeat as a long poll: a directive comes when it is due, and not with the next heartbeat."""

import anyio
import pytest
from patience import PATIENCE_S

from rollmuxd.core.inputs import Tick

pytestmark = pytest.mark.asyncio

#: as long as a poll may wait: half a lease
WAIT_S = 30.0
PHASES = [
    {"name": "rollout", "pools": ["rollout"], "seconds": 10, "min_gpus": 1},
    {"name": "train", "pools": ["train"], "seconds": 10},
]


async def two_in_a_group(world, client):
    """One job in its rollout, and another one beside it."""
    first = await world.job(client, "first", phases=PHASES)
    second = await world.job(client, "second", phases=PHASES)
    return first, second, (await first.ask("rollout")).json()


def beat(job, slot, *, done=0, tag="", wait_s=WAIT_S):
    body = {"slot": slot["slot"], "done": done, "total": 100, "tag": tag, "wait_s": wait_s}
    return job.client.post(f"/v1/sessions/{job.session}/heartbeat", json=body)


async def polled(world, job, slot, then, **more):
    """The answer to a poll that is open when ``then`` happens."""
    found = []

    async def poll():
        found.append((await beat(job, slot, **more)).json())

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poll)
            await world.settle()
            assert found == []
            await then()
    return found[0]


async def test_a_tail_is_asked_to_shrink_when_another_job_asks_for_its_turn(running):
    async with running() as world, world.client() as client:
        first, second, slot = await two_in_a_group(world, client)

        async def asks():
            tasks.start_soon(second.ask, "rollout")

        async with anyio.create_task_group() as tasks:
            told = await polled(world, first, slot, asks, done=80)
            tasks.cancel_scope.cancel()

        assert [(it["kind"], it["keep"]) for it in told["directives"]] == [("shrink", ["h1/gpu0"])]
        assert told["tag"]


async def test_what_the_caller_knows_already_is_not_said_again_but_its_end_is(running):
    async with running() as world, world.client() as client:
        first, second, slot = await two_in_a_group(world, client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(second.ask, "rollout")
            await world.settle()
            told = (await beat(first, slot, done=80)).json()
            assert told["directives"][0]["kind"] == "shrink", "a poll that finds news does not wait"
            queued = next(slot.id for slot in world.state.slots.values() if slot.job == second.id)

            async def withdraws():
                assert (await client.delete(f"/v1/slots/{queued}")).status_code == 200

            over = await polled(world, first, slot, withdraws, done=80, tag=told["tag"])
        assert (over["directives"], over["tag"]) == ([], "")


async def test_a_request_that_is_attended_again_is_news_though_no_fact_says_so(running):
    async with running() as world, world.client() as client:
        first, second, slot = await two_in_a_group(world, client)
        assert (await second.ask("rollout", wait_s=0, request_id="r")).json()["status"] == "queued"
        assert (await beat(first, slot, done=80, wait_s=0)).json()["directives"] == [], "nobody attends it"

        async def asks_again():
            tasks.start_soon(lambda: second.ask("rollout", request_id="r"))

        async with anyio.create_task_group() as tasks:
            told = await polled(world, first, slot, asks_again, done=80)
            tasks.cancel_scope.cancel()
        assert told["directives"][0]["kind"] == "shrink"


async def test_a_slot_that_is_revoked_is_to_stop_at_once(running):
    async with running() as world, world.client() as client, world.client("root") as root:
        first, _, slot = await two_in_a_group(world, client)

        async def revoke():
            assert (await root.post(f"/v1/slots/{slot['slot']}/revoke")).status_code == 200

        told = await polled(world, first, slot, revoke)
        assert told["directives"][0]["kind"] == "stop"


async def test_a_poll_ends_when_its_time_is_over_or_the_daemon_stops(running):
    async with running() as world, world.client() as client:
        first, _, slot = await two_in_a_group(world, client)
        assert (await beat(first, slot, wait_s=0.01)).json()["directives"] == []

        async def drain():
            world.writer.drain()

        assert (await polled(world, first, slot, drain))["directives"] == []


async def test_an_open_poll_renews_its_lease_when_it_comes_and_not_while_it_waits(running):
    """Else a client whose machine is gone would keep its slot for as long as its group is busy."""
    async with running() as world, world.client() as client:
        first, second, slot = await two_in_a_group(world, client)
        seen = []

        async def asks():
            seen.append(world.writer.scheduler.context.timers.seen[first.session])
            await anyio.sleep(0.05)
            await world.writer.submit(Tick())
            tasks.start_soon(second.ask, "rollout")

        async with anyio.create_task_group() as tasks:
            await polled(world, first, slot, asks, done=80)
            assert world.writer.scheduler.context.timers.seen[first.session] == seen[0]
            tasks.cancel_scope.cancel()


async def test_an_owner_whose_calls_wait_already_is_answered_at_once_and_refused_nothing(running):
    async with running(limits={"max_facts_waiting": 2}) as world, world.client() as client, world.client("bob") as bob:
        first, _, slot = await two_in_a_group(world, client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                lambda: bob.get("/v1/facts", params={"after": world.writer.durable_seq, "wait_ms": 60_000})
            )
            await world.settle()
            with anyio.fail_after(PATIENCE_S):
                assert (await beat(first, slot)).json()["directives"] == []
            tasks.cancel_scope.cancel()


async def test_an_open_poll_is_one_of_its_owners_waiting_calls(running):
    async with running(limits={"max_facts_waiting": 1}) as world, world.client() as client:
        first, _, slot = await two_in_a_group(world, client)
        full = []

        async def reads():
            read = await client.get("/v1/facts", params={"after": world.writer.durable_seq, "wait_ms": 1})
            full.append(read.status_code)
            world.writer.drain()

        await polled(world, first, slot, reads)
        assert full == [429]
