"""``rollmuxd plan JOBS.toml``: what is asked of the daemon, and how its answer reads."""

import re
from pathlib import Path

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
        ("[[job]]\nname = 'a'", "put each job into a table of its own, [[jobs]]"),
        (
            "[[jobs]]\nname = 'a'\nrollout = {noodles = 1}",
            "job a: rollout=: 'noodles' is not a key; did you mean nodes?",
        ),
        ("[[jobs]]\nname = 'a'\ncount = 0\nrollout = {nodes = 1}", "count is 0, and it is 1 to 500"),
        ("[[jobs]]\nname = 'a'\nslo = 0.5\nrollout = {nodes = 1}", "job a: job 'a': slo=0.5"),
        ("[[jobs]]\nname = 'a'\nsol = 2\nrollout = {nodes = 1}", "job a: 'sol' is not a key; did you mean slo?"),
        ("[[jobs]]\nname = 'a'\nphase = {train = ['train']}", "job a: 'phase' is not a key; did you mean phases?"),
        ("[[jobs]]\nname = 'a'\nranks1 = {node = 1}", "job a: ranks1=: 'node' is not a key; did you mean nodes?"),
        ("[[jobs]]\nname = 'a'\ntrain = 2", "job a: train=2: what is wanted of a pool is a dict"),
        (FILE + "[pools.rollout]\nnode = 1", "jobs.toml: [pools.rollout]: 'node' is not a key; did you mean nodes?"),
        (FILE + "[pools.rollout]\ngpus = 4", "jobs.toml: [pools.rollout]: nodes is missing"),
        (FILE + "[pools.rollout]\nnodes = 0", "jobs.toml: [pools.rollout]: nodes=0: expected `int` >= 1"),
        ("pools = 4\n" + FILE, "jobs.toml: pools is 4, and it is a table for each pool, [pools.NAME]"),
        (FILE + "[pools]\nrollout = 4", "jobs.toml: [pools.rollout]: a table is needed, such as nodes = 4"),
        ("on = 'life'\n" + FILE, "jobs.toml: on is 'life', and it is 'live' (beside what runs) or 'empty'"),
        ("[[jobs", "jobs.toml: "),
    ],
)
def test_a_mistake_is_named_with_the_file_the_job_and_the_key_and_nothing_is_asked(rollmuxd, daemon, jobs, text, said):
    ran = rollmuxd(f"plan {jobs(text)}")

    assert ran.code == 1
    assert "jobs.toml: " in ran.err
    assert said in ran.err
    assert daemon.asked == []


H20_POOLS = '[pools.rollout]\nnodes = 4\ngpu_type = "H20"\n[pools.train]\nnodes = 4\ngpu_type = "H800"\n'


def test_seconds_of_another_gpu_type_are_computed_for_those_in_the_file(rollmuxd, daemon, jobs):
    daemon["POST /v1/plan"] = VIEW

    ran = rollmuxd(f"plan {jobs(FILE + H20_POOLS)} --measured-on train=H20 --json")

    (sent,) = [sent for method, _, sent in daemon.asked if method == "POST"]
    rollout, train = sent["jobs"][0]["phases"]
    assert rollout["seconds"] == 120.0
    assert train["seconds"] == pytest.approx(90 * 148 / 989.5)
    assert "seconds" not in sent["jobs"][2]["phases"][0]
    assert "train: training takes 0.15 times as long on H800 as on H20 (computed)" in ran.err


def test_or_for_those_of_the_daemons_nodes(rollmuxd, daemon, jobs):
    daemon["POST /v1/plan"] = VIEW
    there = {"rollout": "H200", "train": "H800"}
    nodes = [{"node": pool, "pools": [pool], "gpu_type": kind} for pool, kind in there.items()]
    daemon["GET /v1/nodes"] = {"items": nodes, "next": None}

    rollmuxd(f"plan {jobs()} --measured-on rollout=h800 --model qwen2.5-14b")

    (sent,) = [sent for method, _, sent in daemon.asked if method == "POST"]
    rollout, train = sent["jobs"][0]["phases"]
    assert 120 * 3350 / 4800 < rollout["seconds"] < 120
    assert train["seconds"] == 90.0


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("rollout", "--measured-on is 'rollout', and POOL=GPU is needed"),
        ("rolout=H20", "--measured-on rolout=H20: there is no pool rolout (there are rollout, train, tail)"),
        ("rollout=B900", "--measured-on rollout=B900: no figures are known for GPU 'B900'"),
        ("tail=H20", "jobs.toml, [pools.tail]: gpu_type is missing, which --measured-on tail=H20 needs"),
    ],
)
def test_a_gpu_type_that_is_not_known_is_refused_and_no_plan_is_asked_for(rollmuxd, daemon, jobs, option, said):
    ran = rollmuxd(f"plan {jobs(FILE + H20_POOLS + '[pools.tail]' + chr(10) + 'nodes = 1')} --measured-on {option}")
    assert ran.code != 0
    assert said in ran.err
    assert not [1 for method, _, _ in daemon.asked if method == "POST"]


