"""Jobs, sessions, the inventory, the channel: what the routes say of the state."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from functools import partial

import anyio
import pytest
from patience import PATIENCE_S, eventually

from rollmuxd.core.causes import said
from rollmuxd.core.decision import Reason
from rollmuxd.core.inputs import HostEnds, HostObserved
from rollmuxd.core.model import Job, JobStatus, NodeStatus, SessionStatus
from rollmuxd.core.policy import Refusal
from rollmuxd.core.spec import Filler, JobSpec, PhaseSpec, Want
from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import Caller
from rollmuxd.daemon.access.keys import Role
from rollmuxd.daemon.access.visibility import Visibility
from rollmuxd.daemon.hosts.actuator import Seen
from rollmuxd.daemon.http.wait_reasons import THOUGHTS, WaitReasons
from rollmuxd.explain.explainer import Explainer
from rollmuxd.spi import Output

pytestmark = pytest.mark.asyncio

LONGER = [
    {"name": "rollout", "pools": ["rollout"], "seconds": 30},
    {"name": "train", "pools": ["train"], "seconds": 5},
]


async def test_a_placed_job_shows_where_it_sits(running):
    async with running() as world, world.client() as client:
        job = await world.job(client, slo=2.0)
        view = (await client.get(f"/v1/jobs/{job.id}")).json()
        assert view["status"] == "admitted"
        assert view["pins"] == {"rollout": ["h1/gpu0-1"], "train": ["h1/gpu2-3"]}
        assert view["promised"] is True
        assert view["estimates"]["rollout"] == {
            "planned_s": 10.0, "count": 0, "mean_s": None, "p50_s": None, "p95_s": None,
            "estimate_s": 10.0, "estimate_samples": 0,
        }  # fmt: skip
        explained = (await client.get(f"/v1/jobs/{job.id}/explain")).json()
        assert explained["sentences"]


async def test_the_planned_slowdown_is_that_of_the_group_as_it_is_now(running):
    """A job joins a group, and leaves it: each member's plan is another then, whatever it was at its own placement."""
    async with running() as world, world.client() as client:

        async def planned() -> dict[str, float]:
            jobs = (await client.get("/v1/jobs")).json()["items"]
            return {job["name"]: job["planned_slowdown"] for job in jobs if job["status"] == "admitted"}

        await world.job(client, "first", phases=LONGER)
        assert await planned() == {"first": 1.0}
        second = await world.job(client, "second", phases=LONGER)
        assert await planned() == {"first": 1.7143, "second": 1.7143}
        await client.delete(f"/v1/jobs/{second.id}")
        assert await planned() == {"first": 1.0}


async def test_a_job_that_spends_credit_hears_how_slow_it_is_until_when_and_why(running):
    phases = [
        {"name": "rollout", "pools": ["rollout"], "seconds": 10},
        {"name": "train", "pools": ["train"], "seconds": 30},
    ]
    # two trainings make a turn of 60 s, where the promise is 48 s: spare credit lasts five times as long as it is.
    # A move of 30 s and an iteration stay in reserve
    lasts = timedelta(seconds=5 * (0.2 * 40_000 - 1.2 * 30 - 48))
    async with (
        running(policy={"thrift": {"objective": "cost", "promise": "certified"}}) as world,
        world.client() as client,
    ):
        first = await world.job(client, "first", phases=phases, slo=1.2, movable="warm")
        ran = world.state.jobs[first.id].progress  # a thousand iterations, each as fast as alone
        ran.finished, ran.solo_ms, ran.elapsed_ms = 1_000, 40_000_000, 40_000_000
        await world.job(client, "second", phases=phases, slo=2.0, movable="warm")
        began = datetime.now(UTC)
        said = (await client.get(f"/v1/jobs/{first.id}/explain")).json()["sentences"]
        clocks = {f"{at + lasts:%H:%M}" for at in (began, datetime.now(UTC))}
    (slower,) = [sentence for sentence in said if "slower than alone" in sentence]
    assert slower in {
        f"It runs 1.5 times slower than alone until about {at} UTC, because it is 2.22 h ahead of its promise of 1.2."
        for at in clocks
    }


async def test_a_job_that_does_not_fit_waits_with_a_reason_a_position_and_what_would_let_it_in(running):
    async with running() as world, world.client() as client:
        await world.job(client, "first", slo=1.0)
        waiting = (await world.job(client, "second", phases=LONGER, slo=1.0)).id
        view = (await client.get(f"/v1/jobs/{waiting}")).json()
        assert view["status"] == "waiting"
        assert view["waiting"]["position"] == 1
        assert view["waiting"]["reasons"][0]["text"]


async def test_a_list_has_the_first_reason_of_each_that_waits_and_follows_what_happens(running):
    async with running() as world, world.client() as client:
        first = await world.job(client, "first", slo=1.0)
        await world.job(client, "second", phases=LONGER, slo=1.0)

        async def listed():
            return {job["name"]: job["reason"] for job in (await client.get("/v1/jobs")).json()["items"]}

        one = (await client.get("/v1/jobs/second")).json()
        reasons = await listed()
        assert reasons == {"first": "", "second": one["waiting"]["reasons"][0]["text"]}
        assert await listed() == reasons
        await client.request("DELETE", f"/v1/jobs/{first.id}", json={})
        await world.settle()
        assert (await listed())["second"] == ""


