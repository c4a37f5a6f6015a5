"""The calls that every iteration makes: asking for the turn, waiting for it, giving it back."""

import json
from functools import partial
from types import SimpleNamespace

import anyio
import pytest
from patience import PATIENCE_S, eventually

from rollmuxd.core.causes import said
from rollmuxd.core.inputs import GpuObservation, OrderFailed
from rollmuxd.core.model import SlotStatus
from rollmuxd.daemon.http.routes import slots

pytestmark = pytest.mark.asyncio
#: the longest that a call may wait, and a limit for what comes before that
WAIT_S, SOONER_S = 300, 200
ENDED = {SlotStatus.OVER, SlotStatus.WITHDRAWN}


async def test_a_job_alone_is_granted_its_slot_at_once_with_a_fence_and_its_gpus(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        slot = (await job.ask("rollout")).json()
        assert slot["status"] == "running"
        assert slot["gpus"] == ["h1/gpu0", "h1/gpu1"]
        assert slot["fence"] == "1.1"
        assert slot["lease_s"] > 50


async def test_the_same_request_id_gets_the_same_slot_and_a_release_can_be_repeated(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        first = (await job.ask("rollout", request_id="a")).json()
        assert (await job.ask("rollout", request_id="a")).json()["slot"] == first["slot"]
        told = [(await job.give_back(first, next={"phase": "train", "request_id": "b"})).json() for _ in range(2)]
        assert told[0]["next"]["phase"] == "train"
        assert told[0]["next"]["status"] == "running"
        assert told[1]["next"]["slot"] == told[0]["next"]["slot"]
        assert (await job.ask("train", request_id="b")).json()["slot"] == told[0]["next"]["slot"]


async def test_a_second_job_waits_and_is_granted_when_the_first_one_releases(running):
    async with running() as world, world.client() as client:
        one, two = await world.job(client, "one"), await world.job(client, "two")
        slot = (await one.ask("rollout")).json()
        answers = []

        async def wait() -> None:
            answers.append(await two.ask("rollout", wait_s=WAIT_S))

        with anyio.fail_after(SOONER_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await eventually("it waits", lambda: world.state.jobs[two.id].queued)
                await world.settle()
                assert not answers
                assert (await one.give_back(slot)).json()["status"] in ("released", "over")
        assert answers[0].json()["status"] == "running"


async def test_waiting_in_vain_answers_queued_with_position_and_reasons_and_detaches(running):
    async with running() as world, world.client() as client:
        one, two = await world.job(client, "one"), await world.job(client, "two")
        await one.ask("rollout")
        queued = (await two.ask("rollout", wait_s=0.05)).json()
        assert queued["status"] == "queued"
        assert queued["position"] is not None
        assert queued["reasons"]
        assert queued["fence"] is None
        assert not world.attached(queued["slot"])


async def test_what_a_slot_without_a_placement_waits_behind_is_what_its_job_does(running):
    async with running() as world, world.client() as client:
        await world.job(client, "first", slo=1.0)
        for ahead, name in enumerate(("second", "third")):
            job = await world.job(client, name, slo=1.0)
            assert (await client.get(f"/v1/jobs/{name}")).json()["waiting"]["position"] == ahead + 1
            assert (await job.ask("rollout", wait_s=0)).json()["position"] == ahead


async def test_a_client_that_hangs_up_while_it_waits_is_detached_and_keeps_its_place(running, send_raw):
    async with running() as world, world.client() as client:
        one, two = await world.job(client, "one"), await world.job(client, "two")
        await one.ask("rollout")
        body = json.dumps({"phase": "rollout", "request_id": "x", "session": two.session, "wait_s": WAIT_S}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        hung_up = anyio.Event()

        async def receive() -> dict[str, object]:
            if messages:
                return messages.pop()
            await hung_up.wait()
            return {"type": "http.disconnect"}

        headers = {"authorization": f"Bearer {world.secrets['alice']}"}
        with anyio.fail_after(SOONER_S):
            async with anyio.create_task_group() as tasks:
                call = partial(send_raw, world.app, "POST", f"/v1/jobs/{two.id}/slots", receive, headers=headers)
                tasks.start_soon(call)
                slot = await eventually("it waits", lambda: world.state.jobs[two.id].queued)
                assert world.attached(slot)
                hung_up.set()
        assert not world.attached(slot)
        assert world.state.slots[slot].status == "queued"


async def test_of_two_calls_for_one_request_the_one_that_leaves_does_not_detach_the_other(running):
    async with running() as world, world.client() as client:
        one, two = await world.job(client, "one"), await world.job(client, "two")
        slot = (await one.ask("rollout")).json()
        stays = []

        async def wait() -> None:
            stays.append(await two.ask("rollout", request_id="same", wait_s=WAIT_S))

        with anyio.fail_after(SOONER_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await eventually("it waits", lambda: world.state.jobs[two.id].queued)
                left = (await two.ask("rollout", request_id="same", wait_s=0.02)).json()
                assert left["status"] == "queued"
                assert world.attached(left["slot"])
                await one.give_back(slot)
        assert stays[0].json()["status"] == "running"


async def test_a_draining_daemon_sends_its_waiters_away_with_503_and_when_to_come_back(running):
    async with running() as world, world.client() as client:
        one, two = await world.job(client, "one"), await world.job(client, "two")
        await one.ask("rollout")
        answers = []

        async def wait() -> None:
            answers.append(await two.ask("rollout", wait_s=WAIT_S))

        with anyio.fail_after(SOONER_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await eventually("it waits", lambda: world.state.jobs[two.id].queued)
                world.writer.drain()
        assert answers[0].status_code == 503
        assert int(answers[0].headers["retry-after"]) >= 1


async def test_a_slot_whose_state_cannot_be_loaded_is_409_with_slot_status_and_reason(running):
    async with running() as world, world.client() as client:
        job = await world.job(client, states={"rollout": {"gpu_gb": 10, "ram_gb": 10}})
        world.backends.fail = "out of memory"
        answer = await job.ask("rollout")
        assert answer.status_code == 409
        problem = answer.json()
        assert problem["type"] == "urn:rollmux:problem:slot_ended"
        assert problem["data"]["slot"] == "s1"
        assert problem["data"]["status"] in ("faulted", "over")
        assert "out of memory" in problem["data"]["reason"]


async def test_a_stale_fence_is_409_and_the_right_one_is_not_told(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        slot = (await job.ask("rollout")).json()
        answer = await job.give_back({**slot, "fence": "1.77"})
        assert answer.status_code == 409
        assert answer.json()["type"] == "urn:rollmux:problem:stale_fence"
        assert slot["fence"] not in answer.text


async def test_gpus_that_no_driver_moves_are_looked_at_before_the_release(running):
    async with running() as world, world.client() as client:
        job = await world.job(client, states={"train": {"gpu_gb": 10, "ram_gb": 10}})
        await job.give_back((await job.ask("rollout")).json())
        assert world.backends.observations == [("h1", ("h1/gpu0", "h1/gpu1"))]
        await job.give_back((await job.ask("train")).json())
        assert len(world.backends.observations) == 1  # its state will be parked, and seen then


async def test_gpus_of_several_hosts_are_looked_at_at_once():
    looked, both = [], anyio.Event()

    async def observe(host, gpus):
        looked.append(host)
        if len(looked) == 2:
            both.set()
        await both.wait()
        return tuple(GpuObservation(gpu, 0) for gpu in gpus)

    call = SimpleNamespace(services=SimpleNamespace(actuator=SimpleNamespace(observe=observe)))
    with anyio.fail_after(PATIENCE_S):
        seen = await slots._observation(call, {"h2": ["h2/gpu0"], "h1": ["h1/gpu0", "h1/gpu1"]})
    assert [gpu.gpu for gpu in seen] == ["h2/gpu0", "h1/gpu0", "h1/gpu1"]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_release_of_a_job_that_parks_at_release_is_answered_when_the_park_has_ended(running, fails):
    async with running() as world, world.client() as client:
        job = await world.job(client, states={"rollout": {"gpu_gb": 10, "ram_gb": 10}}, park="at_release")
        slot = (await job.ask("rollout")).json()
        world.backends.hold = []
        answers = []

        async def release() -> None:
            answers.append(await job.give_back(slot))

        with anyio.fail_after(SOONER_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(release)
                await eventually("it is being parked", lambda: world.backends.hold)
                await world.settle()
                assert len(world.backends.hold) == 1
                assert not answers
                if fails:
                    world.backends.post(OrderFailed(world.backends.hold[0], said("it hangs")))
                else:
                    world.backends.done(world.backends.hold[0])
        assert answers[0].json()["status"] == "over"


async def test_the_fence_is_told_to_those_who_may_act_on_the_job_only(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        slot = (await job.ask("rollout")).json()["slot"]
        seen = {}
        for name in ("root", "lead", "alice", "bob", "viewer"):
            async with world.client(name) as caller:
                seen[name] = (await caller.get(f"/v1/slots/{slot}")).json()["fence"]
        assert seen == {"root": "1.1", "lead": "1.1", "alice": "1.1", "bob": None, "viewer": None}


async def test_a_withdrawn_request_is_never_granted(running):
    async with running() as world, world.client() as client:
        one, two = await world.job(client, "one"), await world.job(client, "two")
        slot = (await one.ask("rollout")).json()
        queued = (await two.ask("rollout", wait_s=0, request_id="q")).json()
        assert (await client.delete(f"/v1/slots/{queued['slot']}")).json()["status"] == "withdrawn"
        await one.give_back(slot)
        again = await two.ask("rollout", wait_s=1, request_id="q")
        assert again.status_code == 409
        assert again.json()["data"]["status"] == "withdrawn"


async def test_an_admin_ends_a_slot_and_its_waiting_holder_learns_it_from_the_heartbeat(running):
    async with running() as world, world.client() as client, world.client("root") as root:
        job = await world.job(client)
        slot = (await job.ask("rollout")).json()["slot"]
        revoked = await root.post(f"/v1/slots/{slot}/revoke", json={"reason": "maintenance"})
        assert revoked.status_code == 200
        beat = await client.post(f"/v1/sessions/{job.session}/heartbeat", json={"slot": slot})
        assert beat.json()["directives"][0]["kind"] == "stop"


@pytest.mark.parametrize("how", ["faulted", "revoked", "released", "withdrawn"])
async def test_who_asks_for_a_slot_that_has_ended_is_told_how(running, how):
    async with running() as world, world.client() as client, world.client("root") as root:
        job = await world.job(client, states={"rollout": {"gpu_gb": 10, "ram_gb": 10}})
        if how == "faulted":
            world.backends.fail = "out of memory"
        other = await world.job(client, "other") if how == "withdrawn" else None
        if other is not None:
            await other.ask("rollout", wait_s=5)
        first = await job.ask("rollout", request_id="q", wait_s=0 if other is not None else 5)
        if how == "revoked":
            await root.post(f"/v1/slots/{first.json()['slot']}/revoke", json={"reason": "maintenance"})
        elif how == "released":
            await job.give_back(first.json())
        elif how == "withdrawn":
            await client.delete(f"/v1/slots/{first.json()['slot']}")
        slots = [slot for slot in world.state.slots.values() if slot.job == job.id]
        await eventually(
            "its GPUs are verified clean, and it is over", lambda: {slot.status for slot in slots} <= ENDED
        )
        answer = await job.ask("rollout", request_id="q")
        assert answer.status_code == 409, answer.text
        data = answer.json()["data"]
        assert data["ended"] == how
        assert (data["granted_at"] is None) == (how in {"faulted", "withdrawn"})


async def test_a_next_that_has_to_wait_is_attended_only_once_somebody_asks_for_it(running):
    async with running() as world, world.client() as client:
        one, two = await world.job(client, "one"), await world.job(client, "two")
        slot = (await one.ask("rollout")).json()
        mine = (await two.ask("rollout", wait_s=0)).json()
        await one.give_back(slot)
        mine = (await two.ask("rollout", request_id=mine["request_id"])).json()
        slot = (await one.ask("train")).json()
        told = (await two.give_back(mine, next={"phase": "train", "request_id": "n"})).json()
        assert told["next"]["status"] == "queued"
        assert not world.attached(told["next"]["slot"])

        async def wait() -> None:
            assert (await two.ask("train", request_id="n", wait_s=WAIT_S)).json()["status"] == "running"

        with anyio.fail_after(SOONER_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await eventually("it waits", lambda: world.attached(told["next"]["slot"]))
                # The release is repeated by a client that has not heard its answer, while it waits already.
                assert (await two.give_back(mine, next={"phase": "train", "request_id": "n"})).status_code == 200
                assert world.attached(told["next"]["slot"])
                await one.give_back(slot)


async def test_a_next_whose_release_is_hung_up_on_while_it_parks_is_granted_to_nobody(running, send_raw):
    """Nobody has heard of it: it would hold the GPUs for a process that does not know that it has them."""
    async with running() as world, world.client() as client:
        one = await world.job(client, "one")
        two = await world.job(client, "two", states={"rollout": {"gpu_gb": 10, "ram_gb": 10}}, park="at_release")
        slot = (await one.ask("rollout")).json()
        mine = (await two.ask("rollout", wait_s=0)).json()
        await one.give_back(slot)
        mine = (await two.ask("rollout", request_id=mine["request_id"])).json()
        slot = (await one.ask("train")).json()
        world.backends.hold = []
        body = json.dumps({"fence": mine["fence"], "next": {"phase": "train", "request_id": "n"}}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        hung_up = anyio.Event()

        async def receive() -> dict[str, object]:
            if messages:
                return messages.pop()
            await hung_up.wait()
            return {"type": "http.disconnect"}

        headers = {"authorization": f"Bearer {world.secrets['alice']}"}
        with anyio.fail_after(SOONER_S):
            async with anyio.create_task_group() as tasks:
                call = partial(
                    send_raw, world.app, "POST", f"/v1/slots/{mine['slot']}/release", receive, headers=headers
                )
                tasks.start_soon(call)
                while not world.backends.hold:
                    await anyio.sleep(0)
                hung_up.set()
        coming = world.state.jobs[two.id].queued
        assert not world.attached(coming)
        world.backends.done(world.backends.hold[0])
        await one.give_back(slot)
        await world.settle()
        assert world.state.slots[coming].status == "queued"
        assert (await two.ask("train", request_id="n")).json()["status"] == "running"
