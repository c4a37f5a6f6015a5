"""A slot that began on a part of its node is offered the rest, and its call is answered when that is loaded."""

import anyio
import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.asyncio

PHASES = [
    {"name": "rollout", "pools": ["rollout"], "seconds": 10, "min_gpus": 1},
    {"name": "train", "pools": ["train"], "seconds": 10},
]
STATES = {"rollout": {"gpu_gb": 10}}


async def beside_a_tail_that_has_ended(world, client):
    """A job that began on one of two GPUs, beside a tail on the other one, which has ended since."""
    first = await world.job(client, "first", phases=PHASES, states=STATES)
    second = await world.job(client, "second", phases=PHASES, states=STATES)
    tail = (await first.ask("rollout")).json()
    assert (await second.ask("rollout", wait_s=0, request_id="r")).json()["status"] == "queued"
    keep = {"fence": tail["fence"], "keep": ["h1/gpu0"]}
    async with anyio.create_task_group() as tasks:
        found = []

        async def asks():
            found.append((await second.ask("rollout", request_id="r")).json())

        tasks.start_soon(asks)
        await world.settle()
        assert (await client.post(f"/v1/slots/{tail['slot']}/shrink", json=keep)).status_code == 200
    part = found[0]
    assert part["gpus"] == ["h1/gpu1"]
    assert (await first.give_back(tail)).status_code == 200
    await world.settle()
    beat = {"slot": part["slot"], "done": 1, "total": 100}
    told = (await client.post(f"/v1/sessions/{second.session}/heartbeat", json=beat)).json()["directives"]
    assert [(it["kind"], it["gpus"]) for it in told] == [("grow", ["h1/gpu0", "h1/gpu1"])]
    return part


def grow(client, slot):
    return client.post(f"/v1/slots/{slot['slot']}/grow", json={"fence": slot["fence"]})


async def test_the_call_is_answered_when_the_state_is_loaded_onto_the_rest(running):
    async with running() as world, world.client() as client:
        part = await beside_a_tail_that_has_ended(world, client)
        world.backends.hold, grown = [], []

        async def grows():
            grown.append(await grow(client, part))

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(grows)
                tasks.start_soon(grows)
                while not world.backends.hold:
                    await anyio.sleep(0.005)
                await world.settle()
                assert grown == []
                (order,) = world.backends.hold
                assert world.state.orders[order].gpus == ("h1/gpu0",)
                world.backends.done(order)
        assert [it.json()["gpus"] for it in grown] == [["h1/gpu0", "h1/gpu1"]] * 2


async def test_a_load_that_fails_is_409_and_the_slot_goes_on(running):
    async with running() as world, world.client() as client:
        part = await beside_a_tail_that_has_ended(world, client)
        world.backends.fail = "no engine answers"

        with anyio.fail_after(PATIENCE_S):
            refused = await grow(client, part)

        assert refused.status_code == 409
        assert "no engine answers" in refused.json()["detail"]
        assert world.state.slots[part["slot"]].status == "running"
