"""No secret in a log, a journal, an answer, an error or the list of processes: they are planted, and looked for."""

import ast
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S

from rollmuxd.client import discovery
from rollmuxd.client.errors import RollmuxError
from rollmuxd.client.sync import Daemon

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("rollmuxd", "backends/mock/rollmuxd_backend_mock", "plugins/channel/rollmuxd_channel")

#: planted; each is looked for by a part of it that is nowhere else
IN_ENV = "s3cretenv0f0f0f0f0f"
IN_OPTIONS = "s3cretoption1a1a1a1a"
IN_URL = "s3creturl2b2b2b2b2b2b"
IN_BODY = "s3cretbody3c3c3c3c3c"
IN_QUERY = "s3cretquery4d4d4d4d4"
IN_KEY = "rmx_5e5e5e5e_s3cretkey5e5e5e5e5e"
IN_REQUEST_ID = "s3cretid 6f6f6f6f6f6"


@pytest.fixture
def leaky(tmp_path):
    """A daemon that logs all it can, with secrets wherever somebody may have put one; gives it and its state."""
    if shutil.which("openssl") is None:
        pytest.skip("the own certificate is made by openssl")
    config = tmp_path / "rollmux.toml"
    config.write_text(
        f"""
        [daemon]
        state_dir = "{tmp_path}/state"
        listen = "127.0.0.1:0"
        [tls]
        mode = "on"
        [log]
        level = "debug"
        format = "json"
        [residency.channel]
        [backends.unused]
        password = "{IN_OPTIONS}"
        [[hosts]]
        id = "box"
        backend = "mock"
        nodes = [{{gpus = "0-1", pools = ["rollout"]}}]
        """
    )
    log = tmp_path / "log"
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ROLLMUX_")},
        "ROLLMUX_API_KEY": f"rmx_00000000_{IN_ENV}",
        "HOME": str(tmp_path),
    }
    words = [sys.executable, "-m", "rollmuxd", "daemon", "run", "--config", str(config)]
    with log.open("wb") as to:
        process = subprocess.Popen(words, stdout=to, stderr=to, env=environ, cwd=tmp_path)
    try:
        told = tmp_path / "state" / "daemon.json"
        give_up = time.monotonic() + PATIENCE_S
        while not told.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        yield json.loads(told.read_text()), tmp_path, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def files_under(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_bytes().decode("latin-1")
        for path in folder.rglob("*")
        if path.is_file()
    }


