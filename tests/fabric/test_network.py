"""Phases share a fabric: each alone takes what the closed forms say, and together what fair shares of links give."""

import math

import numpy as np
import pytest

from rollmuxd.fabric.circuits import Gate
from rollmuxd.fabric.flows import together
from rollmuxd.fabric.iteration import speeds
from rollmuxd.fabric.network import Network, at_once, sent_of, training
from rollmuxd.fabric.topology import CARD, FABRICS, fabric
from rollmuxd.fabric.traffic import Training, rings, stages, sync

GPUS = 512
TRAINING = Training(72.7e9, 80, GPUS, 16.8e6 / 2, 989.5e12)
T_OCS = 0.02


def network(name="fat-tree", gpus=GPUS, t_ocs=T_OCS):
    return Network(fabric(name, gpus), Gate(t_ocs))


def send(net, demand, ends, name="", after=0.0):
    """One unit of this demand, as soon as the network is at ``after``."""
    net.advance(after)
    net.begin(demand, 1.0, 0.0, at_once, lambda: ends.append((name, net.now)))


@pytest.mark.parametrize("name", list(FABRICS))
def test_alone_training_takes_what_the_closed_form_says(name):
    net, ends = network(name), []
    ring = TRAINING.ring(1.0, net.fabric.rings)
    net.begin(ring, sent_of(TRAINING), 1.0, training(TRAINING), lambda: ends.append(net.now))
    net.advance(math.inf)
    exposed = TRAINING.exposed_s(speeds(fabric(name, GPUS), TRAINING).ring_s)
    assert ends == [pytest.approx(TRAINING.compute_s + TRAINING.optimizer_steps * exposed, rel=1e-9)]


@pytest.mark.parametrize("name", list(FABRICS))
def test_alone_new_weights_take_what_the_closed_form_says_and_what_they_wait_for_light(name):
    net, ends = network(name), []
    send(net, sync(TRAINING.parameters, GPUS), ends)
    net.advance(math.inf)
    (_, took), without = ends[0], speeds(fabric(name, GPUS), TRAINING).sync_s
    if name == "rfabric":  # a small part travels by the electrical plane meanwhile
        assert without + 0.8 * T_OCS < took < without + T_OCS
        assert (net.changed, net.kept) == (1, 0)
    else:
        assert took == pytest.approx(without, rel=1e-9)


def test_two_phases_over_one_link_take_turns_by_halves():
    net, ends = network(), []
    # both into host 1, 8 cards of 50 GB/s: 400 and 800 GB take 1 and 2 s alone
    send(net, {(0, 1): 400e9}, ends, "short")
    send(net, {(2, 1): 800e9}, ends, "long")
    net.advance(math.inf)
    assert ends == [("short", pytest.approx(2.0)), ("long", pytest.approx(3.0))]


def test_a_phase_that_comes_later_slows_only_what_is_left():
    net, ends = network(), []
    send(net, {(0, 1): 400e9}, ends, "first")
    send(net, {(2, 1): 400e9}, ends, "later", after=0.5)
    net.advance(math.inf)
    assert ends == [("first", pytest.approx(1.5)), ("later", pytest.approx(2.0))]


def test_phases_on_links_of_their_own_do_not_meet():
    net, ends = network(), []
    send(net, {(0, 1): 400e9}, ends)
    send(net, {(2, 3): 400e9}, ends)
    net.advance(math.inf)
    assert [when for _, when in ends] == [pytest.approx(1.0)] * 2


def test_a_collective_waits_for_its_slowest_link_and_leaves_the_rest_to_others():
    # bundle 0 needs both links, and link 0 gives it 1 unit per second; bundle 1 gets what is left of link 1
    uses = np.array([[1.0, 1.0], [0.0, 1.0]])
    assert together([1.0, 10.0], uses, [1.0, 1.0]).tolist() == pytest.approx([1.0, 9.0])


def test_circuits_of_a_running_phase_stay_and_those_of_an_ended_one_are_there_for_all():
    net, ends = network("rfabric"), []
    rack = [4 * place for place in range(8)]
    send(net, {(rack[0], rack[1]): 400e9}, ends, "a")
    net.advance(0.1)
    lit = dict(net.fabric.lit.links)
    assert set(lit) == {(0, 1)}
    send(net, {(rack[0] + 1, rack[2]): 400e9}, ends, "b", after=0.1)
    net.advance(0.2)
    assert set(net.fabric.lit.links) == {(0, 1), (0, 2)}
    net.advance(math.inf)
    # the same again needs no light
    before = net.changed
    send(net, {(rack[0], rack[1]): 400e9}, ends, "again", after=net.now)
    net.advance(math.inf)
    assert net.changed == before == 2
    assert ends[-1][1] - max(when for _, when in ends[:2]) == pytest.approx(1.0)


def test_one_phase_gets_the_uplinks_of_its_hosts_and_leaves_the_others():
    net = network("rfabric")
    first = net.fabric.circuits_for({(0, 4): 1.0})
    assert first == {(0, 1): 8}
    assert net.fabric.circuits_for({(1, 5): 1.0}, first) == {(0, 1): 8}
    full = net.fabric.circuits_for({(host, 4 + host): 1.0 for host in range(4)})
    assert full == {(0, 1): 31}
    assert net.fabric.circuits_for({(1, 5): 1.0}, full) == {}


def test_light_that_takes_longer_than_it_brings_is_not_waited_for_and_that_is_counted():
    net, ends = network("rfabric", t_ocs=60.0), []
    send(net, {(0, 4): 40e9}, ends)
    net.advance(math.inf)
    assert (net.changed, net.kept) == (0, 1)
    assert ends[0][1] == pytest.approx(40e9 / CARD)  # one uplink on the electrical plane


def test_what_is_measured_is_met_on_a_full_fat_tree():
    of = TRAINING.measured(60.0, 1 / CARD)
    assert of.compute_s + of.optimizer_steps * of.exposed_s(1 / CARD) == pytest.approx(60.0, rel=1e-6)
    # shorter than its own collectives: nothing is computed
    assert TRAINING.measured(0.1, 1 / CARD).compute_s < 1e-3


def test_a_rank_is_as_many_hosts_as_hold_its_state():
    assert [stages(size * 1e9) for size in (7.6, 32.8, 72.7, 235.0)] == [1, 1, 4, 8]


def test_rings_among_any_hosts_are_those_of_the_study_among_whole_racks():
    assert rings(range(64), 4, 1.0, 8) == TRAINING.ring(1.0, 8)
    # three ranks of one host: each sends two thirds, half of it each way round
    assert rings([3, 9, 40], 1, 3.0) == {pair: pytest.approx(8.0) for pair in
                                        [(3, 9), (9, 3), (9, 40), (40, 9), (40, 3), (3, 40)]}  # fmt: skip
