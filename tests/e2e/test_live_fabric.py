"""Two jobs under a live daemon with an optical switch: a server of the device's data model, on a real socket."""

import json
import sys
from pathlib import Path

import forked
import pytest
from patience import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEVICE = Path(__file__).parents[2] / "plugins" / "fabric-polatis" / "tests" / "fake_polatis.py"
NODES = (("0", "train"), ("1", "train"), ("2", "rollout"), ("3", "rollout"))
TABLE = """
[[fabric]]
name = "ocs"
driver = "polatis"
options = {{url = "http://127.0.0.1:{port}", ports = 16, password_file = {password}, timeout_s = 1.0}}
ports = {{"mock/gpu0" = [1, 2], "mock/gpu1" = [3, 4], "mock/gpu2" = [5, 6], "mock/gpu3" = [7, 8]}}
"""
JOB = {"train": {"nodes": 2, "traffic": "ring"}, "rollout": {"nodes": 2, "traffic": "mesh"}}


@pytest.fixture
def device(tmp_path):
    """The switch's process, and its port."""
    found = tmp_path / "port"
    process = forked.Popen([sys.executable, str(DEVICE), str(found)])
    until("the switch answers", found.exists)
    yield process, int(found.read_text())
    process.kill()
    process.wait()


def shown(daemon):
    """What a person sees: ``rollmuxd fabric show``."""
    command = [sys.executable, "-m", "rollmuxd", "fabric", "show", "--json"]
    said = forked.run(command, env={"ROLLMUX_URL": daemon.url, "PATH": "/usr/bin"}, capture_output=True, check=True)
    (view,) = json.loads(said.stdout)["items"]
    return view


def between(view):
    """Which node sends to which."""
    return {(circuit["from_node"], circuit["to_node"]) for circuit in view["circuits"] or ()}


def test_circuits_follow_the_phases_and_a_dead_switch_holds_up_no_job(live, device, tmp_path):
    switch, port = device
    password = tmp_path / "password"
    password.write_text("secret")
    daemon = live.daemon(nodes=NODES, tables=TABLE.format(port=port, password=json.dumps(str(password))))
    a, b = live.trainer("a", **JOB), live.trainer("b", **JOB)

    train = {("mock/gpu0", "mock/gpu1"), ("mock/gpu1", "mock/gpu0")}
    rollout = {("mock/gpu2", "mock/gpu3"), ("mock/gpu3", "mock/gpu2")}
    a.do("enter", phase="rollout")
    until("the rollout has its circuits", lambda: between(shown(daemon)) == rollout)
    a.do("leave")
    a.do("enter", phase="train")
    b.do("enter", phase="rollout")
    until("both phases have theirs", lambda: between(shown(daemon)) == train | rollout)
    until("it is at rest", lambda: shown(daemon)["status"] == "active")
    a.do("leave")
    b.do("leave")

    switch.kill()
    switch.wait()
    asked = [(one, one.ask("loop", rounds=5, seconds=0.05)) for one in (a, b)]
    for one, number in asked:
        assert "error" not in one.answer(number)
    # Phases that want circuits go on while the switch is tried, and after it was given up.
    a.do("enter", phase="train")
    view = until("the switch is left alone", lambda: (view := shown(daemon))["degraded"] and view)
    assert "cannot be reached" in view["reason"]
    a.do("leave")
    a.do("loop", rounds=2, seconds=0.01)
    assert live.overlaps(a, b) == []

    said = daemon.call("POST", "/v1/fabrics/ocs/restore", {})
    assert said.status_code == 200, said.text
    assert [fact["about"] for fact in daemon.facts("audited")] == ["ocs"]
