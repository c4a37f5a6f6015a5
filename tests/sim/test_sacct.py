"""What sharing would have saved is worked out from what a real ``sacct`` (Slurm 22.05) wrote of real jobs.

The jobs of the file took seconds, so a log with iterations of one second goes with it.
"""

from pathlib import Path

import pytest

from rollmuxd.sim.sacct import read, saving
from rollmuxd.sim.training_logs import Step
from rollmuxd.sim.workload import Malformed

FILE = Path(__file__).parent / "data" / "sacct.txt"
HALF = [Step(0.5, 0.5)]
HEAD = "JobID|Partition|Submit|Start|End|ElapsedRaw|AllocTRES|JobName\n"


@pytest.fixture
def written(tmp_path):
    def write(*rows, head=HEAD):
        file = tmp_path / "month.txt"
        file.write_text(head + "".join(f"{row}\n" for row in rows))
        return file

    return write


def row(job, began="2026-10-24T10:00:00", lasted=36_000, gpus="gres/gpu=8", name="grpo", partition="gpu"):
    return f"{job}|{partition}|{began}|{began}|2026-10-25T10:00:00|{lasted}|billing=1,{gpus}|{name}"


def test_rows_become_jobs_and_what_is_no_job_to_share_is_counted_by_reason():
    found = read(FILE)

    assert found.rows == 25
    assert found.left_out == {"step": 12, "no_gpu": 1, "not_started": 1, "one_gpu": 1, "unfinished": 1}
    assert len(found.jobs) == 8
    assert {job.name for job in found.jobs if "|" in job.name} == {"ppo|x=1", "ppo|x=2"}
    (het,) = [job for job in found.jobs if job.name == "grpo-het"]
    assert (het.gpus, het.partitions, het.elapsed_s, het.queued_s) == ((4, 4), ("rollout", "train"), 30, 1.0)


def test_lines_may_end_with_a_bar_as_sacct_p_writes_them(tmp_path):
    ended = tmp_path / "month.txt"
    ended.write_text("".join(f"{line}|\n" for line in FILE.read_text().splitlines()))

    assert read(ended) == read(FILE)


def test_only_jobs_whose_name_matches_are_looked_at():
    found = read(FILE, r"^ppo\|")

    assert [job.name for job in found.jobs] == ["ppo|x=1", "ppo|x=2"]
    with pytest.raises(ValueError, match="is no regular expression"):
        read(FILE, "(")


def test_the_saving_is_that_of_an_account_by_hand():
    said = saving(read(FILE), logs=[HALF], switch_s=0)

    # Two on 4 GPUs for 40 s, two on 4 for 30 s, one on 4+4 for 30 s, one on 2 for 15 s and one, requeued, for 13 s.
    assert said.gpu_hours_was * 3600 == pytest.approx(320 + 240 + 240 + 15 * 2 + 13 * 2)
    # Both pairs share one place each; the last two overlap by 3 s, and share for these.
    assert said.gpu_hours_shared[0] * 3600 == pytest.approx(160 + 120 + 240 + 25 * 2, rel=0.01)
    assert said.gpu_hours_shared[0] == said.gpu_hours_shared[1]
    assert said.slowdown_max == pytest.approx(1.0, abs=0.01)
    assert (said.jobs, said.left_out["short"], said.phases, said.rollout_share) == (7, 1, "log", (0.5, 0.5))


def test_where_phases_are_not_known_the_answer_is_a_range_over_their_shares(written):
    two = read(written(row(1), row(2)))

    wide = saving(two, share=(0.3, 0.9))
    # A rollout of nine tenths leaves no room for another: only the trainer's 4 of 16 GPUs are shared.
    assert 0.15 < wide.saved[0] < 0.25
    assert wide.saved[1] == pytest.approx(0.48, abs=0.03)  # halves interleave, but for loading and parking
    assert wide.gpu_hours_was == 160
    assert wide.phases == "range"
    assert "an iteration takes 300 s, and is rollout and training only" in wide.assumes


