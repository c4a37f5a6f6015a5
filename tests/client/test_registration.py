"""From keywords to a registration; mistakes are named with their key, before anything is sent."""

import numpy as np
import pytest

import rollmuxd
from rollmuxd.client.registration import registration
from rollmuxd.wire.requests import PhaseBody, StateBody, WantBody


def body(**settings):
    return rollmuxd.job("math-7b", **settings)._runtime.body


def test_the_shortest_job_takes_a_node_of_each_pool_and_has_an_init():
    made = body()

    assert made.phases == [PhaseBody("rollout", ["rollout"]), PhaseBody("train", ["train"])]
    assert made.wants == {"rollout": WantBody(nodes=1), "train": WantBody(nodes=1)}
    assert made.side == [PhaseBody("init", ["rollout", "train"])]
    assert made.states == {}


def test_no_pool_at_all_means_a_node_of_each():
    assert registration("a", pools={}) == registration("a", pools={"rollout": {"nodes": 1}, "train": {"nodes": 1}})


def test_times_said_at_a_pool_are_those_of_its_phase():
    made = body(rollout=dict(nodes=2, seconds=90, gap_s=3, min_gpus=4), train=dict(gpus=8, seconds=60))

    assert made.phases == [
        PhaseBody("rollout", ["rollout"], seconds=90, gap_s=3, min_gpus=4),
        PhaseBody("train", ["train"], seconds=60),
    ]
    assert made.wants == {"rollout": WantBody(nodes=2), "train": WantBody(gpus=8)}


def test_a_job_may_share_the_train_pool_only():
    made = body(train=dict(nodes=1), init=None)

    assert list(made.wants) == ["train"]
    assert made.side == []


def test_a_phase_over_two_pools():
    made = body(phases=dict(rollout="rollout", train="train", sync=["rollout", "train"]))

    assert made.phases[2] == PhaseBody("sync", ["rollout", "train"])


def test_a_phase_may_say_its_times_itself():
    made = body(
        phases=dict(rollout=dict(pools="rollout", seconds=5), train="train"),
        rollout=dict(nodes=1, seconds=9),
        train=dict(nodes=1),
    )

    assert made.phases[0].seconds == 5


def test_a_phase_that_says_only_its_times_is_in_the_pool_of_its_name():
    made = body(phases=dict(rollout=dict(seconds=5), train=dict(seconds=3), sync=dict(seconds=1)))

    assert [phase.pools for phase in made.phases] == [["rollout"], ["train"], ["rollout", "train"]]


@pytest.mark.parametrize("init", ["train", ["train"], dict(pools="train")])
def test_an_init_in_one_pool_is_not_one_in_all_of_them(init):
    assert body(init=init).side == [PhaseBody("init", ["train"])]


def test_a_mean_of_numpy_is_a_number():
    made = body(rollout=dict(nodes=1, seconds=np.mean([2, 4])), slo=np.float64(2))

    assert (made.phases[0].seconds, made.slo) == (3, 2)


def test_pools_of_ones_own_names_come_in_their_order():
    made = body(pools=dict(judge=dict(nodes=1), learn=dict(nodes=2)))

    assert [phase.name for phase in made.phases] == ["judge", "learn"]
    assert list(made.wants) == ["judge", "learn"]


def test_sizes_declare_a_state_that_the_channel_moves():
    made = body(rollout=dict(nodes=1, gpu_gb=60, residual_gb=2, ram_gb=150), train=dict(nodes=1))

    assert made.states == {"rollout": StateBody(gpu_gb=60, residual_gb=2, ram_gb=150, driver="channel")}


def test_a_driver_alone_declares_a_state_too():
    assert body(rollout=dict(nodes=1, driver="vllm")).states == {"rollout": StateBody(driver="vllm")}


def test_what_a_driver_is_to_know_goes_along():
    made = body(rollout=dict(nodes=1, driver="vllm", options=dict(level=2, url=["http://localhost:8000"])))
    assert made.states["rollout"].options == {"level": 2, "url": ["http://localhost:8000"]}


def test_hooks_declare_the_state_that_they_are_for():
    made = registration("x", pools={"a": {}, "b": {}}, hooked=["b"])

    assert list(made.states) == ["b"]