async def test_reasons_are_thought_about_anew_after_what_is_decided_and_not_written_down_yet(running, monkeypatch):
    async with running() as world, world.client() as client:
        one, _, three = [await world.job(client, name, slo=1.0, phases=LONGER) for name in ("one", "two", "three")]
        thoughts = []

        def why(explainer, job, now):
            thoughts.append(job)
            return Refusal((Reason("x", f"{len(world.state.waiting)} wait"),))

        monkeypatch.setattr(Explainer, "why_job_waits", why)
        append, now = world.journal.append, world.clock.now()
        monkeypatch.setattr(world.clock, "now", lambda: now)  # all of it within one millisecond
        held = []

        def late(facts):
            held.append((facts, asyncio.get_running_loop().create_future()))
            return held[-1][1]

        monkeypatch.setattr(world.journal, "append", late)
        answers = []

        async def ask(method, url):
            answers.append(await client.request(method, url, json={} if method == "DELETE" else None))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "DELETE", f"/v1/jobs/{three.id}")
            await eventually("the end of a job", lambda: len(held) == 1)
            tasks.start_soon(ask, "GET", "/v1/jobs")
            await eventually("a thought", lambda: thoughts)
            tasks.start_soon(ask, "POST", f"/v1/jobs/{one.id}/pause")
            await eventually("the pause", lambda: len(held) == 2)
            before = len(thoughts)
            tasks.start_soon(ask, "GET", "/v1/jobs")
            await eventually("another thought", lambda: len(thoughts) > before)
            monkeypatch.setattr(world.journal, "append", append)
            for facts, durable in held:
                await append(facts)
                durable.set_result(None)


async def test_the_list_says_why_one_that_has_its_place_waits_for_its_turn(running):
    async with running() as world, world.client() as client:
        first, second = [await world.job(client, name) for name in ("first", "second")]
        await first.ask("rollout")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(second.ask, "rollout", wait_s=60))
            await world.settle()
            listed = {view["name"]: view for view in (await client.get("/v1/jobs")).json()["items"]}
            waits = (await client.get(f"/v1/slots/{listed['second']['slot']}")).json()
            tasks.cancel_scope.cancel()

        assert listed["second"]["phase_since"] == waits["queued_at"]
        assert listed["second"]["status"] == "admitted"
        assert listed["second"]["reason"] == "h1/gpu0 is held by first (rollout, running)"
        assert listed["first"]["reason"] == ""


