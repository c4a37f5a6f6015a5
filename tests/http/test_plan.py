"""A plan is what would happen, found out without its happening."""

import asyncio
import hashlib

import anyio
import msgspec
import pytest

from rollmuxd.spi import DriverTraits

pytestmark = pytest.mark.asyncio


def job(name, rollout_s=10.0, train_s=10.0, **more):
    return {
        "name": name,
        "phases": [
            {"name": "rollout", "pools": ["rollout"], "seconds": rollout_s},
            {"name": "train", "pools": ["train"], "seconds": train_s},
        ],
        "wants": {"rollout": {}, "train": {}},
        **more,
    }


async def planned(client, *jobs, **more):
    answer = await client.post("/v1/plan", json={"jobs": list(jobs), **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def digest(world):
    """All that the daemon knows: its state, what it wrote down, and what its policy would decide next."""
    state = msgspec.json.encode(world.state)
    return hashlib.sha256(state).hexdigest(), world.writer.last_seq


async def test_nothing_changes(running):
    async with running() as world, world.client() as client:
        await world.job(client, "first", slo=1.5)
        before = digest(world)
        for more in ({}, {"on": "empty"}, {"pools": {"rollout": {"nodes": 2}, "train": {"nodes": 1}}}):
            await planned(client, job("a"), job("b", slo=1.2), job("c", 100, 100), **more)
        assert digest(world) == before


async def test_what_was_planned_is_what_then_happens(running):
    async with running() as world, world.client() as client:
        await world.job(client, "first")
        jobs = [job("a", 5, 5, slo=3.0), job("b", 8, 2), job("c", 10, 10, slo=1.0)]
        said = (await planned(client, *jobs))["jobs"]
        for plan, body in zip(said, jobs, strict=True):
            real = (await client.post("/v1/jobs", json=body)).json()
            assert (plan["status"], plan["pins"], plan["admission"]) == (
                real["status"],
                real["pins"],
                real["admission"],
            )
        assert [plan["status"] for plan in said] == ["admitted", "admitted", "waiting"]


async def test_a_job_is_told_its_times_its_price_and_its_company(running):
    async with running() as world, world.client() as client:
        await world.job(client, "first")  # 10 + 10 s
        view = await planned(client, job("a", 10, 20, slo=2.0))
        (a,) = view["jobs"]
        assert (a["solo_s"], a["iteration_s"], a["slowdown"], a["promised"]) == (30, 30, 1.0, True)
        assert a["beside"] == ["first"]
        assert a["cost_per_hour"] == 0
        assert a["cost_alone_per_hour"] == 2 * 2.0 + 2 * 5.0
        assert view["cost_per_hour_before"] == view["cost_per_hour_after"] == 14.0
        assert [(slow["name"], slow["before"], slow["after"]) for slow in view["slowed"]] == [("first", 1.0, 1.5)]
        assert [(pool["pool"], pool["used_before"], pool["used_after"]) for pool in view["pools"]] == [
            ("rollout", 1, 1),
            ("train", 1, 1),
        ]


async def test_on_an_empty_inventory_nobody_is_in_the_way(running):
    async with running() as world, world.client() as client:
        await world.job(client, "first", slo=1.0)
        (live,) = (await planned(client, job("a", 20, 20, slo=1.0)))["jobs"]
        view = await planned(client, job("a", 20, 20, slo=1.0), on="empty")
        assert (live["status"], view["jobs"][0]["status"]) == ("waiting", "admitted")
        assert view["cost_per_hour_before"] == 0
        assert view["slowed"] == []


async def test_nodes_that_there_are_not_can_be_planned_on(running):
    async with running(daemon={"policy": "rollmux"}) as world, world.client() as client:
        pools = {
            "rollout": {"nodes": 3, "gpus": 8, "price_per_gpu_hour": 1.85},
            "train": {"nodes": 1, "gpus": 8, "price_per_gpu_hour": 5.28},
        }
        view = await planned(client, *(job(f"j{n}", 10, 3, slo=1.2) for n in range(4)), pools=pools)
        assert [one["status"] for one in view["jobs"]] == ["admitted"] * 3 + ["waiting"]
        # Three share one train node, each on a rollout node of its own: 13 s alone, 13 s together.
        assert [one["slowdown"] for one in view["jobs"][:3]] == [1.0] * 3
        assert view["cost_per_hour_after"] == pytest.approx(3 * 8 * 1.85 + 8 * 5.28)
        assert view["cost_alone_per_hour"] == pytest.approx(3 * 8 * (1.85 + 5.28))


BOUGHT = {
    "rollout": {"nodes": 4, "gpus": 8, "price_per_gpu_hour": 1.85},
    "train": {"nodes": 4, "gpus": 8, "price_per_gpu_hour": 5.28},
}


@pytest.mark.parametrize(
    ("policy", "owned", "counts", "rented"), [("thrift", 228.16, [2, 2], 114.08), ("rollmux", 71.84, [2, 1], 71.84)]
)
async def test_a_plan_has_both_readings_on_owned_nodes_and_on_the_fewest_that_keep_the_promises(
    running, policy, owned, counts, rented
):
    async with running(daemon={"policy": policy}) as world, world.client() as client:
        view = await planned(client, *(job(f"j{n}", 10, 3, slo=2.0) for n in range(4)), pools=BOUGHT)

    assert view["cost_alone_per_hour"] == pytest.approx(228.16)
    assert view["cost_per_hour_after"] == pytest.approx(owned)
    least = view["least"]
    assert [(of["pools"], of["there"]) for of in least["nodes"]] == [(["rollout"], 4), (["train"], 4)]
    assert [of["nodes"] for of in least["nodes"]] == counts
    assert least["cost_per_hour"] == pytest.approx(rented)
    assert least["cost_alone_per_hour"] == pytest.approx(228.16)
    assert (least["gpus"], least["complete"], least["reason"]) == (8 * sum(counts), True, "")
    assert sorted(least["slowdowns"]) == ["j0", "j1", "j2", "j3"]
    assert max(least["slowdowns"].values()) <= 2.0


async def test_the_fewest_nodes_really_keep_the_promises_and_one_node_less_does_not(running):
    jobs = [job(f"j{n}", 10 + n, 8, slo=1.4 + n / 10) for n in range(5)]
    async with running() as world, world.client() as client:
        found = {of["pools"][0]: of["nodes"] for of in (await planned(client, *jobs, pools=BOUGHT))["least"]["nodes"]}

        async def kept(**counts):
            pools = {pool: {**BOUGHT[pool], "nodes": counts[pool]} for pool in BOUGHT}
            plans = (await planned(client, *jobs, pools=pools))["jobs"]
            return all(one["promised"] and one["slowdown"] <= one["slo"] for one in plans)

        assert await kept(**found)
        for pool, count in found.items():
            if count > 1:
                assert not await kept(**{**found, pool: count - 1})


async def test_the_fewest_nodes_are_those_of_the_planned_jobs_alone(running):
    async with running() as world, world.client() as client:
        await world.job(client, "first", slo=1.0)
        view = await planned(client, job("a", 20, 20, slo=1.0))
        assert view["jobs"][0]["status"] == "waiting"
        assert [of["nodes"] for of in view["least"]["nodes"]] == [1, 1]


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        (
            [job("a", slo=1.0), job("b", slo=1.0)],
            "the promises do not hold on all of the 1 rollout and 1 train nodes: b would wait. Plan with more nodes",
        ),
        (
            [job("never", wants={"rollout": {"nodes": 99}, "train": {}})],
            "never would be refused (pool rollout has 1 node",
        ),
        (
            [job("typo", phases=[{"name": "train", "pools": ["tain"]}], wants={"tain": {}})],
            "the pools are rollout, train). Name pools that there are, or plan with more of them (tables",
        ),
        (
            [job("a", None, None, slo=2.0)],
            "jobs a state an slo, and not what their phases take: no promise can be judged. State the seconds of each",
        ),
    ],
)
async def test_where_the_whole_inventory_does_not_keep_the_promises_the_plan_says_why(running, jobs, said):
    async with running() as world, world.client() as client:
        least = (await planned(client, *jobs, least=True))["least"]
        assert said in least["reason"]
        assert least["nodes"] == []


