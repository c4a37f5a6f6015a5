"""A live daemon and hosts that are reached by OpenSSH's server, each with its own address; and links get cut.

The hosts' GPUs are made up in files, and bytes are moved there by commands, as a real driver would. A host that is away
is unknown: nothing of it is given on; what was under way there goes on, and is found out when the link is mended.
"""

import contextlib
import json
import sys
import time

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GPU = {"total_mb": 96_000, "name": "NVIDIA H20"}
HOST = """
[[hosts]]
id = "{host}"
backend = "ssh"
ram_gb = 64
options = {{made_up_gpus = {gpus}}}

[[hosts.nodes]]
gpus = [0]
pools = ["{pool}"]
"""
TABLES = """
[backends.ssh]
config = {config}
python = {python}
connect_s = 6
alive_s = 0.5

[residency.mock]
made_up_gpus = {gpus}
record = {record}
python = {python}
copy_gbps = {copy_gbps}
"""


class Hosts:
    """Two hosts, for rollouts and for training."""

    def __init__(self, testing, folder):
        self.pools = {"h1": "rollout", "h2": "train"}
        self.testing, self.folder = testing, folder
        self.keys = testing.Keys(folder)
        self.namespaces, self.servers = {}, {}

    def start(self):
        for number, host in enumerate(self.pools):
            self.namespaces[host] = self.testing.Namespace(number)
            self.namespaces[host].make()
            self.servers[host] = self.testing.OpenSshd(self.keys, namespace=self.namespaces[host])
            self.servers[host].start()
            self.keys.add(host, self.servers[host].address, self.servers[host].port)
            self.gpus(host).write_text(json.dumps({"gpus": [{**GPU, "uuid": f"GPU-{host}"}]}))

    def stop(self):
        for server in self.servers.values():
            server.stop()
        for namespace in self.namespaces.values():
            namespace.remove()

    def gpus(self, host):
        return self.folder / f"gpus-{host}.json"

    def used_mb(self, host):
        """What is on its GPU, whoever can see it."""
        return sum(one["mb"] for one in json.loads(self.gpus(host).read_text())["gpus"][0].get("processes", ()))

    def tables(self, copy_gbps):
        text = TABLES.format(
            config=json.dumps(str(self.keys.config)),
            python=json.dumps(sys.executable),
            gpus=json.dumps(str(self.folder / "gpus-{host}.json")),
            record=json.dumps(str(self.folder / "witness.jsonl")),
            copy_gbps=copy_gbps,
        )
        for host, pool in self.pools.items():
            text += HOST.format(host=host, pool=pool, gpus=json.dumps(str(self.gpus(host))))
        return text


