"""The demo's figures, worked out by hand.

Two jobs with two iterations each, on one rollout pool and one train pool (in seconds):

    rollout   a a . b b a a . . b b .
    train     . . a a a b . a a a . b

    a   rollout 0-2  train 2-5   rollout 5-7  train 7-10
    b   rollout 3-5  train 5-6   rollout 9-11 train 11-12
"""

import pytest

from rollmuxd_demo import measure
from rollmuxd_demo.measure import JobRecord, Phase, RunRecord


def job(name, *phases, sha256="same", rewards=(0.1, 0.5)):
    return JobRecord(
        name,
        iterations=len(phases) // 2,
        rewards=rewards,
        sha256=sha256,
        phases=tuple(
            Phase(name, index // 2, "rollout" if index % 2 == 0 else "train", start, end)
            for index, (start, end) in enumerate(phases)
        ),
    )


A = job("a", (0, 2), (2, 5), (5, 7), (7, 10))
B = job("b", (3, 5), (5, 6), (9, 11), (11, 12))
#: trains as long as a, and samples longer than it trains
C = job("c", (0, 5), (5, 8), (8, 13), (13, 15))
D = job("d", (3, 5), (5, 8), (10, 12), (12, 15))


def facts(*spans, moves=()):
    """The facts of slots: (job, request, release), in seconds."""
    told = [
        {"fact": "job_registered", "at": 0, "job": f"id-{name}", "spec": {"name": name}}
        for name in dict.fromkeys(name for name, _, _ in spans)
    ]
    for number, (name, asked, released) in enumerate(spans):
        told.append({"fact": "slot_queued", "at": round(asked * 1000), "slot": f"s{number}", "job": f"id-{name}"})
        told.append({"fact": "slot_released", "at": round(released * 1000), "slot": f"s{number}"})
    for number, (kind, ended) in enumerate(moves):
        told.append({"fact": "order_issued", "at": 0, "order": f"o{number}", "kind": kind})
        told += [{"fact": "order_ended", "at": 0, "order": f"o{number}"}] if ended else []
    return tuple(told)


def test_the_bound_is_the_busiest_pool_where_jobs_are_short_beside_it():
    # rollout: 4 + 4; train: 6 + 2; each job alone: 10 and 6. Rollout and train tie with 8, the longest job has 10.
    assert measure.lower_bound([A, B]) == measure.Bound(10, "longest")
    assert measure.lower_bound([A, D, B]) == measure.Bound(14, "train")
    assert measure.lower_bound([B, C]) == measure.Bound(15, "longest")
    assert measure.lower_bound([B, B, C]) == measure.Bound(18, "rollout")


def test_a_training_bottleneck_waits_for_the_rollout_before_the_first_training():
    assert measure.first_fill([A, D, B]) == 2


def test_a_rollout_bottleneck_is_left_with_the_shortest_last_training():
    assert measure.first_fill([B, B, C]) == 1


def test_nothing_is_to_be_filled_where_the_longest_job_is_the_bound():
    assert measure.first_fill([A, B]) == 0


def test_utilisation_is_computing_over_wall_time():
    assert measure.utilisation([A, B], 16) == {"rollout": 0.5, "train": 0.5}


def test_a_span_runs_from_the_first_request_to_the_last_release():
    spans = measure.spans(facts(("a", 1, 3), ("b", 2, 4), ("a", 4, 9.5)))

    assert spans == {"a": measure.Span(1, 9.5), "b": measure.Span(2, 4)}
    assert measure.wall(spans) == 8.5


def test_in_turn_the_time_between_jobs_counts_for_nobody():
    assert measure.wall_in_turn(measure.spans(facts(("a", 1, 5), ("b", 7, 10)))) == 7


def test_a_request_that_was_never_released_makes_no_span():
    cut = facts(("a", 1, 5), ("b", 2, 6))[:-1]

    assert list(measure.spans(cut)) == ["a"]


def test_only_moves_that_were_carried_out_are_counted():
    told = facts(moves=[("load", True), ("load", True), ("park", True), ("park", False), ("discard", True)])

    assert measure.switches(told) == {"loads": 2, "parks": 1}


def test_the_scale_makes_the_shortest_phase_long_enough():
    shapes = [{"rollout": 1.0, "train": 2.0}, {"rollout": 0.8, "train": 4.0}]

    # 0.52 s / 0.8 s, and 3 iterations of 7.8 s * 0.65 are 15 s.
    assert measure.choose_scale(shapes, iterations=3) == 0.65
    assert measure.choose_scale(shapes, iterations=3, longer=2) == 1.3


def test_the_scale_is_cut_where_the_jobs_in_turn_would_take_too_long():
    shapes = [{"rollout": 1.0, "train": 3.0}]

    # 100 iterations of 4 s at scale 1 are 400 s, and 60 are allowed.
    assert measure.choose_scale(shapes, iterations=100) == 0.15
    assert measure.choose_scale(shapes, iterations=100, longer=2) == 0.3


def test_the_gain_of_cores_is_against_the_mean_of_each_alone():
    # alone 100 and 120 a second; at once 90 and 108
    assert measure.core_gain([(100, 120, 90, 108)]) == pytest.approx(1.8)


def test_a_disturbed_round_does_not_spoil_the_gain_of_cores():
    undisturbed, disturbed = (100, 100, 90, 90), (10, 100, 90, 90)

    assert measure.core_gain([undisturbed, disturbed, undisturbed]) == pytest.approx(1.8)


def test_a_round_whose_window_was_missed_does_not_count_in_the_gain_of_cores():
    assert measure.core_gain([(0, 0, 90, 108), (100, 120, 90, 108)]) == pytest.approx(1.8)
    assert measure.core_gain([(100, 120, 0, 500), (100, 120, 90, 108)]) == pytest.approx(1.8)


def test_where_every_window_was_missed_the_gain_of_cores_is_not_known():
    assert measure.core_gain([(0, 0, 90, 108)]) is None


def test_the_picture_shows_what_computed_in_the_middle_of_each_cell():
    rows = measure.gantt([A, B], 0, 12, 12)

    def letters(pool):
        return "".join(name or "." for name in rows[pool])

    assert letters("rollout") == "aa.bbaa..bb."
    assert letters("train") == "..aaab.aaa.b"


def test_the_window_of_a_picture_holds_the_first_iterations_of_every_job():
    assert measure.window([A, B], 1) == (0, 6)


def test_the_result_has_every_figure():
    shared = RunRecord((A, B), facts(("a", 0, 10), ("b", 0, 12), moves=[("load", True), ("park", True)]))
    alone = RunRecord(
        (job("a", (0, 2), (2, 5), (5, 7), (7, 10)), job("b", (20, 22), (22, 23), (23, 25), (25, 26))),
        facts(("a", 0, 10), ("b", 20, 26)),
    )

    result = measure.result(shared, alone, scale=0.5, gain=1.9, cores=2)

    assert result["wall_s"] == 12
    assert result["sequential_wall_s"] == 16
    assert result["speedup"] == pytest.approx(16 / 12, abs=1e-4)
    assert (result["lower_bound_s"], result["bound_by"], result["first_fill_s"]) == (10, "longest", 0)
    assert result["ratio_to_bound"] == 1.2
    assert result["utilisation"] == {"rollout": 0.6667, "train": 0.6667}
    assert result["sequential_utilisation"] == {"rollout": 0.5, "train": 0.5}
    assert result["switches"] == {"loads": 1, "parks": 1}
    assert result["weights_identical"] is True
    assert [row["slowdown"] for row in result["jobs"]] == [1.0, 2.0]
    assert result["jobs"][0] == {
        "name": "a",
        "iterations": 2,
        "reward_first": 0.1,
        "reward_last": 0.5,
        "rollout_s": 4,
        "train_s": 6,
        "slowdown": 1.0,
        "sha256": "same",
        "sha256_alone": "same",
    }


def test_weights_that_differ_in_one_job_are_not_identical():
    shared = RunRecord((A, B), facts(("a", 0, 10), ("b", 0, 12)))
    alone = RunRecord((A, job("b", (3, 5), (5, 6), sha256="other")), facts(("a", 0, 10), ("b", 0, 12)))

    assert measure.result(shared, alone, scale=1, gain=None, cores=1)["weights_identical"] is False


def test_without_the_second_run_what_needs_it_is_null():
    result = measure.result(RunRecord((A,), facts(("a", 0, 10))), None, scale=1, gain=None, cores=1)

    assert [result[key] for key in ("sequential_wall_s", "speedup", "weights_identical", "core_gain")] == [None] * 4
    assert result["jobs"][0]["slowdown"] is None


def test_a_jobs_own_record_is_read_as_the_examples_write_it():
    record = {
        "job": "a",
        "iterations": 1,
        "rewards": [0.25],
        "sha256": "f00",
        "phases": [
            {"step": 0, "phase": "rollout", "start": 1.0, "end": 2.5},
            {"step": 0, "phase": "train", "start": 3.0, "end": 4.0},
        ],
    }

    read = JobRecord.read(record)

    assert (read.seconds_on("rollout"), read.seconds_on("train"), read.seconds) == (1.5, 1.0, 2.5)
