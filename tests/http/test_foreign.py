"""Another owner's job is an id, in whatever sentence it stands in somebody's way, on whatever route that is said."""

import re

import anyio
import pytest
from patience import PATIENCE_S

from rollmuxd.core.causes import Cause
from rollmuxd.core.model import JobMove, JobStatus, NodeStatus, SlotStatus
from rollmuxd.daemon.hosts.actuator import Seen

pytestmark = pytest.mark.asyncio

#: what the other owner's people must not read of it: a name, and the process that runs it
SECRET, PID = "secret-project", "424242"
NAMED = {"rollout": {"named": ["h1/gpu0-1"]}, "train": {"named": ["h1/gpu2-3"]}}

#: every route that says in sentences how things are, and to whom of a job's owner
READ = (
    "/v1/jobs",
    "/v1/jobs/j2",
    "/v1/jobs/j2/explain",
    "/v1/slots",
    "/v1/slots?job=j2",
    "/v1/nodes",
    "/v1/nodes/h1/gpu0-1",
    "/v1/hosts",
    "/v1/hosts/h1",
    "/v1/groups",
    "/v1/pools",
    "/v1/overview?slots=open",
    "/v1/facts",
    "/v1/facts?job=j2",
    "/v1/report",
    "/v1/me",
    "/metrics",
)


async def a_job(client, name=SECRET, *, pid=int(PID)):
    said = await client.post("/v1/jobs", json={**body(name), "wants": NAMED})
    job = said.json()["job"]
    opened = await client.post(f"/v1/jobs/{job}/sessions", json={"pid": pid, "host": "h1"})
    return job, opened.json()["session"]


def body(name, **more):
    phases = [
        {"name": "rollout", "pools": ["rollout"], "seconds": 10},
        {"name": "train", "pools": ["train"], "seconds": 10},
    ]
    return {"name": name, "phases": phases, "wants": NAMED, **more}


async def ask(client, job, session, phase, **more):
    request = {"phase": phase, "request_id": "r1", "session": session, "wait_s": 0, **more}
    return await client.post(f"/v1/jobs/{job}/slots", json=request)


async def everything_told(client, job, session):
    """All that a stranger's owner is told, by where."""
    told = {path: (await client.get(path)).text for path in READ}
    told["POST slots"] = (await ask(client, job, session, "rollout")).text
    told["plan"] = (await client.post("/v1/plan", json={"jobs": [body("next")]})).text
    told["session"] = (await client.post(f"/v1/jobs/{job}/sessions", json={"pid": 7, "host": "h1"})).text
    return told


def running_beside(world):
    """The other's job runs."""


def overran(world):
    world.state.slots["s1"].overrun_at = 1


def lost_and_not_verified_clean(world):
    world.state.slots["s1"].status = SlotStatus.LOST
    world.state.jobs["j1"].status = JobStatus.LOST


def left_its_bytes(world):
    node = world.state.nodes["h1/gpu0-1"]
    for gpu in node.gpus.values():
        gpu.holder, gpu.dirty_by = None, "j1"


def quarantined_after_it(world):
    node = world.state.nodes["h1/gpu0-1"]
    node.status = NodeStatus.QUARANTINED
    dirty = Cause("not_clean", {"gpus": ["h1/gpu0"]}, Cause("after_release", {"job": "j1"}))
    node.reason = Cause("not_clean_in_time", {"limit_s": 60}, dirty)


def moves_on_its_account(world):
    job = world.state.jobs["j2"]
    job.move = JobMove("g1", dict(job.pins), 1, Cause("times_left_plan", {"job": "j1"}))


def quarantined_beside_it(world):
    job = world.state.jobs["j2"]
    room = Cause("does_not_fit", {"job": "j1", "needed_gb": 70, "gpu_gb": 96})
    job.reason = Cause("residual_memory", {"pool": "rollout", "left_gb": 2, "gpu": "h1/gpu0", "agreed_gb": 1}, room)


def paused_where_it_may_not_fit(world):
    job = world.state.jobs["j2"]
    job.reason = Cause("move_abandoned", cause=Cause("joined", {"job": "j1"}))