async def test_who_would_wait_is_told_why_and_what_would_let_it_in(running):
    async with running() as world, world.client() as client:
        await world.job(client, "first", slo=1.5)
        (a,) = (await planned(client, job("a", 8, 8, slo=1.15)))["jobs"]
        assert a["reasons"][0]["code"] == "own_slo"
        assert {"slo": 1.25, "was": 1.15} in [wish["data"] for wish in a["wishes"]]


async def test_who_asks_for_too_tight_a_promise_to_share_by_credit_is_told_so_and_what_would_do(running):
    async with running() as world, world.client() as client:
        await world.job(client, "first", slo=1.5)
        (a,) = (await planned(client, job("a", 8, 8, slo=1.05)))["jobs"]
        assert (
            a["reasons"][0]["text"] == "group g1 (first): job a is promised 1.05 times, too little to share by credit"
        )
        assert {"slo": 1.25, "was": 1.05} in [wish["data"] for wish in a["wishes"]]


async def test_who_would_be_refused_is_told_so_and_the_others_are_planned(running):
    async with running() as world, world.client() as client:
        never = job("never", wants={"rollout": {"nodes": 99}, "train": {}})
        first, second = (await planned(client, never, job("a")))["jobs"]
        assert (first["status"], second["status"]) == ("refused", "admitted")
        assert "99 nodes are wanted" in first["reasons"][0]["text"]


