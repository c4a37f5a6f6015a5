"""The whole: a real daemon, two jobs, engines that would see a GPU used twice. And ``attach`` by itself."""

import re
from types import SimpleNamespace

import pytest

from rollmuxd_demo.children import Children
from rollmuxd_gateway import demo
from rollmuxd_gateway.picture import _slots, picture

#: httpcore leaves the socket to be collected that finds no daemon yet
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.mark.e2e
@pytest.mark.slow
def test_two_jobs_release_their_tails_and_every_response_is_right(tmp_path):
    shape = demo.Shape(iterations=2, requests=16, median=150.0, sigma=0.8, step_ms=20.0, max_tokens=500, train_s=0.2)
    with Children() as children:
        part = demo.Part(tmp_path / "part", children, shape, release=True)
        result = part.run()
    assert (result["responses"], result["wrong"]) == (64, 0)
    assert result["violations"] == []
    assert part.tails(), "no rollout was asked to release its tail"


def test_a_rollout_that_was_asked_and_released_nothing_is_a_problem():
    good = {
        "wall_ratio": 1.6,
        "rollouts": 8,
        "asked": 7,
        "released": 7,
        "unreleased": [],
        "directive_after_crossing_ms": 200,
        "released_before_end_s": [1.0] * 7,
        "drain_ms_p50": 30,
        "identical": True,
        "violations": [],
    }
    assert demo.problems(good) == []
    fewer = {**good, "released": 6, "released_before_end_s": [1.0] * 6}
    (problem,) = demo.problems({**fewer, "unreleased": ["accepted"]})
    assert "1 of the 7 rollouts that were asked" in problem
    assert demo.problems({**fewer, "unreleased": ["not_worth_it"]}) == [], "the gateway said why"


def test_of_a_rollout_that_was_asked_and_kept_its_gpus_it_is_said_why():
    asked = {"directive_at": 1.0, "shrinks": []}
    rollouts = [
        {"shrinks": []},
        {**asked, "shrinks": [(2.0, 1)]},
        asked,
        {**asked, "verdicts": ["no_room", "not_worth_it"]},
    ]
    assert demo.unreleased(rollouts) == ["ended", "not_worth_it"]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_loop_that_knows_one_url_takes_turns_by_its_traffic_and_can_be_drawn(tmp_path):
    shape = demo.Shape(iterations=2, requests=8, median=80.0, sigma=0.5, max_tokens=300, train_s=0.2)
    with Children() as children:
        part = demo.Part(tmp_path / "part", children, shape, release=True, link="own")
        result = part.run(demo.JOBS[:1])
    assert (result["responses"], result["wrong"]) == (16, 0)
    assert result["violations"] == []
    assert part.bars["first"]["phases"] == {"rollout": 2, "train": 2}
    drawn = picture(part)
    assert drawn.count("<rect") > 16
    assert "mock/gpu3" in drawn


def test_the_picture_shows_that_a_tail_keeps_the_gpus_that_it_has():
    gpus = ["gpu0", "gpu1"]
    facts = [
        {"fact": "job_registered", "at": 0, "job": "j1", "spec": {"name": "first"}},
        {"fact": "slot_queued", "at": 0, "slot": "s1", "job": "j1"},
        {"fact": "slot_claimed", "at": 1_000, "slot": "s1", "gpus": gpus},
        {"fact": "slot_resized", "at": 2_000, "slot": "s1", "gpus": gpus[:1], "tail": True},
        {"fact": "slot_released", "at": 5_000, "slot": "s1"},
    ]
    part = SimpleNamespace(rollouts=["first"], facts=facts)

    drawn = _slots(part, gpus, lambda at: 1_000 * at)

    assert sorted(re.findall(r'x="([\d.]+)".*?width="([\d.]+)"', drawn)) == [("1000.0", "1000.0"), ("1000.0", "4000.0")]
