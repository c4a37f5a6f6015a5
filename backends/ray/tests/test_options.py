"""What can be said of a host that is a node of a Ray cluster, and what is made of it."""

import pytest

from rollmuxd.spi import HostConfig
from rollmuxd_backend_local.agent.frames import Node
from rollmuxd_backend_ray import RayBackend


async def node(options, **defaults):
    backend = await RayBackend.open([HostConfig(id="box", options=options)], defaults)
    try:
        return backend._where("box")
    finally:
        await backend.close()


@pytest.mark.asyncio
async def test_a_host_is_the_node_of_its_name_unless_something_else_is_said():
    assert await node({}) == Node("box")
    assert await node({"node": "10.0.0.7"}) == Node("10.0.0.7")
    assert await node({"labels": {"rack": "a7"}}) == Node("", (("rack", "a7"),))
    assert await node({"resources": {"h100": 8}, "node": "n7"}) == Node("n7", (), (("h100", 8.0),))


@pytest.mark.asyncio
async def test_hosts_of_one_cluster_share_cluster_member_and_those_of_two_do_not():
    hosts = [
        HostConfig(id=host, options={"address": address}) for host, address in (("a", "x"), ("b", "x"), ("c", "y"))
    ]
    backend = await RayBackend.open(hosts, {})
    lines = [backend._line(host.id) for host in hosts]
    assert lines[0] is lines[1]
    assert lines[0] is not lines[2]
    await backend.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adress": "auto"}, "options.adress is not an option of backend ray; did you mean address"),
        ({"resources": {"GPU": 0}}, "options.resources is .*> 0"),
        ({"labels": ["a7"]}, "options.labels is"),
        ({"reach_s": 0}, "options.reach_s is 0"),
        ({"users": {"team": "ann"}}, "options.users is not for backend ray"),
    ],
)
@pytest.mark.asyncio
async def test_what_cannot_be_meant_is_refused_by_host_and_key(options, said):
    with pytest.raises(ValueError, match=f"box: {said}"):
        await node(options)