async def test_what_registering_refuses_for_its_caller_a_plan_refuses_for_the_same_reason(running):
    class Picky:
        traits, admin_options = DriverTraits(), frozenset({"stop"})

        def check(self, state):
            raise ValueError("level is 3; say 1 or 2")

    async with running() as world, world.client() as client:
        world.services.drivers["channel"] = Picky()
        state = {"driver": "channel", "gpu_gb": 10}
        refused = [
            job("level", states={"rollout": {**state, "options": {"level": 3}}}),
            job("stop", states={"rollout": {**state, "options": {"stop": "now"}}}),
            job("launch", launch={"argv": ["true"]}),
        ]
        view = await planned(client, *refused, job("good"))
        for plan, body in zip(view["jobs"], refused, strict=False):
            real = await client.post("/v1/jobs", json=body)
            assert (plan["status"], plan["reasons"][0]["text"]) == ("refused", real.json()["detail"])
        assert view["jobs"][3]["status"] == "admitted"
        assert "level would be refused" in view["least"]["reason"]


async def test_a_job_whose_name_runs_already_is_planned_as_another(running):
    async with running() as world, world.client() as client:
        await world.job(client, "math")
        view = await planned(client, job("math"))
        assert [(one["name"], one["status"], one["beside"]) for one in view["jobs"]] == [("math", "admitted", ["math"])]


async def test_another_owners_jobs_have_no_names(running):
    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        await world.job(client, "secret-project")
        answer = await stranger.post("/v1/plan", json={"jobs": [job("a", 10, 20)]})
        assert "secret-project" not in answer.text
        assert answer.json()["jobs"][0]["beside"] == [None]
        assert answer.json()["slowed"][0]["name"] == ""


@pytest.mark.parametrize(
    "body",
    [
        {"jobs": []},
        {"jobs": [{"name": "a"}]},
        {"jobs": [job("a")], "on": "mars"},
        {"jobs": [job("a")], "pools": {"rollout": {"nodes": 0}}},
        {"jobs": [job("a")] * 501},
    ],
)
async def test_what_is_no_plan_is_refused_by_name(running, body):
    async with running() as world, world.client() as client:
        answer = await client.post("/v1/plan", json=body)
        assert answer.status_code == 422
        assert answer.json()["data"]["in"] == "body"


async def test_the_loop_goes_on_while_a_plan_is_made(running):
    async with running() as world, world.client() as client:
        pools = {"rollout": {"nodes": 40}, "train": {"nodes": 40}}
        answered = []

        async def plan():
            await planned(client, *(job(f"j{n}", 5 + n % 7, 5, slo=1.5) for n in range(60)), pools=pools)
            answered.append("plan")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(plan)
            await anyio.sleep(0)
            while "plan" not in answered:
                assert (await client.get("/readyz")).status_code == 200
                answered.append("ready")
                await anyio.sleep(0.001)
        assert answered.index("plan") > 1


async def test_while_the_jobs_of_a_plan_are_checked_other_calls_are_answered(running, body_of_job, monkeypatch):
    """A plan has up to 500 jobs, and each can name hundreds of URLs: they are checked a few at a time."""
    monkeypatch.setattr("rollmuxd.daemon.http.limits.SLICE_S", 1e-9)  # one job at a time
    monkeypatch.setattr("rollmuxd.daemon.http.limits.SLICE_PAUSE", 100.0)
    checked = []
    monkeypatch.setattr("rollmuxd.daemon.http.routes.plan.check_spec", lambda spec, *_: checked.append(spec.name))
    async with running() as world, world.client() as client:
        plan = asyncio.create_task(planned(client, *(job(f"job-{number}") for number in range(20))))
        while not checked:
            await asyncio.sleep(0)
        await client.get("/v1/jobs")
        assert len(checked) < 20
        assert [one["name"] for one in (await plan)["jobs"]] == checked
