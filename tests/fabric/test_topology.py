"""Paths of the fabrics, and what an iteration takes on them, against figures by hand."""

import pytest

from rollmuxd.fabric.iteration import decoding, iteration, speeds
from rollmuxd.fabric.topology import CARD, FABRICS, GPUS_PER_HOST, RFabric, fabric
from rollmuxd.fabric.traffic import Decoding, Training, sync

GPUS = 512
#: Qwen2.5-72B in the setting of the study
TRAINING = Training(72.7e9, 80, GPUS, 16.8e6 / 2, 989.5e12)
ALL = list(FABRICS)


def test_a_fat_tree_goes_up_as_far_as_it_must():
    tree = fabric("fat-tree", GPUS)
    named = [[tree.names[link] for link in tree.path(0, other)] for other in (0, 1, 4, 32)]
    assert named == [
        [],
        ["cards of host 0 up", "cards of host 1 down"],
        ["cards of host 0 up", "rack 0 up", "cards of host 4 down", "rack 1 down"],
        ["cards of host 0 up", "rack 0 up", "pod 0 up", "cards of host 32 down", "rack 8 down", "pod 1 down"],
    ]


def test_racks_without_a_circuit_between_them_relay_or_use_the_electrical_plane():
    optical = fabric("rfabric", GPUS)
    host = [4 * rack for rack in range(4)]
    between = lambda a, b: [optical.names[link] for link in optical.path(host[a], host[b])[1:-1]]
    assert between(0, 1) == ["electrical plane of rack 0 up", "electrical plane of rack 1 down"]
    optical.set_for({(host[0], host[1]): 1.0, (host[1], host[2]): 1.0})
    assert between(0, 1) == ["circuit (0, 1)"]
    assert between(0, 2) == ["circuit (0, 1)", "circuit (1, 2)"]
    assert between(2, 0) == ["electrical plane of rack 2 up", "electrical plane of rack 0 down"]


@pytest.mark.parametrize("name", ALL)
def test_every_host_reaches_every_other(name):
    net = fabric(name, 256)
    net.set_for(Training(1e9, 8, 256, 1e6, 1e15).ring(1.0, net.rings))
    for a in range(0, net.hosts, 7):
        for b in range(net.hosts):
            assert a == b or net.path(a, b), f"{name}: no path from {a} to {b}"


def test_a_ring_on_a_fat_tree_runs_at_the_rate_of_the_cards():
    size, ranks = 9e9, TRAINING.ranks
    took = fabric("fat-tree", GPUS).seconds(TRAINING.ring(size))
    assert took == pytest.approx(size * (ranks - 1) / ranks / CARD, rel=1e-9)


def test_weights_arrive_as_fast_as_the_cards_of_the_receivers_allow():
    # each GPU gets an eighth of the weights of its host
    took = fabric("fat-tree", GPUS).seconds(sync(TRAINING.parameters, GPUS))
    assert took == pytest.approx(2 * TRAINING.parameters / GPUS_PER_HOST / CARD, rel=1e-9)


def test_collectives_hide_behind_the_backward_pass_but_for_the_last_layer_and_the_gather():
    per_gpu, layers = TRAINING.parameters / 32, 20
    fast, slow = 1 / 50e9, 1 / 5e9
    hidden = TRAINING.exposed_s(fast)
    assert hidden == pytest.approx(4 * per_gpu / layers * fast + 2 * per_gpu * fast, rel=1e-6)
    # slower than the backward pass: all of it but the first layer's computation and what is computed meanwhile
    exposed = TRAINING.exposed_s(slow)
    assert exposed == pytest.approx(4 * per_gpu * slow - TRAINING.backward_s * (1 - 1 / layers) + 2 * per_gpu * slow)


def test_circuits_follow_the_phases_and_every_change_is_paid():
    of = speeds(fabric("rfabric", GPUS), TRAINING)
    quick, slow, never = (iteration(of, TRAINING, seconds) for seconds in (0.02, 0.1, 1e6))
    assert (quick.changed, quick.switching_s) == (2, pytest.approx(0.04))
    assert slow.seconds - quick.seconds == pytest.approx(0.16)
    # light that takes for ever: the gate keeps the training's circuits, and the weights travel by the electrical plane
    assert (never.changed, never.switching_s) == (0, 0.0)
    assert never.sync_s == pytest.approx(of.sync_kept_s)
    assert never.sync_s > 5 * quick.sync_s