async def test_who_waits_for_a_node_that_was_taken_out_of_the_configuration_is_told_so(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        node = world.state.nodes["h1/gpu0-1"]
        node.status, node.drain, node.unconfigured = NodeStatus.DRAINED, True, True
        asked = (await job.ask("rollout", wait_s=0)).json()

        said = "the configuration no longer has its nodes h1/gpu0-1, so it is granted nothing there: "
        assert asked["status"] == "queued"
        assert asked["reasons"][0]["text"].startswith(said)
        assert asked["reasons"][0]["data"] == {"nodes": ["h1/gpu0-1"]}
        (listed,) = (await client.get("/v1/jobs")).json()["items"]
        assert listed["reason"].startswith(said)
        assert f"rollmuxd job end {job.id}" in listed["reason"]
        explained = (await client.get(f"/v1/jobs/{job.id}/explain")).json()
        assert explained["sentences"][-1].startswith(f"It waits for rollout: {said}")
        assert explained["reasons"][0]["code"] == "node_gone"
        nodes = (await client.get("/v1/nodes")).json()["items"]
        (gone,) = [
            node["node"] for node in nodes if node["reason"].startswith("it is no longer in the configuration: ")
        ]
        assert gone == "h1/gpu0-1"

        await client.post(f"/v1/jobs/{job.id}/pause")
        explained = (await client.get(f"/v1/jobs/{job.id}/explain")).json()
        assert any(
            sentence.startswith("Node h1/gpu0-1 is not in the configuration, and it stays there: ")
            for sentence in explained["sentences"]
        )


async def test_a_node_out_of_the_configuration_says_what_is_left_to_do(running):
    async with running() as world, world.client() as client:

        async def reason():
            return (await client.get("/v1/nodes/h1/gpu0-1")).json()["reason"]

        job = await world.job(client, states={"rollout": {"gpu_gb": 1}})
        await job.ask("rollout")
        node = world.state.nodes["h1/gpu0-1"]
        node.drain, node.unconfigured = True, True
        assert (await reason()).endswith("put it back, or end the jobs that are placed there")
        world.backends.hold = []
        await client.delete(f"/v1/jobs/{job.id}")
        await world.settle()
        assert (await reason()).endswith("if nothing of any job is left there, rollmuxd node declare-clean h1/gpu0-1")
        for order in world.backends.hold:
            world.backends.done(order)
        await world.settle()
        assert (await reason()).endswith("it goes when the daemon starts again")


async def test_an_explanation_says_that_the_node_is_lost_on_which_a_state_is_being_loaded(running):
    async with running() as world, world.client() as client:
        job = await world.job(client, states={"rollout": {"gpu_gb": 1}})
        world.backends.hold = []
        assert (await job.ask("rollout", wait_s=0)).json()["status"] == "loading"
        world.backends.post(HostObserved("h1", unreachable=said("the line is cut")))
        await world.settle()
        sentences = (await client.get(f"/v1/jobs/{job.id}/explain")).json()["sentences"]
        assert "Node h1/gpu0-1 is lost (the line is cut)." in sentences


async def test_a_thousand_that_wait_cost_a_list_no_more_than_a_few_thoughts(monkeypatch):
    thoughts = []

    class Core:
        state = State()
        context = None

    def why_job_waits(explainer, job, now):
        thoughts.append(job)
        return Refusal((Reason("x", "no room"),))

    monkeypatch.setattr(Explainer, "why_job_waits", why_job_waits)

    def job(number, seconds):
        spec = JobSpec(f"n{number}", (PhaseSpec("rollout", ("rollout",), seconds),), (Want("rollout"),))
        return Job(f"j{number}", "o", "u", spec, number, status=JobStatus.WAITING)

    why, told = WaitReasons(turns=True), Visibility(Core(), Caller("o", "u", Role.ADMIN, "o/u"))

    def of(jobs):
        return [why.first(told, each, 0) for each in jobs]

    assert of([job(n, 10) for n in range(1000)]) == ["no room"] * 1000
    assert len(thoughts) == 1
    assert of([job(n, n) for n in range(1000)]) == ["no room"] * THOUGHTS + [""] * (1000 - THOUGHTS)
    assert len(thoughts) == THOUGHTS


async def test_a_page_has_thought_about_a_few_kinds_of_jobs_only(running, body_of_job, monkeypatch):
    monkeypatch.setattr("rollmuxd.daemon.http.wait_reasons.THOUGHTS", 2)
    async with running() as world, world.client() as client:
        await world.job(client, "first")
        for number in range(4):
            phases = [{"name": "rollout", "pools": ["rollout"], "seconds": 60 + number}]
            body = body_of_job(f"job-{number}", phases=phases, wants={"rollout": {}}, states={}, slo=1.0)
            answer = await client.post("/v1/jobs", json=body)
            assert answer.json()["status"] == "waiting", answer.text
        listed = (await client.get("/v1/jobs?status=waiting")).json()["items"]
        assert [bool(job["reason"]) for job in listed] == [True, True, False, False]


async def test_a_job_of_another_owner_or_a_filler_waits_for_reasons_of_its_own(monkeypatch):
    """It may look like a job of an owner that has all the nodes that it may have."""

    class Core:
        state = State()
        context = None

    def why_job_waits(explainer, job, now):
        return Refusal((Reason("x", f"why {job} waits"),))

    def job(name, owner, filler=None):
        spec = JobSpec(name, (PhaseSpec("rollout", ("rollout",), 10),), (Want("rollout"),), filler=filler)
        return Job(name, owner, "u", spec, 1, status=JobStatus.WAITING)

    monkeypatch.setattr(Explainer, "why_job_waits", why_job_waits)
    why, told = WaitReasons(turns=True), Visibility(Core(), Caller("o", "u", Role.ADMIN, "o/u"))
    jobs = [job("a", "blue"), job("b", "red"), job("c", "red"), job("d", "red", Filler())]
    assert [why.first(told, each, 0) for each in jobs] == [f"why {name} waits" for name in "abbd"]


async def test_while_a_page_is_made_other_calls_are_answered(running, body_of_job, monkeypatch):
    """A page of many items is made a few at a time; each item is shown as it is at that moment."""
    monkeypatch.setattr("rollmuxd.daemon.http.limits.SLICE_S", 1e-9)  # one at a time
    monkeypatch.setattr("rollmuxd.daemon.http.limits.SLICE_PAUSE", 100.0)
    async with running() as world, world.client() as client:
        for number in range(20):
            await client.post("/v1/jobs", json=body_of_job(f"job-{number}"))
        page = asyncio.create_task(client.get("/v1/jobs"))
        while (await client.get("/v1/jobs/j20")).json()["status"] != "ended":
            await client.delete("/v1/jobs/j20")
        assert not page.done()
        listed = (await page).json()["items"]
        assert [job["job"] for job in listed] == [f"j{number}" for number in range(1, 21)]
        assert listed[-1]["status"] == "ended"


async def test_the_same_idempotency_key_is_the_same_run_and_says_so_with_200(running, body_of_job):
    async with running() as world, world.client() as client:
        body = body_of_job("math", idempotency_key="k")
        first, second = [await client.post("/v1/jobs", json=body) for _ in range(2)]
        assert (first.status_code, second.status_code) == (201, 200)
        assert first.json()["job"] == second.json()["job"]
        assert second.json()["run"] == 1


async def test_a_run_whose_process_lives_is_409_with_pid_and_host(running, body_of_job):
    async with running() as world, world.client() as client:
        await world.job(client, "math")
        answer = await client.post("/v1/jobs", json=body_of_job("math"))
        assert answer.status_code == 409
        assert answer.json()["data"] == {"name": "math", "run": 1, "pid": 1, "host": "h1", "started": ""}


async def test_what_can_never_be_met_is_422_and_names_the_shortage(running, body_of_job):
    async with running() as world, world.client() as client:
        answer = await client.post("/v1/jobs", json=body_of_job("big", wants={"rollout": {"nodes": 9}, "train": {}}))
        assert answer.status_code == 422
        assert answer.json()["type"] == "urn:rollmux:problem:impossible"
        assert "rollout" in answer.json()["detail"]


async def test_a_named_node_that_is_not_in_its_pool_is_answered_with_those_that_are(running, body_of_job):
    async with running() as world, world.client() as client:
        nodes = [node for node, it in world.state.nodes.items() if "rollout" in it.pools]
        wants = {"rollout": {"named": ["h1/gpu0-99"]}, "train": {}}
        answer = await client.post("/v1/jobs", json=body_of_job("big", wants=wants))
        assert answer.status_code == 422
        assert answer.json()["detail"] == (
            f"there is no node 'h1/gpu0-99' in pool rollout; its nodes are {', '.join(nodes)}"
        )


async def test_a_number_out_of_its_range_does_not_reach_the_core(running, body_of_job):
    train = {"name": "train", "pools": ["train"]}
    changes = (
        {"wants": {"rollout": {"nodes": 0}, "train": {}}},
        {"wants": {"rollout": {"gpus": -1}, "train": {}}},
        *(
            {"phases": [{"name": "roll", "pools": ["rollout"], it: -1}, train]}
            for it in ("seconds", "gap_s", "min_gpus")
        ),
        {"side": [{"name": "eval", "pools": ["train"], "every": -1}]},
        *({"states": {"train": {it: -1}}} for it in ("gpu_gb", "residual_gb", "ram_gb", "load_s", "park_s")),
        {"states": {"train": {"engine_gpus": -1}}},
        {"ranks": 0},
        {"filler": {"yield_s": 0}},
        {"filler": {"min_run_s": 0}},
    )
    async with running() as world, world.client() as client:
        for change in changes:
            answer = await client.post("/v1/jobs", json=body_of_job("one", **change))
            assert answer.status_code == 422, change
            assert ">=" in answer.json()["detail"] or "at least" in answer.json()["detail"], change
        assert not world.state.jobs


async def test_what_a_registration_leaves_open_is_as_the_configuration_says(running, body_of_job):
    async with running(defaults={"slo": 3.0, "on_loss": "kill"}) as world, world.client() as client:
        await client.post("/v1/jobs", json=body_of_job("one"))
        await client.post("/v1/jobs", json=body_of_job("two", slo=2.0, on_loss="hold", ranks=4))
        one, two = world.state.jobs["j1"].spec, world.state.jobs["j2"].spec
        assert (one.slo, one.on_loss, one.park) == (3.0, "kill", "lazy")
        assert (two.slo, two.on_loss, two.park) == (2.0, "hold", "at_release")


async def test_a_default_of_relaunch_is_for_those_that_can_be_relaunched(running, body_of_job):
    async with running(defaults={"on_loss": "relaunch"}) as world, world.client() as client:
        assert (await client.post("/v1/jobs", json=body_of_job("one"))).status_code == 201
        assert world.state.jobs["j1"].spec.on_loss == "hold"
        asked = await client.post("/v1/jobs", json=body_of_job("two", on_loss="relaunch"))
        assert asked.status_code == 422
        assert "does not say what to start" in asked.json()["detail"]


async def test_only_an_admin_has_processes_started(running, body_of_job):
    async with running() as world, world.client() as client:
        body = body_of_job("one", launch={"argv": ["true"]})
        refused = await client.post("/v1/jobs", json=body)
        assert refused.status_code == 403
        assert "takes role admin" in refused.json()["detail"]
        assert not world.state.jobs


async def test_a_process_that_was_replaced_does_not_end_its_job(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        await client.post(f"/v1/jobs/{job.id}/sessions", json={"pid": 2, "host": "h1"})
        refused = await client.request("DELETE", f"/v1/jobs/{job.id}", json={"session": job.session})
        assert refused.status_code == 409
        assert world.state.jobs[job.id].live
        beat = await client.post(f"/v1/sessions/{job.session}/heartbeat", json={})
        assert beat.status_code == 409


async def test_an_end_that_is_meant_for_a_run_ends_no_newer_one(running, body_of_job):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        replaced = await client.post("/v1/jobs", json=body_of_job("math", replace=True))
        assert replaced.json()["run"] == 2

        refused = await client.request("DELETE", f"/v1/jobs/{job.id}", json={"run": 1})
        assert refused.status_code == 409
        assert "run 1 is not the present one of job math, which is run 2" in refused.json()["detail"]
        assert world.state.jobs[job.id].live

        for _ in range(2):
            ended = await client.request("DELETE", f"/v1/jobs/{job.id}", json={"run": 2})
            assert (ended.status_code, ended.json()["status"]) == (200, "ended")


async def test_no_newer_run_comes_between_the_look_at_which_run_it_is_and_its_end(running, body_of_job):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        _, _, newer = await asyncio.gather(
            client.post("/v1/jobs", json=body_of_job("another")),  # of which the disk is waited for
            client.request("DELETE", f"/v1/jobs/{job.id}", json={"run": 1}),
            client.post("/v1/jobs", json=body_of_job("math", replace=True)),
        )
        assert newer.json()["run"] == 2
        assert world.state.jobs[job.id].live


async def test_output_is_over_only_once_a_piece_was_read_that_has_all_of_it(running, body_of_job, monkeypatch):
    """Whoever follows it stops there: what was printed between the reading and the end would be missing."""
    async with running() as world, world.client("root") as client:
        job = (await client.post("/v1/jobs", json=body_of_job("one", launch={"argv": ["true"]}))).json()["job"]

        async def ends_meanwhile(_, after, limit):
            world.state.jobs[job].launch.over = True
            return Output(b"", after)

        monkeypatch.setattr(world.backends, "output", ends_meanwhile)
        first = (await client.get(f"/v1/jobs/{job}/logs")).json()
        assert (first["launch"], first["over"]) == ("l1", False)
        assert (await client.get(f"/v1/jobs/{job}/logs")).json()["over"]


async def test_who_starts_a_killed_job_again_is_told_when_its_run_is_lost_and_how_to_have_it_now(
    running, body_of_job, monkeypatch
):
    async with running() as world, world.client() as client:
        job = await world.job(client, "alice")
        assert world.state.sessions[job.session].pid == 1
        now = world.clock.now()
        monkeypatch.setattr(world.clock, "now", lambda: now + 12_500)

        answer = await client.post("/v1/jobs", json=body_of_job("alice"))

        assert answer.status_code == 409
        problem = answer.json()
        assert problem["type"] == "urn:rollmux:problem:run_alive"
        said = re.fullmatch(
            r"run 1 of job 'alice' counts as alive: pid 1 on h1, last heard of (\d+) s ago; it is lost in (\d+) s "
            r"unless it is heard of again. If it is gone: `rollmuxd job end alice`, or register with replace=True to "
            r"take its place. To run both, give this one another name",
            problem["detail"],
        )
        assert said, problem["detail"]
        silent, left = map(int, said.groups())
        assert 12 <= silent <= 20
        assert silent + left in (60, 61)


async def test_a_job_that_says_so_has_finished(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        ended = await client.request("DELETE", f"/v1/jobs/{job.id}", json={"reason": "30 steps", "finished": True})
        assert (ended.json()["reason"], ended.json()["finished"]) == ("30 steps", True)


@pytest.mark.parametrize(("phases", "finished", "iterations"), [(4, True, 2), (3, True, 1), (4, False, 1)])
async def test_the_last_iteration_of_a_loop_that_came_to_its_end_counts(running, phases, finished, iterations):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        for phase in ("rollout", "train", "rollout", "train")[:phases]:
            await job.give_back((await job.ask(phase)).json())
        ended = (await client.request("DELETE", f"/v1/jobs/{job.id}", json={"finished": finished})).json()

        assert (ended["iterations"], ended["slowdown"]) == (iterations, 1)
        assert (await client.get("/v1/report")).json()["work"][0]["iterations"] == iterations


async def test_pause_resume_and_end(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        for verb, status in (("pause", "paused"), ("resume", "admitted")):
            answer = await client.post(f"/v1/jobs/{job.id}/{verb}")
            assert (answer.status_code, answer.json()["status"]) == (200, status)
        ended = await client.request("DELETE", f"/v1/jobs/{job.id}", json={"reason": "done"})
        assert (ended.json()["status"], ended.json()["reason"]) == ("ended", "done")
        assert not ended.json()["finished"], "an operator may end it with any words"
        assert (await client.post(f"/v1/jobs/{job.id}/pause")).status_code == 409
        assert (await client.post(f"/v1/jobs/{job.id}/reinstate")).status_code == 409


async def test_a_heartbeat_renews_and_a_closed_session_is_409(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        view = (await client.post(f"/v1/sessions/{job.session}/heartbeat")).json()
        assert view == {"lease_s": 60.0, "directives": [], "tag": ""}
        assert (await client.delete(f"/v1/sessions/{job.session}")).status_code == 200
        assert (await client.post(f"/v1/sessions/{job.session}/heartbeat")).status_code == 409


async def test_a_last_beat_loses_the_job_only_where_it_names_the_sessions_own_process(running, body_of_job):
    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        job = (await client.post("/v1/jobs", json=body_of_job("math"))).json()["job"]
        own = {"pid": 4711, "started": "257040"}
        opened = (await client.post(f"/v1/jobs/{job}/sessions", json={**own, "host": "h1"})).json()
        path = f"/v1/sessions/{opened['session']}/heartbeat"

        for other in ({**own, "pid": 4712}, {**own, "started": "257041"}):
            assert (await client.post(path, json={"gone": other})).status_code == 409
        assert (await client.post(path, json={"gone": {"pid": 4711}})).status_code == 422
        assert (await stranger.post(path, json={"gone": own})).status_code == 404
        assert (await client.post(path)).status_code == 200

        assert (await client.post(path, json={"gone": own})).status_code == 200
        view = (await client.get(f"/v1/jobs/{job}")).json()
        assert view["status"] in {"lost", "ended"}
        assert view["reason"] == "its process (pid 4711 on h1) is gone"
        assert (await client.post(path, json={"gone": own})).status_code == 409


async def test_a_job_whose_heartbeat_is_late_is_shown_as_silent_until_it_comes(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        seen = world.writer.scheduler.context.timers.seen

        async def shown():
            (listed,) = (await client.get("/v1/jobs")).json()["items"]
            return [view["silent_s"] for view in (listed, (await client.get(f"/v1/jobs/{job.id}")).json())]

        assert await shown() == [None, None]
        overview = (await client.get("/v1/overview")).json()
        seen[job.session] -= 40_000  # of a lease of 60 s
        assert all(40 <= silent < 60 for silent in await shown())
        later = (await client.get("/v1/overview", params={"since": overview["tag"]})).json()
        assert 40 <= later["lists"]["jobs"]["items"][0]["silent_s"] < 60, "though nothing has happened"
        await client.post(f"/v1/sessions/{job.session}/heartbeat")
        assert await shown() == [None, None]


async def test_the_explanation_of_a_job_says_that_it_is_silent_and_when_it_is_lost(running, body_of_job):
    async with running() as world, world.client() as client:
        first = await world.job(client, "first")
        phases = [{"name": "rollout", "pools": ["rollout"], "seconds": 60}]
        body = body_of_job("second", phases=phases, wants={"rollout": {}}, states={}, slo=1.0)
        second = (await client.post("/v1/jobs", json=body)).json()
        assert second["status"] == "waiting"
        session = (await client.post("/v1/jobs/second/sessions", json={"pid": 2, "host": "h1"})).json()["session"]
        seen = world.writer.scheduler.context.timers.seen

        async def explained(job):
            sentences = (await client.get(f"/v1/jobs/{job}/explain")).json()["sentences"]
            return [re.sub("[0-9]+ s", "N s", sentence) for sentence in sentences]

        said = "It has been silent for N s: without a heartbeat it is lost in N s."
        for job, of in (("first", first.session), ("second", session)):
            assert said not in await explained(job)
            seen[of] -= 40_000  # of a lease of 60 s
            assert (await explained(job))[1] == said


async def test_lists_come_in_pages_and_are_filtered(running):
    async with running() as world, world.client() as client, world.client("root") as root:
        for number in range(12):
            await world.job(client, f"job{number}")
        async with world.client("stranger") as stranger:
            await world.job(stranger, "foreign")
        seen, after, pages = [], None, 0
        while pages == 0 or after is not None:
            params = {"limit": 5} | ({"after": after} if after else {})
            page = (await root.get("/v1/jobs", params=params)).json()
            seen += [job["job"] for job in page["items"]]
            after, pages = page["next"], pages + 1
        assert seen == [f"j{number}" for number in range(1, 14)]
        assert pages == 3
        assert len((await client.get("/v1/jobs")).json()["items"]) == 12
        assert [job["job"] for job in (await root.get("/v1/jobs?owner=others")).json()["items"]] == ["j13"]
        assert len((await client.get("/v1/jobs?pool=train")).json()["items"]) == 12
        assert (await client.get("/v1/jobs?pool=none")).json()["items"] == []
        assert (await client.get("/v1/jobs?status=ended")).json()["items"] == []


async def test_nodes_hosts_pools_and_groups_show_what_is_held(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        await job.ask("rollout")
        node = (await client.get("/v1/nodes/h1/gpu0-1")).json()
        assert (await client.get("/v1/nodes/h1%2Fgpu0-1")).json() == node
        assert node["status"] == "up"
        assert node["price_per_hour"] == 4.0
        assert [(gpu["holder"], gpu["dirty_by"]) for gpu in node["gpus"]] == [("s1", "j1")] * 2
        assert [host["reachable"] for host in (await client.get("/v1/hosts")).json()["items"]] == [True]
        pools = {pool["pool"]: pool for pool in (await client.get("/v1/pools")).json()["items"]}
        assert pools["rollout"]["gpus_held"] == 2
        assert pools["train"]["gpus_held"] == 0
        group = (await client.get("/v1/groups/g1")).json()
        assert [turn["phase"] for turn in group["schedule"]] == ["rollout", "train"]
        assert group["cost_per_hour"] == 14.0
        assert group["schedule"][0]["name"] == "math"
        async with world.client("stranger") as stranger:
            assert (await stranger.get("/v1/groups/g1")).json()["schedule"][0]["name"] == ""


async def test_a_node_shows_what_was_last_seen_on_its_gpus(running):
    async with running() as world, world.client() as client:
        unseen = (await client.get("/v1/nodes/h1/gpu0-1")).json()["gpus"][0]
        assert (unseen["used_gb"], unseen["processes"], unseen["observed_at"]) == (None, [], None)
        world.backends.seen["h1/gpu0"] = Seen(61_250, ("pid 7 python",), 1_700_000_000_000)
        one, other = (await client.get("/v1/nodes/h1/gpu0-1")).json()["gpus"]
        assert (one["used_gb"], one["processes"]) == (61.25, ["pid 7 python"])
        assert one["observed_at"] == "2023-11-14T22:13:20.000Z"
        assert other["used_gb"] is None


async def test_a_drain_names_the_jobs_that_stay(running):
    async with running() as world, world.client() as client, world.client("root") as root:
        await world.job(client)
        for path in ("nodes/h1/gpu0-1", "hosts/h1"):
            answer = (await root.post(f"/v1/{path}/drain")).json()
            assert answer["jobs"] == [{"job": "j1", "name": "math"}]
        async with world.client("stranger") as stranger:
            assert (await stranger.get("/v1/hosts/h1")).json()["jobs"] == [{"job": "j1", "name": ""}]


async def test_a_group_says_what_keeps_it_from_turning(running):
    async with running() as world, world.client() as client, world.client("root") as root:
        unplanned = [{"name": "rollout", "pools": ["rollout"]}, {"name": "train", "pools": ["train"]}]
        await world.job(client, phases=unplanned)
        assert (await client.get("/v1/groups/g1")).json()["reason"] == "a member's times are still being measured"
        await root.post("/v1/nodes/h1/gpu0-1/drain")
        assert (await client.get("/v1/groups/g1")).json()["reason"].startswith("node h1/gpu0-1 is drain")


async def test_a_drained_node_is_drained_and_a_host_is_all_its_nodes(running):
    async with running() as world, world.client("root") as root:
        assert (await root.post("/v1/nodes/h1/gpu0-1/drain", json={})).json()["status"] == "drained"
        await root.post("/v1/nodes/h1/gpu0-1/undrain")
        await world.settle()  # what is on it is looked at anew
        assert (await root.get("/v1/nodes/h1/gpu0-1")).json()["status"] == "up"
        await root.post("/v1/hosts/h1/drain")
        assert {node["status"] for node in (await root.get("/v1/nodes")).json()["items"]} == {"drained"}
        assert (await root.post("/v1/hosts/h9/drain")).status_code == 404
        assert (await root.post("/v1/nodes/h1/gpu9/drain")).status_code == 404


async def test_a_rank_dials_in_is_told_to_load_and_its_result_is_acknowledged(running):
    async with running() as world, world.client() as client:
        job = await world.job(client, states={"rollout": {"gpu_gb": 10, "ram_gb": 10}})
        line = f"/v1/channel/{job.id}"
        nothing = await client.get(f"{line}/orders", params={"session": job.session, "rank": 0, "wait_s": 0.01})
        assert nothing.json() == {"order": None}
        from rollmuxd.core.model import OrderKind
        from rollmuxd.spi.residency import ChannelCommand

        command = ChannelCommand("o7", OrderKind.LOAD, "rollout", "h1/gpu0-1", ("h1/gpu0", "h1/gpu1"), warm=False)
        told = []

        async def tell() -> None:
            told.extend(await world.hub.tell(job.id, 1, command))

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(tell)
                asked = await client.get(f"{line}/orders", params={"session": job.session, "rank": 0, "wait_s": 30})
                assert asked.json()["order"]["kind"] == "load"
                body = {"session": job.session, "rank": 0, "order": "o7", "ok": False, "error": "no memory"}
                assert (await client.post(f"{line}/results", json=body)).status_code == 200
        assert (told[0].ok, told[0].error) == (False, "no memory")


async def test_results_are_taken_from_ranks_that_the_job_has_and_from_no_others(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)  # of one rank
        line = f"/v1/channel/{job.id}"
        for rank in (1, 9_999):
            body = {"session": job.session, "rank": rank, "order": "o7", "ok": True}
            asked = await client.get(f"{line}/orders", params={"session": job.session, "rank": rank, "wait_s": 0.01})
            said = await client.post(f"{line}/results", json=body)
            assert [answer.status_code for answer in (asked, said)] == [409, 409]
            assert "register the job with ranks=" in asked.json()["detail"]
        assert world.hub.ranks(job.id) == ()
        assert world.hub.last(job.id, "o7") is None


async def test_a_rank_is_on_the_line_while_the_end_of_its_job_is_being_written_down(running, monkeypatch):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        line = f"/v1/channel/{job.id}"
        await client.get(f"{line}/orders", params={"session": job.session, "rank": 0})
        append, written = world.journal.append, asyncio.get_running_loop().create_future()

        def slowly(facts):
            written.add_done_callback(lambda _: append(facts))
            return written

        monkeypatch.setattr(world.journal, "append", slowly)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(client.request, "DELETE", f"/v1/jobs/{job.id}", json={"session": job.session}))
            while world.state.sessions[job.session].status is not SessionStatus.CLOSED:
                await anyio.sleep(0)
            body = {"session": job.session, "rank": 0, "order": "o1", "ok": True}
            told = await client.post(f"{line}/results", json=body)
            asked = await client.get(f"{line}/orders", params={"session": job.session, "rank": 0, "wait_s": 0.01})
            written.set_result(None)
        assert (told.status_code, asked.status_code) == (200, 200)
        assert (await client.get(f"/v1/jobs/{job.id}")).json()["status"] == "ended"


async def test_an_older_session_is_not_on_the_line_any_more(running):
    async with running() as world, world.client() as client:
        job = await world.job(client)
        await client.post(f"/v1/jobs/{job.id}/sessions", json={"pid": 2})
        answer = await client.get(f"/v1/channel/{job.id}/orders", params={"session": job.session, "rank": 0})
        assert answer.status_code == 409


async def test_the_loop_continues_while_a_process_finds_out_what_would_let_a_job_in(running, held_questions):
    explained = []
    async with running() as world, world.client() as client:
        await world.job(client, "first", slo=1.0)
        waiting = (await world.job(client, "second", phases=LONGER, slo=1.0)).id

        async def explain():
            explained.append((await client.get(f"/v1/jobs/{waiting}/explain")).json())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(explain)
            await held_questions.have_begun(1)
            assert (await client.get("/v1/jobs")).status_code == 200
            assert explained == []
            held_questions.let_go()
    assert explained[0]["wishes"]


async def test_a_job_whose_promise_is_not_kept_hears_so_with_each_heartbeat_and_is_shown_so(running, body_of_job):
    async with running() as world, world.client() as client:
        phases = [{"name": "rollout", "pools": ["rollout"]}, {"name": "train", "pools": ["train"]}]
        for name in ("first", "second"):
            made = (await client.post("/v1/jobs", json=body_of_job(name, slo=1.5, phases=phases))).json()
            assert made["status"] == "probing"
        session = (await client.post(f"/v1/jobs/{made['job']}/sessions", json={"pid": 1, "host": "h1"})).json()
        before = (await client.post(f"/v1/sessions/{session['session']}/heartbeat")).json()
        assert before["directives"] == []
        await client.post(f"/v1/jobs/{made['job']}/pause")  # what it is promised is still not known
        paused = (await client.post(f"/v1/sessions/{session['session']}/heartbeat")).json()
        assert paused["directives"] == []
        await client.post(f"/v1/jobs/{made['job']}/resume")
        world.state.jobs[made["job"]].status = JobStatus.ADMITTED  # as when it was measured, and its SLO does not hold
        (told,) = (await client.post(f"/v1/sessions/{session['session']}/heartbeat")).json()["directives"]
        assert (told["kind"], told["slot"]) == ("unpromised", None)
        assert told["reason"].startswith("it asked for slo=1.5, and it is promised nothing")
        assert 'What would help: more nodes, or movable="warm"' in told["reason"]
        shown = (await client.get(f"/v1/jobs/{made['job']}")).json()
        assert shown["unmet"] == told["reason"]


async def test_a_job_on_a_host_that_goes_away_hears_when_and_the_host_shows_it(running, body_of_job):
    async with running() as world, world.client() as client:
        phases = [{"name": "rollout", "pools": ["rollout"]}, {"name": "train", "pools": ["train"]}]
        made = (await client.post("/v1/jobs", json=body_of_job("first", phases=phases))).json()
        session = (await client.post(f"/v1/jobs/{made['job']}/sessions", json={"pid": 1, "host": "h1"})).json()
        heartbeat = f"/v1/sessions/{session['session']}/heartbeat"
        assert (await client.post(heartbeat)).json()["directives"] == []
        world.writer.post(HostEnds("h1", 1_800_000_000_000))
        (told,) = (await client.post(heartbeat)).json()["directives"]
        assert (told["kind"], told["ends_at"]) == ("ends", "2027-01-15T08:00:00.000Z")
        assert (await client.get("/v1/hosts/h1")).json()["ends_at"] == "2027-01-15T08:00:00.000Z"


@pytest.mark.parametrize(
    ("phase", "least"),
    [({"pools": ["rollout"]}, 1), ({"pools": ["rollout"], "min_gpus": 2}, 2), ({"pools": ["rollout", "train"]}, 0)],
    ids=["derived", "stated", "over_both_pools"],
)
async def test_a_phase_on_several_engines_can_begin_and_end_on_one_of_them(running, phase, least):
    async with running() as world, world.client() as client:
        states = {"rollout": {"gpu_gb": 10, "engine_gpus": 1}}
        phases = [{"name": "rollout", "seconds": 10, **phase}, {"name": "train", "pools": ["train"], "seconds": 10}]

        job = await world.job(client, phases=phases, states=states)

        spec = world.state.jobs[job.id].spec
        assert [phase.min_gpus for phase in spec.phases] == [least, 0]
        assert spec.states[0].engine_gpus == 1


async def test_the_pace_of_an_asynchronous_job_is_its_iteration_alone(running, body_of_job):
    async with running() as world, world.client() as client:
        train = {"name": "train", "pools": ["train"], "seconds": 4}
        asks = {"wants": {"train": {"nodes": 1}}, "asynchronous": {"pace_s": 10}}

        made = (await client.post("/v1/jobs", json=body_of_job("first", phases=[train], **asks))).json()

        said = (await client.get(f"/v1/jobs/{made['job']}/explain")).json()["sentences"]
        assert any("its rollouts need 10.0 s for a batch, so a wait of 6.0 s" in sentence for sentence in said), said
        assert any("the 10.0 s that it takes alone" in sentence for sentence in said), said


@pytest.mark.parametrize(
    ("phases", "pace_s", "says"),
    [
        (2, 10, "the job has 2 phases, and an asynchronous job has the one phase train"),
        ({"gap_s": 6}, 10, "phase train says gap_s; leave it out, and say the time of a batch as pace_s"),
        ({"min_gpus": 1}, 10, "phase train says min_gpus"),
        ({}, 0.0001, "pace_s"),
    ],
    ids=["two_phases", "a_gap", "a_part", "no_time"],
)
async def test_an_asynchronous_job_of_another_shape_is_refused(running, body_of_job, phases, pace_s, says):
    async with running() as world, world.client() as client:
        train = {"name": "train", "pools": ["train"], "seconds": 4}
        both = [{"name": "save", "pools": ["train"]}, train]
        asks = {"wants": {"train": {"nodes": 1}}, "asynchronous": {"pace_s": pace_s}}
        cycle = both if phases == 2 else [{**train, **phases}]

        answer = await client.post("/v1/jobs", json=body_of_job("first", phases=cycle, **asks))

        assert answer.status_code == 422
        assert says in answer.json()["detail"]