@pytest.mark.parametrize(
    "happens",
    [
        running_beside,
        overran,
        lost_and_not_verified_clean,
        left_its_bytes,
        quarantined_after_it,
        moves_on_its_account,
        quarantined_beside_it,
        paused_where_it_may_not_fit,
    ],
    ids=lambda happens: happens.__name__,
)
async def test_in_a_shared_group_the_others_job_is_an_id_in_every_sentence(running, happens):
    async with running() as world, world.client("alice") as alice, world.client("stranger") as stranger:
        hers, its_session = await a_job(alice)
        assert (await ask(alice, hers, its_session, "rollout")).json()["status"] == "running"
        job, session = await a_job(stranger, "mine", pid=7)
        waits = (await ask(stranger, job, session, "rollout")).json()
        assert waits["status"] == "queued"
        assert world.state.jobs[job].group == world.state.jobs[hers].group, "they share a group"
        happens(world)
        world.backends.seen = {"h1/gpu0": Seen(1_000, (f"pid {PID} python (ada)",), 0)}
        told = await everything_told(stranger, job, session)
        for where, text in told.items():
            assert SECRET not in text, f"{where}: {text}"
            assert PID not in text, f"{where}: {text}"
        assert hers in told["/v1/jobs/j2/explain"], "as an id it is named"
        # whoever may know it reads it as ever
        async with world.client("root") as root:
            assert SECRET in (await root.get("/v1/jobs/j2/explain")).text
            assert SECRET in (await root.get("/v1/jobs")).text
            assert PID in (await root.get("/v1/nodes/h1/gpu0-1")).text


async def test_who_waits_for_a_place_reads_no_name_of_those_who_have_one_or_are_before_him(running):
    async with running() as world, world.client("alice") as alice, world.client("stranger") as stranger:
        for name in (SECRET, f"{SECRET}-2"):
            answer = await alice.post("/v1/jobs", json=body(name, slo=1.05))
            assert answer.status_code == 201
        answer = await stranger.post("/v1/jobs", json=body("mine", slo=1.01))
        job = answer.json()["job"]
        assert answer.json()["status"] == "waiting"
        for path in ("", "/explain"):
            told = (await stranger.get(f"/v1/jobs/{job}{path}")).text
            assert SECRET not in told, told
            assert "j1" in told, "what is in the way has an id"
        assert SECRET not in answer.text
        assert SECRET not in (await stranger.get("/v1/jobs")).text
        assert SECRET not in (await stranger.post("/v1/plan", json={"jobs": [body("x", slo=1.01)]})).text
        async with world.client("root") as root:
            assert SECRET in (await root.get(f"/v1/jobs/{job}/explain")).text


async def test_one_owners_list_does_not_answer_with_what_was_thought_for_another(running):
    async with running() as world, world.client("alice") as alice, world.client("stranger") as stranger:
        await alice.post("/v1/jobs", json=body(SECRET, slo=1.05))
        for client in (alice, stranger):
            assert (await client.post("/v1/jobs", json=body("waits", slo=1.01))).json()["status"] == "waiting"
        async with world.client("root") as root:
            assert SECRET in (await root.get("/v1/jobs?status=waiting")).text
        assert SECRET in (await alice.get("/v1/jobs?status=waiting")).text
        assert SECRET not in (await stranger.get("/v1/jobs?status=waiting")).text


async def test_a_refusal_names_no_foreign_job_either(running):
    async with running() as world, world.client("alice") as alice, world.client("stranger") as stranger:
        await a_job(alice)
        job, session = await a_job(stranger, "mine", pid=7)
        slot = (await ask(stranger, job, session, "rollout", wait_s=5)).json()
        kept = world.state.slots[slot["slot"]]
        kept.status, kept.claimed, kept.gpus = SlotStatus.TAIL, ("h1/gpu0", "h1/gpu1"), ("h1/gpu0",)
        gpu = world.state.nodes["h1/gpu0-1"].gpus["h1/gpu1"]
        gpu.holder, gpu.dirty_by = None, "j1"
        answer = await stranger.post(f"/v1/slots/{slot['slot']}/grow", json={"fence": slot["fence"]})
        assert answer.status_code == 409
        assert "cannot have back what it gave" in answer.json()["detail"]
        assert SECRET not in answer.text