def test_a_fabric_without_circuits_changes_none():
    assert iteration(speeds(fabric("osub4", GPUS), TRAINING), TRAINING, 0.02).changed == 0


def test_experts_in_other_racks_gain_by_circuits_of_their_own():
    layer = Decoding(hidden=4096, experts_per_token=8)
    step = {
        (how, place): decoding(fabric("rfabric", GPUS), TRAINING, layer, 94, how, place)
        for how, place in (("tp8", "packed"), ("ep32", "packed"), ("ep32", "spread"), ("afd", "packed"))
    }
    assert step["tp8", "packed"].own_s == step["tp8", "packed"].trained_s == 0.0
    # a group within a rack needs no circuit
    assert step["ep32", "packed"].own_s == pytest.approx(step["ep32", "packed"].trained_s)
    assert step["ep32", "spread"].trained_s > 1.5 * step["ep32", "spread"].own_s
    assert step["afd", "packed"].trained_s > 1.5 * step["afd", "packed"].own_s


def test_a_group_within_a_rack_sends_what_the_formula_says():
    # 32 GPUs, 128 sequences each, to 8 experts: a token leaves its host in three of four cases, there and back
    step = decoding(fabric("fat-tree", GPUS), TRAINING, Decoding(4096, 8, sequences=128), 1, "ep32", "packed")
    assert step.own_s == pytest.approx(2 * 128 * 8 * 4096 * 2 * (3 / 4) / CARD, rel=1e-9)


def test_tensor_parallelism_over_two_hosts_reduces_over_their_cards():
    # 16 GPUs, 128 sequences each: what a host sends of one all-reduce is the activations of all 2,048
    step = decoding(fabric("fat-tree", GPUS), TRAINING, Decoding(8192, 1, sequences=128), 1, "tp16", "packed")
    assert step.own_s == pytest.approx(2 * (2 * 8192 * 2048) / (8 * CARD), rel=1e-9)


def test_experts_over_two_racks_send_half_of_their_tokens_to_the_other():
    layer = Decoding(4096, 8, sequences=128)
    there, back = layer.demands("ep64", "packed", 8)
    assert {host for pair in there for host in pair} == set(range(8))
    whole = 2 * 4096 * 8 * 128 * 8
    assert sum(size for (a, b), size in there.items() if a < 4 <= b) == pytest.approx(4 * whole / 2)
    assert sum(back.values()) == pytest.approx(sum(there.values())) == pytest.approx(8 * whole * 7 / 8)


@pytest.mark.parametrize(
    ("name", "bill"),
    [
        # of one GPU: its copper to the rack, then a fibre with a port and a transceiver at both ends on each tier
        ("fat-tree", (5, 4, 0, 0)),
        ("osub4", (1 + 2 * 2 / 4, 2 * 2 / 4, 0, 0)),
        ("mixnet", (5 / 2, 4 / 2 + 1 / 2, 1 / 2, 0)),
        # one of 32 uplinks is electrical, 31 are optical, and 24 of them reach the core by two ports more
        ("rfabric", (1 + 31 / 32 + 2 / 32, 31 / 32 + 2 / 32, 31 / 32 + 2 * 24 / 32, 0)),
        ("topoopt", (3, 2 + 1 / 2, 0, 1 / 2)),
    ],
)
@pytest.mark.parametrize("gpus", [512, 1024])
def test_a_fabric_counts_what_it_is_made_of(name, bill, gpus):
    assert fabric(name, gpus).bill() == pytest.approx(bill)


def test_both_halves_of_striped_cards_carry_what_has_a_circuit():
    one, both = fabric("mixnet", GPUS), fabric("mixnet-striped", GPUS)
    demand = {(0, 4): 1e9, (4, 0): 1e9}  # two racks of one pod
    for net in (one, both):
        net.set_for(demand)
    assert one.seconds(demand) == pytest.approx(1e9 / (8 * CARD / 2))
    assert both.seconds(demand) == pytest.approx(1e9 / (8 * CARD))
    far = {(0, 32): 1e9}  # another pod: no circuit reaches it, and half of the cards waits
    assert both.seconds(far) == one.seconds(far) == pytest.approx(1e9 / (8 * CARD / 2))


@pytest.mark.parametrize("gpus", [0, 100, 257])
def test_a_cluster_is_made_of_whole_pods(gpus):
    with pytest.raises(ValueError, match="whole pods of 256"):
        RFabric(gpus)


def test_an_unknown_fabric_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no fabric is called 'torus'; known are fat-tree"):
        fabric("torus", 256)
