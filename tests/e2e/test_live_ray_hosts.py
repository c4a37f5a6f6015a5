"""A live daemon and hosts that are nodes of a real Ray cluster, each with its own address; and links get cut.

A link that is away for a moment costs time and nothing else. One that is away for longer takes its node out of the
cluster: Ray ends there as soon as it hears of that, and is started again, as a service manager does. Either way the
host is unknown until it was looked at: nothing of it is given on, and nobody else waits for it.
"""

import json
import sys
import time
from importlib.util import find_spec

import anyio
import pytest
from patience import PATIENCE_S

from rollmuxd.spi import ContactLost, HostConfig

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

POOLS = {"h1": "rollout", "h2": "train"}
GPU = {"total_mb": 96_000, "name": "NVIDIA H20"}
HOST = """
[[hosts]]
id = "{host}"
backend = "ray"
ram_gb = 64
options = {{made_up_gpus = {gpus}}}

[[hosts.nodes]]
gpus = [0]
gpu_gb = 96
pools = ["{pool}"]
"""
TABLES = """
[backends.ray]
address = {address}
python = {python}

[residency.mock]
made_up_gpus = {gpus}
record = {record}
python = {python}
copy_gbps = {copy_gbps}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster with the nodes ``h1`` and ``h2``, for all tests here."""
    if find_spec("ray") is None:
        pytest.skip("there is no Ray here; pip install ray")
    if not pytest.importorskip("networks").namespaces_can_be_made():
        pytest.skip("network namespaces cannot be made here; that needs root, and ip (iproute2)")
    from ray_cluster import ClusterProcess

    with ClusterProcess(tmp_path_factory.mktemp("ray") / "c", tuple(POOLS), apart=True) as made:
        yield made


