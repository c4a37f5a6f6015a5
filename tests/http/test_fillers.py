"""Fillers over HTTP: a loan, a yield that comes at once, a slot that is taken when the time is over."""

import anyio
import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.asyncio

FILLER = {
    "phases": [{"name": "filler", "pools": ["train"]}],
    "states": {"train": {"driver": "vllm", "load_s": 1, "park_s": 1}},
    "filler": {"yield_s": 0.2},
}


async def test_a_filler_hears_at_once_that_a_job_is_due_and_loses_a_slot_that_it_keeps(running):
    async with running() as world, world.client() as client:
        filler = await world.job(client, "filler", wants={"train": {}}, **FILLER)
        slot = (await filler.ask("filler")).json()
        assert slot["status"] == "running"
        shown = (await client.get("/v1/jobs/filler")).json()
        assert (shown["filler"], shown["lent"], shown["group"]) == (True, "h1/gpu2-3", None)

        told = []

        async def poll():
            body = {"slot": slot["slot"], "wait_s": 30.0, "tag": ""}
            told.append((await client.post(f"/v1/sessions/{filler.session}/heartbeat", json=body)).json())

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(poll)
                await world.settle()
                assert not told
                await world.job(client, "due")
        (directive,) = (it for it in told[0]["directives"] if it["kind"] == "yield")
        assert directive["within_s"] == 0.2

        with anyio.fail_after(PATIENCE_S):
            while (await client.get("/v1/jobs/filler")).json()["lent"] is not None:
                await anyio.sleep(0.01)
        over = (await client.get(f"/v1/slots/{slot['slot']}")).json()
        assert over["reason"] == "it did not give way within 0.2 s"


async def test_a_filler_that_cannot_be_stopped_is_refused_and_told_what_helps(running):
    async with running() as world, world.client() as client:
        body = {"name": "f", "wants": {"train": {}}, **FILLER, "states": {}}
        refused = await client.post("/v1/jobs", json=body)
        assert refused.status_code == 422
        assert "driver" in refused.json()["detail"]
        assert "launch" in refused.json()["detail"]


async def test_a_filler_that_waits_is_told_why(running):
    async with running() as world, world.client() as client:
        due = await world.job(client, "due")
        await due.ask("rollout")
        states = {"train": {"driver": "vllm", "ram_gb": 600}}
        filler = await world.job(client, "filler", wants={"train": {}}, **{**FILLER, "states": states})
        assert (await filler.ask("filler", wait_s=0)).json()["status"] == "queued"
        told = (await client.get("/v1/jobs/filler/explain")).json()
        assert [reason["code"] for reason in told["reasons"]] == ["detached", "share"]
        listed = {view["name"]: view for view in (await client.get("/v1/jobs")).json()["items"]}
        assert listed["filler"]["reason"]
        assert listed["due"]["filler"] is False

        large = await world.job(client, "large", wants={"train": {}}, **{**FILLER, "states": states})
        told = (await client.get(f"/v1/jobs/{large.id}/explain")).json()
        assert [reason["code"] for reason in told["reasons"]] == ["no_room"]
