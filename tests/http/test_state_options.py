"""What a job tells the drivers of its states: each driver is asked before the job is registered."""

import pytest

from rollmuxd.spi import DriverTraits

pytestmark = pytest.mark.asyncio


class Sleeper:
    """A driver that takes options."""

    traits = DriverTraits()
    admin_options = frozenset({"stop"})

    def check(self, state):
        options = dict(state.options)
        if options.pop("level", 1) not in {1, 2}:
            raise ValueError("level is 3; say 1 or 2")
        options.pop("stop", None)
        if options:
            raise ValueError(f"{', '.join(options)} is not an option")


def states(**options):
    return {"rollout": {"driver": "channel", "gpu_gb": 10, "options": options}}


async def test_options_that_the_driver_knows_are_kept_with_the_state(running):
    async with running() as world, world.client("root") as client:
        world.services.drivers["channel"] = Sleeper()
        job = await world.job(client, states=states(level=2, stop=["/bin/stop", "--now"]))
        assert world.state.jobs[job.id].spec.states[0].options == (("level", 2), ("stop", ("/bin/stop", "--now")))


@pytest.mark.parametrize(
    ("options", "said"), [({"level": 3}, "states.rollout: level is 3; say 1 or 2"), ({"x": "y"}, "x is not an option")]
)
async def test_what_the_driver_refuses_is_never_registered(running, body_of_job, options, said):
    async with running() as world, world.client() as client:
        world.services.drivers["channel"] = Sleeper()
        answer = await client.post("/v1/jobs", json=body_of_job("math", states=states(**options)))
        assert (answer.status_code, said in answer.json()["detail"]) == (422, True), answer.text
        assert not world.state.jobs


async def test_what_is_run_as_the_daemons_user_only_an_admin_may_give(running, body_of_job):
    async with running() as world, world.client() as client:
        world.services.drivers["channel"] = Sleeper()
        answer = await client.post("/v1/jobs", json=body_of_job("math", states=states(stop=["/bin/rm"])))
        assert answer.status_code == 403
        assert "may not give stop" in answer.json()["detail"]
        assert not world.state.jobs


async def test_a_driver_that_takes_no_options_is_not_given_any(running, body_of_job):
    async with running() as world, world.client() as client:
        world.services.drivers["channel"] = object()
        answer = await client.post("/v1/jobs", json=body_of_job("math", states=states(level=1)))
        assert (answer.status_code, "takes no options" in answer.json()["detail"]) == (422, True)
        assert (await client.post("/v1/jobs", json=body_of_job("math", states=states()))).status_code == 201


@pytest.mark.parametrize(
    ("state", "leaves"),
    [({}, 1_000), ({"gpu_gb": 40}, 1_000), ({"gpu_gb": 2}, 500), ({"gpu_gb": 40, "residual_gb": 0}, 0),
     ({"gpu_gb": 40, "residual_gb": 6}, 6_000)],
)  # fmt: skip
async def test_what_a_parked_state_may_leave_is_as_configured_where_the_job_does_not_say(running, state, leaves):
    async with running(defaults={"residual_gb": 1.0}) as world, world.client() as client:
        job = await world.job(client, states={"rollout": state})
        assert world.state.jobs[job.id].spec.states[0].residual_mb == leaves
