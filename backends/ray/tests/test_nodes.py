"""Which node of a cluster is meant; and what is said where none or several can be."""

import pytest

from rollmuxd_backend_local.agent.frames import Node
from rollmuxd_backend_ray.nodes import NotThere, pick


def node(name, *, alive=True, labels=(), **resources):
    return {
        "NodeID": f"id-{name}",
        "NodeName": name,
        "NodeManagerHostname": f"{name}.lab",
        "NodeManagerAddress": "10.0.0.1",
        "Alive": alive,
        "Labels": dict(labels),
        "Resources": resources if alive else {},
    }


@pytest.mark.parametrize("name", ["a", "a.lab", "id-a"])
def test_a_node_is_known_by_its_name_its_host_name_and_its_id(name):
    assert pick(Node(name), [node("a"), node("b")])["NodeID"] == "id-a"


def test_one_that_has_died_is_not_the_one_that_has_come_in_its_place():
    again = {**node("a"), "NodeID": "again"}
    assert pick(Node("a"), [node("a", alive=False), again])["NodeID"] == "again"


def test_one_that_is_dead_is_said_to_be_dead_and_why():
    dead = {**node("a", alive=False), "DeathReasonMessage": "no heartbeats"}
    with pytest.raises(NotThere, match=r"dead \(no heartbeats\)"):
        pick(Node("a"), [dead, node("b")])
    # With its resources, which a dead node has not any more.
    with pytest.raises(NotThere, match="dead"):
        pick(Node("a", resources=(("GPU", 8.0),)), [dead, node("b", GPU=8)])


def test_labels_and_resources_are_to_be_met_all_of_them():
    nodes = [node("a", labels={"rack": "1"}, GPU=8), node("b", labels={"rack": "1"}, GPU=4)]
    wanted = Node("", (("rack", "1"),), (("GPU", 8.0),))
    assert pick(wanted, nodes)["NodeName"] == "a"
    with pytest.raises(NotThere, match=r"labelled rack=2; there are a .10\.0\.0\.1., b"):
        pick(Node("", (("rack", "2"),)), nodes)


def test_two_that_can_be_it_are_none():
    """Two nodes of one machine have one address."""
    with pytest.raises(NotThere, match=r"2 nodes of the cluster are named 10\.0\.0\.1 .*options.node"):
        pick(Node("10.0.0.1"), [node("a"), node("b")])