def commands() -> str:
    """What everybody on this machine can read of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode("latin-1"))
        except OSError:
            continue
    return "\n".join(found)


@pytest.mark.e2e
def test_planted_secrets_are_found_nowhere(leaky):
    ready, folder, _ = leaky
    answers = []
    over_unix = httpx.HTTPTransport(uds=ready["socket"])
    with httpx.Client(transport=over_unix, base_url="http://rollmuxd") as unix:
        made = unix.post("/v1/keys", json={"owner": "team", "user": "ann", "role": "admin"}).json()
    secret = made["secret"]
    random = secret.split("_", 2)[2]
    headers = {"authorization": f"Bearer {secret}", "x-request-id": IN_REQUEST_ID}
    context = ssl.create_default_context(cafile=ready["certificate"])
    with httpx.Client(base_url=ready["url"], verify=context, headers=headers) as client:
        phases = [{"name": "rollout", "pools": ["rollout"], "seconds": 1}]
        body = {"name": "math", "phases": phases, "wants": {"rollout": {}}, "idempotency_key": IN_BODY}
        answers += [
            client.post("/v1/jobs", json=body),
            client.post("/v1/jobs/j1/sessions", json={"idempotency_key": IN_BODY}),
            client.post("/v1/jobs", json={"name": IN_BODY, "password": 1}),
            client.post("/v1/jobs", content=b'{"name": "' + IN_BODY.encode()),
            client.get("/v1/jobs", params={"limit": IN_QUERY}),
            client.get("/v1/jobs", params={"api_key": IN_QUERY}),
            client.get("/v1/jobs", headers={"authorization": f"Bearer {IN_KEY}"}),
            client.get("/v1/jobs", headers={"authorization": f"Basic {IN_KEY}"}),
            client.get("/v1/jobs", headers={"authorization": IN_KEY}),
            client.request("GET", "/v1/jobs", headers={"authorization": f"Bearer {secret}x"}),
        ]
        answers += [
            client.get(path) for path in ("/metrics", "/v1/facts", "/v1/keys", "/v1/openapi.json", "/v1/report")
        ]
    time.sleep(0.2)  # the log is a little later
    private = (folder / "state" / "tls" / "key.pem").read_text().splitlines()[1]
    said = {f"answer {number}": answer.text for number, answer in enumerate(answers)}
    kept = files_under(folder)
    del kept["rollmux.toml"], kept["state/tls/key.pem"]
    places = {**said, **kept, "processes": commands()}
    for planted in (random, IN_ENV, IN_OPTIONS, IN_KEY.split("_", 2)[2], IN_REQUEST_ID, private):
        found = [place for place, text in places.items() if planted in text]
        assert found == [], f"{planted} is in {found}"
    # What one sends oneself may come back to oneself; it must not stay.
    for planted in (IN_BODY, IN_QUERY):
        assert planted not in kept["log"]
    assert "s3cretkey" not in kept["log"]


@pytest.mark.parametrize(
    "url",
    [
        f"http://ann:{IN_URL}@box:7878",
        f"https://{IN_URL}@box",
        f"http://{IN_URL}@",
        f"ftp://ann:{IN_URL}@box",
        f"http://box:port?rmx_00000000_{IN_URL}",
        f"rmx_00000000_{IN_URL}",
    ],
)
def test_a_secret_in_an_address_is_refused_and_not_repeated(url):
    with pytest.raises(RollmuxError) as caught:
        discovery.need(url, environ={"HOME": "/nowhere"})
    assert IN_URL not in str(caught.value)
    assert "http://host:port" in str(caught.value) or "ROLLMUX_API_KEY" in str(caught.value), "no remedy"


def test_a_client_that_fails_says_where_it_called_and_not_with_which_key(monkeypatch):
    monkeypatch.setenv("ROLLMUX_API_KEY", IN_KEY)
    with Daemon("http://127.0.0.1:9") as daemon, pytest.raises(RollmuxError) as caught:
        daemon.get("/healthz")
    chain, error = [], caught.value
    while error is not None:
        chain.append(f"{error} {error!r} {vars(error)}")
        error = error.__cause__ or error.__context__
    assert "127.0.0.1:9" in chain[0]
    assert "s3cretkey" not in "".join(chain)
    assert "s3cretkey" not in str(daemon.address)


def dotted(called: ast.expr) -> str:
    """``os.system``; of anything else that is called, its attributes."""
    match called:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
    return ""


@pytest.mark.parametrize("package", PACKAGES)
def test_commands_are_lists_of_words_and_no_shell_reads_them(package):
    """Whatever a job or a configuration says, it is one argument of a program, and never a line for a shell."""
    seen = 0
    for path in (REPOSITORY / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = dotted(node.func)
            where_ = f"{path.relative_to(REPOSITORY)}:{node.lineno}: {name}"
            shells = [word for word in node.keywords if word.arg == "shell"]
            assert not shells, f"{where_} names a shell"
            forbidden = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")
            assert name not in forbidden, f"{where_} runs a line through a shell"
            assert not name.endswith("create_subprocess_shell"), f"{where_} runs a line through a shell"
            if name in ("subprocess.run", "subprocess.Popen", "subprocess.check_output", "subprocess.check_call"):
                seen += 1
                assert not isinstance(node.args[0], ast.Constant | ast.JoinedStr | ast.BinOp), f"{where_}: a line"
    if package == "rollmuxd":
        assert seen, "nothing was looked at"