def test_a_range_covers_what_each_share_in_it_would_save(written):
    four = read(written(*(row(number) for number in range(4))))

    said = saving(four, share=(0.4, 0.8))
    # Up to 0.7 two jobs share both pools, ever slower; from there on four share a trainer, and save more again.
    apart = [saving(four, share=(point, point)) for point in (0.4, 0.5, 0.6, 0.7, 0.8)]
    assert apart[3].saved[0] < min(apart[2].saved[0], apart[4].saved[0])
    assert said.saved[0] == pytest.approx(min(one.saved[0] for one in apart))
    assert said.saved[1] == pytest.approx(max(one.saved[1] for one in apart))
    assert said.slowdown_max == pytest.approx(max(one.slowdown_max for one in apart))


def test_a_job_is_never_slower_than_its_slo_and_a_tighter_one_saves_no_more(written):
    three = read(written(row(1), row(2), row(3)))

    tight, loose = (saving(three, share=(0.4, 0.6), slo=slo) for slo in (1.0, 2.0))
    assert tight.slowdown_max <= 1.0 + 1e-6
    assert loose.slowdown_max <= 2.0 + 1e-6
    assert tight.saved[0] < loose.saved[0]


def test_jobs_of_other_partitions_and_of_other_widths_do_not_share(written):
    apart = read(written(row(1), row(2, partition="a100"), row(3, gpus="gres/gpu=16")))

    assert saving(apart, share=(0.5, 0.5)).saved == pytest.approx((0, 0), abs=1e-6)


def test_the_gpus_of_a_job_of_one_component_are_split_as_said(written):
    two = read(written(row(1), row(2)))

    said = saving(two, share=(0.5, 0.5), split=0.75)
    assert said.gpu_hours_was == 160
    assert any("on 75% of their GPUs" in line for line in said.assumes)


def test_a_typed_count_beside_the_plain_one_is_not_added_and_alone_it_counts(written):
    found = read(written(row(1, gpus="gres/gpu:h100=8,gres/gpu=8"), row(2, gpus="gres/gpu:a100=2,gres/gpu:h100=4")))

    assert [job.gpus for job in found.jobs] == [(8,), (6,)]


def test_each_run_of_a_requeued_heterogeneous_job_is_one_job(written):
    twice = [row(f"7+{part}", began=f"2026-10-24T1{run}:00:00") for run in (0, 1) for part in (0, 1)]

    assert [(job.gpus, job.began.hour) for job in read(written(*twice)).jobs] == [((8, 8), 10), ((8, 8), 11)]


@pytest.mark.parametrize(
    ("head", "rows", "said"),
    [
        (
            "JobID|Start|End|ElapsedRaw\n",
            (),
            "line 1, column 'AllocTRES': there is no such column; make the file with: sacct",
        ),
        ("JobName|JobID|Start|End|ElapsedRaw|AllocTRES\n", (), "so it must come last"),
        (HEAD, ("1|gpu|",), "line 2, column 'Start': it is missing"),
        (HEAD, (row(1, began="yesterday"),), "line 2, column 'Start': 'yesterday' is no time"),
        (HEAD, (row(1, lasted="10:00"),), "column 'ElapsedRaw': '10:00' is no number of seconds"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_line_and_column(written, head, rows, said):
    with pytest.raises(Malformed) as refused:
        read(written(*rows, head=head))

    assert said in str(refused.value)


def test_a_site_that_does_not_count_gpus_is_told_apart_from_one_without_such_jobs(written):
    with pytest.raises(ValueError, match="AccountingStorageTRES=gres/gpu"):
        read(written(row(1, gpus="cpu=8")))
    with pytest.raises(ValueError, match="one_gpu 1"):
        saving(read(written(row(1, gpus="gres/gpu=1"))), share=(0.5, 0.5))


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ("give a training log", {}),
        ("give either logs or a range", {"share": (0.4, 0.8), "logs": [HALF]}),
        ("LO:HI, above 0 and below 1", {"share": (0.8, 0.4)}),
        ("LO:HI, above 0 and below 1", {"share": (0.4, float("nan"))}),
        ("split is 1", {"share": (0.4, 0.8), "split": 1.0}),
        ("an SLO is at least 1", {"share": (0.4, 0.8), "slo": 0.9}),
        ("a switch at least 0 s", {"share": (0.4, 0.8), "switch_s": -1.0}),
    ],
)
def test_numbers_that_cannot_be_are_refused(said, how):
    with pytest.raises(ValueError, match=said):
        saving(read(FILE), **how)
