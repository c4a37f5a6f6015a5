"""``rollmuxd plan JOBS.toml``: what is asked of the daemon, and how its answer reads."""

import pytest

FILE = """
[[jobs]]
name = "math"
count = 2
slo = 2.0
rollout = {nodes = 1, seconds = 120, gpu_gb = 60}
train = {nodes = 1, seconds = 90}

[[jobs]]
name = "code"
rollout = {nodes = 2}
train = {nodes = 1}
"""

VIEW = {
    "on": "live",
    "policy": "rollmux",
    "jobs": [
        {
            "name": "math-1",
            "status": "admitted",
            "reasons": [],
            "wishes": [],
            "beside": ["chat", None],
            "pins": {"rollout": ["box/gpu0-3"], "train": ["box/gpu4-7"]},
            "admission": "packing",
            "slo": 2.0,
            "promised": True,
            "solo_s": 210.0,
            "iteration_s": 252.0,
            "slowdown": 1.2,
            "cost_per_hour": 0.0,
            "cost_alone_per_hour": 28.52,
        },
        {
            "name": "code",
            "status": "waiting",
            "reasons": [{"code": "ram", "text": "host box has 3 GB left", "data": {}}],
            "wishes": [
                {"code": "slo", "text": "slo=2.5 (0.50 looser)", "data": {}},
                {"code": "departure", "text": "chat", "data": {}},
            ],
            "beside": [],
            "pins": {},
            "admission": "",
            "slo": None,
            "promised": False,
            "solo_s": None,
            "iteration_s": None,
            "slowdown": None,
            "cost_per_hour": 0.0,
            "cost_alone_per_hour": 0.0,
        },
    ],
    "slowed": [{"job": "j1", "name": "chat", "slo": 1.5, "before": 1.0, "after": 1.2}],
    "pools": [{"pool": "rollout", "nodes": 1, "used_before": 1, "used_after": 1}],
    "cost_per_hour_before": 28.52,
    "cost_per_hour_after": 28.52,
    "cost_alone_per_hour": 28.52,
    "least": {
        "reason": "",
        "nodes": [
            {"pools": ["rollout"], "gpu_type": "", "gpus": 4, "nodes": 2, "there": 4, "price_per_gpu_hour": 1.85},
            {"pools": ["train"], "gpu_type": "", "gpus": 4, "nodes": 1, "there": 4, "price_per_gpu_hour": 5.28},
        ],
        "gpus": 12,
        "cost_per_hour": 35.92,
        "cost_alone_per_hour": 57.04,
        "slowdowns": {"math-1": 1.2, "code": None},
        "complete": True,
    },
}

SHOWN = """\
by policy rollmux, beside the jobs that are there; nothing has changed

JOB     STATUS    HOW      BESIDE           NODES                   ALONE s  ITERATION s  SLOWDOWN  SLO  MORE PER HOUR
math-1  admitted  packing  chat, another's  box/gpu0-3, box/gpu4-7      210          252       1.2    2              0
code    waiting   -        -                -                             -            -         -    -              -

code would wait:
  host box has 3 GB left
  it would start with slo=2.5 (0.50 looser)
  it would start once chat has ended

THERE ALREADY  SLOWDOWN NOW  THEN  SLO
chat                      1   1.2  1.5

POOL     NODES  USED NOW  THEN
rollout      1         1     1

READING                             NODES                  PER HOUR  SAVED PER HOUR
nodes that you own, idle ones free  0 rollout                     0           28.52
the fewest nodes, all rented        2 rollout and 1 train     35.92           21.12

1 of 2 would have a place, for 0 more per hour; on nodes of their own these would cost 28.52 (all nodes in use: \
28.52 per hour)
"""


@pytest.fixture
def jobs(tmp_path):
    def write(text=FILE):
        file = tmp_path / "jobs.toml"
        file.write_text(text)
        return file

    return write


def test_a_file_is_one_call_in_the_words_of_a_registration(rollmuxd, daemon, jobs):
    daemon["POST /v1/plan"] = VIEW

    assert rollmuxd(f"plan {jobs()} --json").json == VIEW
    ((_, _, sent),) = daemon.asked
    assert [job["name"] for job in sent["jobs"]] == ["math-1", "math-2", "code"]
    first = sent["jobs"][0]
    assert first["slo"] == 2.0
    assert [(phase["name"], phase["seconds"]) for phase in first["phases"]] == [("rollout", 120.0), ("train", 90.0)]
    assert first["states"]["rollout"]["gpu_gb"] == 60.0
    assert "side" not in first
    assert "on" not in sent


def test_the_plan_is_told_with_who_waits_why_and_whom_it_would_slow(rollmuxd, daemon, jobs):
    daemon["POST /v1/plan"] = VIEW

    assert rollmuxd(f"plan {jobs()}").out == SHOWN


def test_least_searches_longer_and_fails_where_no_inventory_keeps_the_promises(rollmuxd, daemon, jobs):
    daemon["POST /v1/plan"] = VIEW
    assert rollmuxd(f"plan --least {jobs()}").out == SHOWN
    ((_, _, sent),) = daemon.asked
    assert sent["least"] is True

    reason = "the promises do not hold on all of the 1 train nodes: code would wait. Plan with more nodes"
    daemon["POST /v1/plan"] = {**VIEW, "least": {**VIEW["least"], "nodes": [], "reason": reason}}
    ran = rollmuxd(f"plan --least {jobs()}")
    assert (ran.code, reason in ran.err) == (1, True)
    ran = rollmuxd(f"plan {jobs()}")
    assert (ran.code, f"the fewest nodes: {reason}\n" in ran.out) == (0, True)


def test_a_search_that_its_limit_ended_says_so(rollmuxd, daemon, jobs):
    daemon["POST /v1/plan"] = {**VIEW, "least": {**VIEW["least"], "complete": False}}
    assert "was ended by its limit of processor time: there may be fewer" in rollmuxd(f"plan {jobs()}").out


def test_an_empty_inventory_and_one_that_is_made_up_are_passed_on(rollmuxd, daemon, jobs):
    daemon["POST /v1/plan"] = VIEW

    rollmuxd(f"plan --empty {jobs(FILE + '[pools.rollout]' + chr(10) + 'nodes = 4')}")

    ((_, _, sent),) = daemon.asked
    assert (sent["on"], sent["pools"]) == ("empty", {"rollout": {"nodes": 4}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no jobs in it"),
        ("[[jobs]]\nslo = 2", "job 1 has no name"),
        ("[[job]]\nname = 'a'", "job is not a key"),
        (
            "[[jobs]]\nname = 'a'\nrollout = {noodles = 1}",
            "job a: rollout=: 'noodles' is not a key; did you mean nodes?",
        ),
        ("[[jobs]]\nname = 'a'\ncount = 0\nrollout = {nodes = 1}", "count is 0, and it is 1 to 500"),
        ("[[jobs]]\nname = 'a'\nslo = 0.5\nrollout = {nodes = 1}", "job a: job 'a': slo=0.5"),
        ("[[jobs", "jobs.toml: "),
    ],
)
def test_a_mistake_is_named_with_the_file_the_job_and_the_key_and_nothing_is_asked(rollmuxd, daemon, jobs, text, said):
    ran = rollmuxd(f"plan {jobs(text)}")

    assert ran.code == 1
    assert "jobs.toml: " in ran.err
    assert said in ran.err
    assert daemon.asked == []