def test_an_init_of_ones_own():
    init = PhaseBody("init", ["rollout", "train"], seconds=120)

    assert body(init=dict(seconds=120)).side == [init]
    assert body(side=dict(init=dict(pools=["rollout", "train"], seconds=120))).side == [init]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(rollout=dict(node=1)), "rollout=: 'node' is not a key; did you mean nodes"),
        (dict(rollout=dict(gpu_mem=1)), "rollout=: 'gpu_mem' is not a key"),
        (dict(phases=dict(train="trian")), "phase 'train' needs pool 'trian', and the job has rollout, train"),
        (dict(rollout=dict(seconds=3), phases=dict(generate="rollout")), "no phase is called 'rollout'"),
        (dict(slo=0.5), "slo"),
        (dict(side=dict(eval=dict(evry=3))), "side=eval: 'evry' is not a key; did you mean every?"),
        (dict(on_loss="panic"), "on_loss='panic': it is 'kill' or 'hold' or 'relaunch'"),
        (dict(movable="yes"), "movable='yes': it is 'no' or 'warm' or 'relaunch'"),
        (dict(asynchronous=220), r"asynchronous=220: say True, or in what time .* asynchronous=dict\(pace_s=220\)"),
        (dict(asynchronous=dict(ahead=-1)), "asynchronous: ahead=-1: expected `int` >= 0"),
        (dict(asynchronous=dict(pace=3)), "asynchronous=: 'pace' is not a key; did you mean pace_s"),
        (dict(asynchronous=dict(pace_s=0)), "asynchronous: pace_s=0: expected `float` >= 0.001"),
        (dict(asynchronous=True), "the job has the phases rollout, train, and an asynchronous job has the one phase"),
        (dict(park="lasy"), "park='lasy': it is 'lazy' or 'at_release'"),
        (dict(if_unmet="cry"), "if_unmet='cry': it is 'best_effort' or 'wait' or 'end'"),
        (dict(rollout=dict(nodes="two")), "rollout: nodes='two': expected `int`"),
        (dict(rollout=dict(nodes=-1)), "rollout: nodes=-1: expected `int` >= 1"),
        (dict(train=dict(gpu_gb=-1)), "train: gpu_gb=-1: expected `float` >= 0"),
        (dict(train=dict(seconds=-1)), "train: seconds=-1: expected `float` >= 0"),
        (dict(phases=dict(rollout=dict(pools="rollout", gap_s="x"))), "phases=rollout: gap_s='x': expected `float`"),
        (dict(rollout=3), r"rollout=3: what is wanted of a pool is a dict; say rollout=dict\(nodes=3\)"),
        (dict(train="all"), r"train='all': what is wanted of a pool is a dict, as train=dict\(nodes=1\)"),
        (dict(rolout=dict(nodes=1)), "rolout= is not a keyword; did you mean rollout="),
        (dict(judge=dict(nodes=1)), r"judge= is not a keyword; a pool of that name is pools=dict\(judge=dict"),
        (dict(train=dict(traffic="rng")), "train: traffic='rng': it is 'ring' or 'mesh' or 'pairs'"),
        (dict(priority=10_000), "priority=10000: expected `int` <= 1000"),
        (dict(pools={"my pool": {}}), "a pool's name is 'my pool': a name has letters, digits, . _ -"),
        (dict(phases={"my phase": "train"}), "a phase's name is 'my phase'"),
        (dict(rank=2, ranks=2), "rank=2 of ranks=2"),
        (dict(ranks="2", rank="1"), "ranks='2': a whole number is needed"),
        (dict(phases=5), r"phases=5: say each phase with its pools, as phases=dict\(rollout="),
        (dict(phases="rollout"), "phases='rollout': say each phase with its pools"),
        (dict(phases=[dict(name="rollout")]), "a phase's name is .*, and must be a string"),
        (dict(phases=dict(rollout=90)), r"phases=rollout: 90 is no pool; say rollout='train', or rollout=dict\(pools="),
        (dict(side=dict(eval=120)), "side=eval: 120 is no pool; say eval='train'"),
        (dict(init=120), "init=init: 120 is no pool"),
        (dict(pools=["rollout", "train"]), "pools=.*: say each pool with its nodes, as pools=dict"),
        (dict(train=dict(gpu_gb=object())), "object object at .* cannot be sent to the daemon"),
        (dict(gpu_gb=60), r"gpu_gb= is not a keyword; it is said of a pool: train=dict\(gpu_gb="),
        (dict(filler=True), "name the one pool that it works on"),
    ],
)
def test_a_mistake_is_named_before_anything_is_sent(settings, says):
    for make in (rollmuxd.job, rollmuxd.ajob):
        with pytest.raises((TypeError, ValueError), match=says):
            make("math-7b", **settings)


@pytest.mark.parametrize("name", ["my job", "", "-x", "a" * 101, "a\n"])
def test_a_name_that_cannot_be_is_refused_here_in_words(name):
    with pytest.raises(ValueError, match=r"a name has letters, digits, \. _ - .*at most 100"):
        rollmuxd.job(name)