class Hosts:
    """The nodes' GPUs, made up in files of one test."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        for host in POOLS:
            self.gpus(host).write_text(json.dumps({"gpus": [{**GPU, "uuid": f"GPU-{host}"}]}))

    def cut(self, host):
        self.cluster.do("cut", host)

    def mend(self, host):
        self.cluster.do("mend", host)

    def gpus(self, host):
        return self.folder / f"gpus-{host}.json"

    def used_mb(self, host):
        """What is on its GPU, whoever can see it."""
        return sum(one["mb"] for one in json.loads(self.gpus(host).read_text())["gpus"][0].get("processes", ()))

    def is_parking(self, host):
        states = self.folder / f"gpus-{host}.json.states"
        return states.exists() and '"parking"' in states.read_text()

    def tables(self, copy_gbps):
        text = TABLES.format(
            address=json.dumps(self.cluster.address),
            python=json.dumps(sys.executable),
            gpus=json.dumps(str(self.folder / "gpus-{host}.json")),
            record=json.dumps(str(self.folder / "witness.jsonl")),
            copy_gbps=copy_gbps,
        )
        return text + "".join(
            HOST.format(host=host, pool=pool, gpus=json.dumps(str(self.gpus(host)))) for host, pool in POOLS.items()
        )


@pytest.fixture
def hosts(cluster, tmp_path):
    made = Hosts(cluster, tmp_path)
    yield made
    for host in POOLS:
        made.mend(host)


@pytest.fixture
def away(live, hosts):
    """A function that starts a daemon with these hosts; and no other that a job could be on."""

    def start(copy_gbps=100, **settings):
        # It joins the cluster first; and each look at a host is a program that is started there.
        settings = {"observe_s": 1.0, **settings}
        daemon = live.daemon((("0", "elsewhere"),), tables=hosts.tables(copy_gbps), **settings)
        for host in POOLS:
            until_up(live, daemon, host)
        return daemon

    return start


def until_up(live, daemon, host):
    """For as long as a Ray may take that is started again."""
    live.until(f"{host} is up", lambda: status(daemon, host) == "up")


def status(daemon, host):
    return daemon.get(f"/v1/nodes/{host}/gpu0")["status"]


def verdicts(daemon, kind):
    """Of each order of this kind: what was said of it in the end."""
    ends = daemon.facts("order_ended", "order_faulted")
    told = [fact["order"] for fact in daemon.facts("order_issued", kind=kind)]
    return [[fact["fact"] for fact in ends if fact["order"] == order] for order in told]


@pytest.mark.asyncio
async def test_calls_to_another_node_wait_for_none_to_one_that_is_cut_off_and_these_are_late_and_no_more(
    hosts, tmp_path
):
    from rollmuxd_backend_ray import RayBackend

    backend = await RayBackend.open(
        [HostConfig(id=host, options={"made_up_gpus": str(hosts.gpus(host))}) for host in POOLS],
        {"address": hosts.cluster.address},
    )
    begun, done, said = tmp_path / "begun", tmp_path / "done", []
    with anyio.fail_after(PATIENCE_S):
        for host in POOLS:
            await seen(backend, host)

        async def work():
            script = f"echo > {begun}; while [ ! -e {begun}.go ]; do sleep 0.05; done; echo x >> {done}; echo well"
            said.append((await backend.run("h1", ("sh", "-c", script), timeout_s=PATIENCE_S)).stdout)

        async def look():
            try:
                await backend.observe("h1")
            except ContactLost as error:
                said.append(str(error))
            else:
                said.append("seen")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            while not begun.exists():
                await anyio.sleep(0.02)
            hosts.cut("h1")
            for _ in range(8):
                tasks.start_soon(look)
            (tmp_path / "begun.go").touch()
            await backend.observe("h2")
            assert said == [], "the link was not cut, or the other node's calls have waited for this one's"
            hosts.mend("h1")
    assert sorted(said, key=str) == sorted([b"well\n", *["seen"] * 8], key=str)
    assert done.read_text() == "x\n"
    await backend.close()


async def seen(backend, host):
    """Ask again and again, until it is seen."""
    while True:
        try:
            return await backend.observe(host)
        except ContactLost:
            await anyio.sleep(0.1)


def test_a_link_that_is_away_for_a_moment_in_the_middle_of_a_park_costs_no_more_than_the_moment(live, hosts, away):
    daemon = away(copy_gbps=0.7)  # three seconds for the two gigabytes of a job
    a = live.holder("a")
    b, asked = live.waiter("b")
    a.do("leave")
    live.until("the park is under way", lambda: hosts.is_parking("h1"))
    hosts.cut("h1")
    live.until("the bytes have left", lambda: hosts.used_mb("h1") == 0)
    time.sleep(0.5)  # in which it would be given on, if anybody did
    assert b.done(asked) is None, "nobody has seen that they have"

    hosts.mend("h1")
    assert "error" not in b.answer(asked)
    assert b.stays()[0][0] == "h1/gpu0"
    assert verdicts(daemon, "park") == [["order_ended"]]
    assert daemon.facts("order_contact_lost") == []


def test_a_node_that_is_cut_off_while_idle_is_not_given_and_keeps_nobody_elsewhere_until_it_is_back(live, hosts, away):
    daemon = away()
    b = live.holder("b")
    b.do("leave")
    hosts.cut("h1")
    live.until("the host is noticed to be away", lambda: status(daemon, "h1") == "lost")

    b.do("enter", phase="train")
    assert b.stays()[-1][0] == "h2/gpu0", "the other host is none of its business"
    b.do("leave")
    asked = b.ask("enter", phase="rollout")
    time.sleep(1)  # in which it would be given, if anybody did
    assert b.done(asked) is None
    assert status(daemon, "h2") == "up"

    hosts.mend("h1")
    until_up(live, daemon, "h1")
    assert "error" not in b.answer(asked)
    assert b.stays()[-1][0] == "h1/gpu0"


def test_a_park_on_a_node_that_leaves_the_cluster_has_one_verdict_and_its_gpus_are_given_on_after_it(live, hosts, away):
    daemon = away(copy_gbps=0.4, order_s=90)
    a = live.holder("a")
    b, asked = live.waiter("b")
    a.do("leave")
    live.until("the park is under way", lambda: hosts.is_parking("h1"))
    [parked] = daemon.facts("order_issued", kind="park")
    hosts.cut("h1")

    # It comes to its end there, with nobody to see it.
    live.until("the bytes have left", lambda: hosts.used_mb("h1") == 0)
    live.until("the cluster has given it up", lambda: daemon.facts("order_contact_lost"))
    live.until("the host is noticed to be away", lambda: status(daemon, "h1") == "lost")
    assert status(daemon, "h2") == "up"
    time.sleep(1)  # in which it would be given on, if anybody did
    assert b.done(asked) is None
    assert verdicts(daemon, "park") == [[]], "nobody knows"

    hosts.mend("h1")
    assert "error" not in b.answer(asked)
    assert b.stays()[0][0] == "h1/gpu0"
    live.until("the driver has been asked", lambda: verdicts(daemon, "park") != [[]])
    assert verdicts(daemon, "park") == [["order_ended"]]
    assert [fact["status"] for fact in daemon.facts("state_observed", job=parked["job"])] == ["parked"]