def test_nodes_without_a_gpu_type_are_named_where_seconds_are_to_be_computed(rollmuxd, daemon, jobs):
    daemon["GET /v1/nodes"] = {"items": [{"node": "a", "pools": ["rollout"], "gpu_type": ""}], "next": None}

    ran = rollmuxd(f"plan {jobs()} --measured-on rollout=H20")

    assert ran.code == 1
    assert "the daemon's nodes of pool rollout: gpu_type is missing" in ran.err


def test_a_model_without_seconds_to_compute_is_a_usage_error(rollmuxd, daemon, jobs):
    ran = rollmuxd(f"plan {jobs()} --model qwen2.5-14b")

    assert ran.code == 2
    assert "--model is of use with --measured-on only" in ran.err
    assert daemon.asked == []


def test_the_example_of_the_how_to_page_names_what_the_option_needs(rollmuxd, daemon, jobs):
    daemon["POST /v1/plan"] = VIEW
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "plan.md").read_text()
    example = page.partition("<!-- file: bigger.toml -->\n```toml\n")[2].partition("```")[0]
    (options,) = re.findall("^rollmuxd plan bigger.toml (--measured-on .*)$", page, re.MULTILINE)

    ran = rollmuxd(f"plan {jobs(example)} {options}")

    assert (ran.code, "rollout: generating takes" in ran.err) == (0, True)


# ---- of jobs that have run: --from -----------------------------------------------------------------------------------

SACCT = Path(__file__).parents[1] / "sim" / "data" / "sacct.txt"


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("gen_s,train_s\n0.5,0.5\n0.5,0.5\n")
    return file


def test_what_sharing_would_have_saved_is_told_from_accounting_and_needs_no_daemon(rollmuxd, daemon, log):
    ran = rollmuxd(f"plan --from {SACCT} --name grpo|ppo --log {log} --switch-s 0")

    assert ran.code == 0
    assert daemon.connected == []
    assert ran.out.startswith(f"7 jobs of {SACCT} used 0.24 GPU-hours; sharing would have used 0.16: 33% less\n")
    assert "50% of an iteration, from the log" in ran.out
    assert "step 12, name 2, not_started 1, unfinished 1, short 1" in ran.out
    assert "6 jobs of one component generate on 50% of their GPUs" in ran.out


def test_for_machines_it_is_one_object(rollmuxd, daemon, log):
    said = rollmuxd(f"plan --from {SACCT} --log {log} --switch-s 0 --json").json

    assert (said["file"], said["rows"], said["jobs"]) == (str(SACCT), 25, 7)
    assert said["saved"] == pytest.approx([1 / 3, 1 / 3], abs=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "give either JOBS"),
        (f"--from {SACCT} jobs.toml", "give either JOBS"),
        (f"--from {SACCT} --empty", "are about jobs to come"),
        ("jobs.toml --rollout-share 0.4:0.8", "--rollout-share goes with --from"),
        ("jobs.toml --log jobs.toml", "--log goes with --from"),
        (f"--from {SACCT} --rollout-share many", "'many' is not LO:HI"),
        (f"--from {SACCT}", "give a training log of these jobs"),
        (f"--from {SACCT} --rollout-share 0.4:0.8", "no job of the file has run on two GPUs or more for 8 iterations"),
    ],
)
def test_options_that_do_not_go_together_are_refused(rollmuxd, daemon, jobs, words, said):
    ran = rollmuxd(f"plan {words.replace('jobs.toml', str(jobs()))}")

    assert ran.code != 0
    assert said in " ".join(ran.err.split())
    assert daemon.connected == []