@pytest.fixture
def hosts(tmp_path):
    testing = pytest.importorskip("ssh_servers")
    if testing.SSHD is None:
        pytest.skip("there is no sshd here; install openssh-server")
    if not testing.namespaces_can_be_made():
        pytest.skip("network namespaces cannot be made here; that needs root, and ip (iproute2)")
    made = Hosts(testing, tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def away(live, hosts):
    """A function that starts a daemon with these hosts; and no other that a job could be on."""

    def start(copy_gbps=100, **settings):
        daemon = live.daemon((("0", "elsewhere"),), tables=hosts.tables(copy_gbps), **settings)
        until_up(live, daemon, *hosts.pools)
        return daemon

    return start


def until_up(live, daemon, *names):
    for name in names:
        live.until(f"{name} is up", lambda name=name: status(daemon, name) == "up")


def status(daemon, host):
    return daemon.get(f"/v1/nodes/{host}/gpu0")["status"]


def test_two_jobs_take_turns_on_hosts_that_are_reached_by_ssh(live, hosts, away):
    daemon = away()
    a, b = live.trainer("a"), live.trainer("b")
    asked = [(one, one.ask("loop", rounds=2, seconds=0.05)) for one in (a, b)]
    for one, number in asked:
        assert "error" not in one.answer(number)

    assert [len(one.stays()) for one in (a, b)] == [4, 4]
    assert {gpu for gpu, _, _ in a.stays()} == {"h1/gpu0", "h2/gpu0"}
    assert {"load", "park"} <= {line["event"] for line in daemon.witness()}


def test_a_link_that_is_cut_in_the_middle_of_a_park_gives_nothing_on_until_it_is_mended(live, hosts, away):
    daemon = away(copy_gbps=0.4)  # five seconds for the two gigabytes of a job
    a = live.holder("a")
    b, asked = live.waiter("b")
    a.do("leave")
    live.until("the park is under way", lambda: _place(hosts, "h1") == "parking")
    hosts.namespaces["h1"].cut()

    # It comes to its end there, with nobody to see it.
    live.until("the bytes have left", lambda: hosts.used_mb("h1") == 0)
    live.until("the host is noticed to be away", lambda: status(daemon, "h1") == "lost")
    assert status(daemon, "h2") == "up", "the other host is none of its business"
    time.sleep(1)  # in which it would be given on, if anybody did
    assert b.done(asked) is None

    hosts.namespaces["h1"].mend()
    assert "error" not in b.answer(asked)
    assert b.stays()[0][0] == "h1/gpu0"


def test_a_host_that_is_switched_off_under_a_running_phase_keeps_it(live, hosts, away):
    daemon = away()
    a = live.holder("a")
    hosts.servers["h1"].stop()
    live.until("the host is noticed to be away", lambda: status(daemon, "h1") == "lost")
    assert daemon.slot(daemon.job("a")["slot"])["status"] == "running", "its client is here, and says that it goes on"

    hosts.servers["h1"].start()
    until_up(live, daemon, "h1")
    a.do("leave")
    b = live.holder("b")
    assert b.stays()[0][0] == "h1/gpu0"


def test_a_foreign_process_on_a_host_occupies_it_until_it_has_gone(live, hosts, away):
    daemon = away()
    foreign = {"pid": 1, "mb": 30_000}
    hosts.gpus("h1").write_text(json.dumps({"gpus": [{**GPU, "uuid": "GPU-h1", "processes": [foreign]}]}))
    live.until("it is occupied", lambda: status(daemon, "h1") == "occupied")
    view = daemon.get("/v1/nodes/h1/gpu0")
    assert "pid 1 " in json.dumps(view), "nobody can see whose it is"
    assert "30.0 GB" in json.dumps(view)

    hosts.gpus("h1").write_text(json.dumps({"gpus": [{**GPU, "uuid": "GPU-h1"}]}))
    until_up(live, daemon, "h1")
    live.holder("a")


def test_one_gpu_that_is_reached_in_two_ways_is_used_in_one(live, hosts):
    """Both tables mean the machine h1."""
    hosts.keys.config.write_text(hosts.keys.config.read_text().replace("Host h2\n", "Host nobody\n"))
    hosts.keys.add("h2", hosts.servers["h1"].address, hosts.servers["h1"].port)
    tables = hosts.tables(100).replace("gpus-h2.json", "gpus-h1.json")
    daemon = live.daemon((("0", "elsewhere"),), tables=tables)

    def one_is_up():
        return sorted(status(daemon, host) for host in hosts.pools)[-1:] == ["up"]

    live.until("one of them is up", one_is_up)
    time.sleep(2)  # several looks
    up = [host for host in hosts.pools if status(daemon, host) == "up"]
    assert len(up) == 1
    assert "is the same GPU as" in daemon.log.read_text() or any(
        "is the same GPU as" in json.dumps(fact) for fact in daemon.facts()
    )


def _place(hosts, host):
    with contextlib.suppress(FileNotFoundError, ValueError):
        states = json.loads((hosts.folder / f"gpus-{host}.json.states").read_text())["states"]
        return next(iter(states.values()))["place"] if states else ""
    return ""