async def test_a_word_that_merely_looks_like_a_foreign_jobs_name_stays(running):
    async with running() as world, world.client("alice") as alice, world.client("stranger") as stranger:
        for name in ("rollout", "train", "job"):
            await alice.post("/v1/jobs", json=body(name))
        job, session = await a_job(stranger, "mine", pid=7)
        await ask(stranger, job, session, "rollout")
        told = (await stranger.get(f"/v1/jobs/{job}/explain")).json()["sentences"]
        assert told[0] == "Job mine is admitted."
        assert "rollout: h1/gpu0-1" in told[1]


async def test_facts_of_the_inventory_say_of_whom_a_gpu_is_not_clean_by_id(running):
    async with running() as world, world.client("alice") as alice, world.client("stranger") as stranger:
        hers, session = await a_job(alice)
        slot = (await ask(alice, hers, session, "rollout", wait_s=5)).json()
        world.backends.used_mb = {"h1/gpu0": 50_000}
        await a_job(alice, "beside")
        await alice.post(f"/v1/slots/{slot['slot']}/release", json={"fence": slot["fence"]})
        await alice.delete(f"/v1/jobs/{hers}")
        with anyio.fail_after(PATIENCE_S):
            while "gpus_not_clean" not in (await stranger.get("/v1/facts")).text:
                await anyio.sleep(0.02)
        not_clean = [
            fact for fact in (await stranger.get("/v1/facts")).json()["facts"] if fact["fact"] == "gpus_not_clean"
        ]
        assert not_clean
        assert "after j1" in not_clean[0]["reason"]["text"]
        assert SECRET not in str(not_clean)


async def test_ones_own_words_tell_nothing_of_whether_a_foreign_job_has_a_name(running):
    """Put as the core puts it, a name is shown as it was written, or in the same words whether there is such a job."""
    answers = []
    for name in (SECRET, "no-such-name"):
        said = f"phases of {name} take another time, and {name} needs 3 GB of the GPU"
        async with running() as world, world.client("alice") as alice, world.client("stranger") as stranger:
            await a_job(alice)
            job, session = await a_job(stranger, "mine", pid=7)
            line = f"/v1/channel/{job}"
            await stranger.get(f"{line}/orders", params={"session": session, "rank": 0})
            told = [
                await stranger.get(f"/v1/jobs/{said}"),
                await stranger.get(f"/v1/facts?job={said}"),
                await stranger.post(
                    "/v1/jobs", json={**body("x"), "wants": {"rollout": {"named": [said]}, "train": {}}}
                ),
                await stranger.request("DELETE", f"/v1/jobs/{job}", json={"session": said[:99]}),
                await stranger.post(f"/v1/jobs/{job}/sessions", json={"pid": 9, "host": said}),
                await stranger.post("/v1/jobs", json=body("mine")),
                await stranger.request("DELETE", f"/v1/jobs/{job}", json={"reason": said}),
                await stranger.get(f"/v1/jobs/{job}"),
                await stranger.get(f"/v1/jobs/{job}/explain"),
                await stranger.get("/v1/jobs"),
                await ask(stranger, job, session, "rollout"),
            ]
            facts = (await stranger.get("/v1/facts")).json()["facts"]
            assert world.state.jobs[job].status is JobStatus.ENDED
            answers.append(
                [(answer.status_code, plain(answer.text, name)) for answer in told]
                + [plain(fact["reason"]["text"], name) for fact in facts if fact["fact"] == "job_ended"]
            )
    for one, other in zip(*answers, strict=True):
        assert one == other


def plain(text, name):
    """An answer without what differs between any two."""
    text = re.sub(r'"(request_id|registered_at|now|at|session|journal)":"[^"]*"', "", text)
    return text.replace(name, "NAME").replace("  ", " ")
