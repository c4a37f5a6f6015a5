"""Fuzzing a live daemon: each described call with good and bad arguments, as an admin and as a user; and raw bytes.

schemathesis makes calls of the daemon's own description. What it cannot know is which jobs, slots and nodes there are:
half of all names are replaced by ones that exist, so that calls get further than "there is no such thing". A finding
is any answer of 500 or more, a connection that is closed without one, a body that contradicts the description, or a
daemon that is not well, or cannot be started again, afterwards.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

load_all_checks()

#: what the description cannot say: that a name is taken, that a phase is not in the cycle, that a time has no such day
LEFT_OUT = ("positive_data_acceptance", "max_response_time", "negative_data_rejection")
NODES = ("box1/gpu0-1", "box1/gpu2-3", "box2/gpu0-1")
STARTS_S = 300.0

CONFIG = """
[daemon]
state_dir = "{folder}/state"
listen = "127.0.0.1:0"
[lease]
lease_s = 20
heartbeat_s = 5
[limits]
max_body_mb = 0.2
max_jobs = 200
calls_per_s = 0
[log]
level = "error"
[owners]
team = {{max_jobs = 50, max_priority = 10}}
[[hosts]]
id = "box1"
backend = "mock"
options = {{memory = ""}}
nodes = [
    {{gpus = "0-1", pools = ["rollout"], gpu_gb = 80}},
    {{gpus = "2-3", pools = ["train", "rollout"], gpu_gb = 80}},
]
[[hosts]]
id = "box2"
backend = "mock"
options = {{memory = ""}}
nodes = [{{gpus = "0-1", pools = ["train"], gpu_gb = 80}}]
"""


class Live:
    """A daemon in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "rollmux.toml"
        self.config.write_text(CONFIG.format(folder=folder))
        self.log = folder / "log"
        self.url = self.socket = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is ready. Raises RuntimeError with its last words."""
        told = self.folder / "state" / "daemon.json"
        told.unlink(missing_ok=True)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMUX_")}
        words = [sys.executable, "-m", "rollmuxd", "daemon", "run", "--config", str(self.config)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, env=environ)
        give_up = time.monotonic() + STARTS_S
        while not told.exists():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the daemon does not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)
        ready = json.loads(told.read_text())
        self.url, self.socket = ready["url"], ready["socket"]

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> int:
        """Stop it in good order; its exit status."""
        assert self._process is not None
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STARTS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def peak_mb(self) -> float:
        """The most memory that it had since this was asked last."""
        assert self._process is not None
        of = Path(f"/proc/{self._process.pid}")
        peak = re.search(r"VmHWM:\s+(\d+) kB", (of / "status").read_text())
        assert peak is not None
        (of / "clear_refs").write_text("5")
        return int(peak[1]) / 1000

    def operator(self) -> httpx.Client:
        """An operator, at the Unix socket."""
        return httpx.Client(transport=httpx.HTTPTransport(uds=self.socket), base_url="http://rollmuxd", timeout=300)


@contextmanager
def live() -> Iterator[Live]:
    """A daemon, until the block is left."""
    with tempfile.TemporaryDirectory(prefix="rollmuxd-fuzz-") as folder:
        daemon = Live(Path(folder))
        daemon.start()
        try:
            yield daemon
        finally:
            daemon.stop()


class Known:
    """Names of things that exist, to be put into calls in place of made-up ones."""

    def __init__(self, client: httpx.Client, dice: random.Random) -> None:
        self._client, self._dice = client, dice
        self.keys: list[str] = []
        self.names: dict[str, list[Any]] = {}
        #: slots as they are, so that what belongs together is sent together
        self.slots: list[dict[str, Any]] = []
        self.sessions: dict[str, str] = {}

    def refresh(self) -> None:
        """Look what there is; make a job with a session and a slot, now and then."""
        name = f"job{self._dice.randrange(8)}"
        made = self._client.post("/v1/jobs", json=_registration(name, self._dice))
        if made.status_code in (200, 201):
            opened = self._client.post(f"/v1/jobs/{name}/sessions", json={"pid": 1})
            if opened.status_code in (200, 201):
                body = {"phase": "rollout", "request_id": "r1", "session": opened.json()["session"], "wait_s": 0.2}
                self._client.post(f"/v1/jobs/{name}/slots", json=body)
        added = self._client.post("/v1/keys", json={"owner": "team", "user": "spare"})
        if added.status_code == 201:
            self.keys.append(added.json()["key"])
        jobs = self._client.get("/v1/jobs", params={"limit": 1000}).json()["items"]
        slots = self._client.get("/v1/slots", params={"limit": 1000}).json()["items"]
        sessions = [job["session"] for job in jobs if job["session"]]
        self.sessions = {job["job"]: job["session"] for job in jobs if job["session"]}
        self.slots = [slot for slot in slots if slot["status"] != "over"][-20:] or slots[-5:]
        self.names = {
            "job": [job[key] for job in jobs[-20:] for key in ("job", "name")],
            "slot": [slot["slot"] for slot in slots[-20:]],
            "session": sessions[-20:],
            "fence": [slot["fence"] for slot in slots if slot["fence"]] or ["1.1"],
            "node": list(NODES),
            "host": ["box1", "box2"],
            "pool": ["rollout", "train"],
            "group": [job["group"] for job in jobs if job["group"]],
            "key": self.keys[-20:],
            "phase": ["rollout", "train"],
            "request_id": [slot["request_id"] for slot in slots[-20:]],
            "keep": [["box1/gpu0"], ["box1/gpu2", "box1/gpu3"]],
            "rank": [0, 1],
            "owner": ["team", "ops"],
        }

    def put_in(self, given: Any) -> None:
        """Replace half of all names that are known by ones that exist, however deep."""
        if isinstance(given, dict):
            for name, value in given.items():
                choices = self.names.get(name)
                if choices and self._dice.random() < 0.5:
                    given[name] = self._dice.choice(choices)
                else:
                    self.put_in(value)
        elif isinstance(given, list):
            for value in given:
                self.put_in(value)


def _registration(name: str, dice: random.Random) -> dict[str, Any]:
    phases = [
        {
            "name": "rollout",
            "pools": ["rollout"],
            **({"seconds": dice.choice([0, 1, 10])} if dice.random() < 0.5 else {}),
        },
        {"name": "train", "pools": ["train"]},
    ]
    more = dice.choice([{}, {"slo": 2}, {"park": "at_release"}, {"colocate": True}, {"priority": 5}, {"ranks": 2}])
    return {"name": name, "phases": phases, "wants": {"rollout": {}, "train": {}}, "replace": True, **more}


class Found:
    """What was tried, and what was found."""

    def __init__(self) -> None:
        self.cases = 0
        self.answers: Counter[int] = Counter()
        self.server_errors = 0
        self.findings: list[str] = []

    def finding(self, what: str) -> None:
        """Something that must not be."""
        # One bug is found by many calls.
        short = re.sub(r"\s+", " ", what)[:1500]
        if len(self.findings) < 50 and not any(short[:120] == known[:120] for known in self.findings):
            self.findings.append(short)


def fuzz_calls(daemon: Live, found: Found, until: float, start: int) -> None:
    """Call whatever is described, until the time is over."""
    dice = random.Random(start)
    checks = [check for check in CHECKS.get_all() if check.__name__ not in LEFT_OUT]
    schema = schemathesis.openapi.from_url(f"{daemon.url}/v1/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    with daemon.operator() as operator:
        keys = {
            role: operator.post("/v1/keys", json={"owner": "team", "user": role, "role": role}).json()["secret"]
            for role in ("admin", "user")
        }
        known = Known(operator, dice)
        known.refresh()
        number = start
        while time.monotonic() < until and daemon.alive:
            dice.shuffle(operations)
            for operation in operations:
                if time.monotonic() > until or not daemon.alive:
                    break
                if number % 5 == 0:
                    known.refresh()
                number += 1
                bad = operation.body or operation.query
                modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if bad else [])]
                _fuzz_one(operation, dice.choice(modes), known, dice.choice(list(keys.items())), checks, found, number)


def _fuzz_one(operation, mode, known, key, checks, found, number) -> None:
    role, secret = key
    headers = {"Authorization": f"Bearer {secret}"}

    @seed(number)
    @settings(
        max_examples=12,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case):
        found.cases += 1
        for part in (case.path_parameters, case.query, case.body):
            known.put_in(part)
        _hurry(case.query)
        _hurry(case.body)
        try:
            answer = case.call(headers=headers, timeout=300)
        except Exception as error:
            found.finding(f"{operation.label} as {role}: {type(error).__name__}: {error}")
            return
        found.answers[answer.status_code] += 1
        if answer.status_code >= 500:
            found.server_errors += 1
            found.finding(
                f"{operation.label} as {role}: {answer.status_code} {answer.text} for {case.as_curl_command()}"
            )
            return
        try:
            case.validate_response(answer, checks=checks)
        except AssertionError as error:
            found.finding(f"{operation.label} as {role}: {error}")
        except BaseExceptionGroup as group:
            found.finding(f"{operation.label} as {role}: {group.exceptions[0]}")

    call()


def _hurry(given: Any) -> None:
    """Nobody waits for an answer here."""
    if isinstance(given, dict):
        for name, least in (("wait_s", 0.05), ("wait_ms", 50)):
            value = given.get(name)
            if isinstance(value, int | float) and value > least:
                given[name] = least
            elif isinstance(value, str) and re.fullmatch(r"[0-9.e+]+", value):
                given[name] = str(least)


# ---- calls that are nearly right -----------------------------------------------------------------------------------

NASTY = (
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, "", "x", "rollout", "train", "a" * 201,
    "a" * 5000, "\x00", "é\u202e", "a\n", "../..", [], {}, [[]], {"": None}, ["rollout"] * 9, "1.1", "9.9",
    "999999999999999999.1",
    "box1/gpu0-1", ["box1/gpu0"], "RAW:1e400", "RAW:-1e400", "RAW:NaN", 'RAW:"\\ud800"', "RAW:" + "9" * 400, "RAW:1E5",
)  # fmt: skip


def fuzz_nearly(daemon: Live, found: Found, until: float, start: int, least: int) -> None:
    """Good calls about things that exist, with one thing bent or nothing at all; as fast as they are answered.

    On a slow machine it goes on until there were more than ``least`` cases in all, and a tenth of them went well.
    """
    dice = random.Random(start)
    with daemon.operator() as operator, httpx.Client(base_url=daemon.url, timeout=300) as user:
        made = operator.post("/v1/keys", json={"owner": "team", "user": "near", "role": "lead"}).json()
        user.headers["authorization"] = f"Bearer {made['secret']}"
        known = {"operator": Known(operator, dice), "lead": Known(user, dice)}
        number = 0
        while daemon.alive and (time.monotonic() < until or found.cases <= least or found.answers[200] <= least // 10):
            who = dice.choice(list(known))
            if number % 20 == 0:
                for each in known.values():
                    each.refresh()
            number += 1
            method, path, body = _nearly(known[who], dice)
            raw = None if body is None else _spelt(_bent(body, dice) if dice.random() < 0.6 else body)
            client = operator if who == "operator" else user
            found.cases += 1
            try:
                headers = {} if raw is None else {"content-type": "application/json"}
                answer = client.request(method, path, content=raw, headers=headers)
            except httpx.HTTPError as error:
                found.finding(f"{method} {path} as {who}: {type(error).__name__}: {error} for {raw}")
                continue
            found.answers[answer.status_code] += 1
            if answer.status_code >= 500:
                found.server_errors += 1
                found.finding(f"{method} {path} as {who}: {answer.status_code} {answer.text} for {raw}")


def _nearly(known: Known, dice: random.Random) -> tuple[str, str, Any]:
    slot = dice.choice(known.slots) if known.slots else {"slot": "s1", "job": "j1", "fence": "1.1", "gpus": []}
    job, fence = slot["job"], slot["fence"] or "1.1"
    session = known.sessions.get(job, "e1")
    node, host = dice.choice(NODES), dice.choice(["box1", "box2"])
    phase, name = dice.choice(["rollout", "train"]), f"job{dice.randrange(8)}"
    request = {"phase": phase, "request_id": f"r{dice.randrange(9)}"}
    keep = slot["gpus"][: dice.randrange(len(slot["gpus"]) + 1)] or ["box1/gpu0"]
    after = {} if dice.random() < 0.5 else {"next": request}
    end = {"session": session, "rank": 0, "order": f"o{dice.randrange(30)}", "ok": dice.random() < 0.7, "seconds": 1}
    calls: tuple[tuple[str, str, Any], ...] = (
        ("POST", "/v1/jobs", {**_registration(name, dice), "idempotency_key": dice.choice(["", "k"])}),
        ("POST", f"/v1/jobs/{job}/sessions", {"pid": 5, "host": "box1", "started": "1", "idempotency_key": "k"}),
        ("POST", f"/v1/jobs/{job}/slots", {**request, "session": session, "wait_s": 0.02}),
        ("POST", f"/v1/sessions/{session}/heartbeat", {"slot": slot["slot"], "done": 1, "total": 2}),
        ("POST", f"/v1/slots/{slot['slot']}/release", {"fence": fence, "measured": {"tokens": 5.0}, **after}),
        ("POST", f"/v1/slots/{slot['slot']}/shrink", {"fence": fence, "keep": keep}),
        ("POST", f"/v1/slots/{slot['slot']}/revoke", {"reason": "fuzz"}),
        ("DELETE", f"/v1/slots/{slot['slot']}", None),
        ("POST", f"/v1/sessions/{session}/give-back", None),
        ("DELETE", f"/v1/sessions/{session}", None),
        ("POST", f"/v1/jobs/{job}/{dice.choice(['pause', 'resume', 'reinstate'])}", None),
        ("DELETE", f"/v1/jobs/{job}", {"reason": "fuzz"}),
        ("POST", f"/v1/nodes/{node}/drain", {"evict": dice.random() < 0.2, "reason": "fuzz"}),
        ("POST", f"/v1/nodes/{node}/{dice.choice(['undrain', 'declare-clean'])}", {}),
        ("POST", f"/v1/hosts/{host}/{dice.choice(['undrain', 'declare-clean'])}", {}),
        ("POST", f"/v1/channel/{job}/results", end),
        ("GET", f"/v1/channel/{job}/orders?session={session}&rank={dice.randrange(3)}&wait_s=0.02", None),
        ("POST", "/v1/keys", {"owner": "team", "user": "x", "role": "viewer", "expires_s": 0.1}),
        ("GET", f"/v1/jobs/{job}/explain", None),
        ("GET", f"/v1/facts?after={dice.randrange(50)}&limit={dice.randrange(1, 50)}&job={job}", None),
        ("GET", f"/v1/report?by={dice.choice(['job', 'owner', 'pool'])}&since=2026-01-01", None),
        ("GET", f"/v1/{dice.choice(['groups', 'nodes', 'hosts', 'pools', 'slots', 'jobs'])}?limit=3", None),
        ("GET", "/metrics", None),
    )
    return dice.choice(calls)


def _bent(value: Any, dice: random.Random) -> Any:
    """The value with one thing somewhere in it replaced, lost or doubled."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        name = dice.choice(list(value))
        if dice.random() < 0.15:
            return {other: kept for other, kept in value.items() if other != name}
        return {**value, name: _bent(value[name], dice)}
    if isinstance(value, list) and value and dice.random() < 0.7:
        at = dice.randrange(len(value))
        return [*value[:at], *([_bent(value[at], dice)] * dice.choice([1, 1, 2, 0])), *value[at + 1 :]]
    return dice.choice(NASTY)


def _spelt(value: Any) -> bytes:
    """As JSON; what begins with RAW: as it is."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r'"RAW:((?:[^"\\]|\\.)*)"', lambda it: json.loads(f'"{it[1]}"'), text).encode(
        "utf-8", "surrogatepass"
    )


# ---- raw bytes -------------------------------------------------------------------------------------------------------

PIECES = (
    b"GET ", b"POST ", b"DELETE ", b"HEAD ", b"/v1/jobs", b"/v1/jobs/j1/slots", b"/v1/slots/s1/release", b"/healthz",
    b"/%ff%00/../", b"?limit=1&limit=2", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/9.9\r\n", b"\r\n", b"\n", b"\x00",
    b"host: x\r\n", b"content-length: 5\r\n", b"content-length: -1\r\n", b"content-length: 99999999999999999999\r\n",
    b"content-length: 2\r\ncontent-length: 3\r\n", b"transfer-encoding: chunked\r\n", b'5\r\n{"a":\r\n', b"0\r\n\r\n",
    b"ffffffffffffffff\r\n", b"content-type: application/json\r\n", b"content-type: \xff\r\n",
    b"expect: 100-continue\r\n",
    b"upgrade: websocket\r\nconnection: upgrade\r\n", b"connection: close\r\n", b"authorization: Bearer \xc3\xbc\r\n",
    b"authorization: Bearer KEY\r\n", b"{}", b"[" * 5000, b'{"name":' * 3000, b'"\\ud800"', b"1e999", b"9" * 400,
    b'{"wait_s":1e400}', b"\xff\xfe", b"\xed\xa0\x80", b"NaN", b"x-request-id: \x7f\r\n", b"x" * 3000,
)  # fmt: skip


CHUNKED = b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
AUTHORIZED = b"authorization: Bearer KEY\r\n"
#: how a call begins that does not end, and what it goes on with
BEGUN = (
    b"", b"GET /", b"GET / HTTP/1.1\r\n", CHUNKED + b"\r\n", CHUNKED + b"\r\n0\r\n", CHUNKED + b"\r\n5",
    CHUNKED + AUTHORIZED + b"\r\n", CHUNKED + AUTHORIZED + b"\r\n0\r\n", CHUNKED + AUTHORIZED + b"\r\n5;x=",
)  # fmt: skip
MORE = (
    b"a:b\r\n", b"y", b"\r\n", b"1\r\nx\r\n", b";a=b", b"0", b"GET / HTTP/1.1\r\n\r\n",
    b"POST /v1/jobs HTTP/1.1\r\n\r\n", b"GET /v1/jobs HTTP/1.1\r\n" + AUTHORIZED + b"\r\n",
)  # fmt: skip
FLOOD = 4_000_000
#: megabytes that a daemon may need for what one connection sends
GROWS_MB = 32


def fuzz_bytes(daemon: Live, found: Found, until: float, start: int) -> None:
    """Send what is nearly HTTP. Any answer is below 500, but for methods and versions that are not spoken."""
    dice = random.Random(start)
    host, _, port = daemon.url.removeprefix("http://").rpartition(":")
    with daemon.operator() as operator:
        secret = operator.post("/v1/keys", json={"owner": "team", "user": "raw"}).json()["secret"].encode()
    while time.monotonic() < until and daemon.alive:
        found.cases += 1
        sent = b"".join(dice.choice(PIECES) for _ in range(dice.randrange(1, 14)))
        if dice.random() < 0.7:
            sent = (
                dice.choice([b"GET /v1/jobs", b"POST /v1/jobs"])
                + b" HTTP/1.1\r\nhost: x\r\nauthorization: Bearer KEY\r\n"
                + sent
            )
        sent = sent.replace(b"KEY", secret) + b"\r\n\r\n"
        for _ in range(dice.randrange(3)):
            at = dice.randrange(len(sent))
            sent = sent[:at] + bytes([dice.randrange(256)]) + sent[at + 1 :]
        floods = dice.random() < 0.1
        if floods:
            more = dice.choice(MORE)
            sent = (dice.choice(BEGUN) + more * (FLOOD // len(more))).replace(b"KEY", secret)
            daemon.peak_mb()
            before_mb = daemon.peak_mb()
        answer = b""
        try:
            with socket.create_connection((host, int(port)), timeout=2 if floods else 0.3) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                while len(answer) < 1_000_000 and (part := connection.recv(65536)):
                    answer += part
        except OSError:  # it has hung up: before all was said, there is no connection to shut down
            pass
        if floods and daemon.alive and (grown_mb := daemon.peak_mb() - before_mb) > GROWS_MB:
            found.finding(f"it grew by {grown_mb:.0f} MB for the bytes {sent[:400]!r}")
        for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer):
            found.answers[int(status)] += 1
            if status[:1] == b"5":
                found.server_errors += 1
                found.finding(f"{status.decode()} for the bytes {sent[:400]!r}")


# ---- afterwards ------------------------------------------------------------------------------------------------------


def judge(daemon: Live, found: Found) -> None:
    """Whether the daemon is well, has logged no bug, stops in good order, and starts again with the same jobs."""
    if not daemon.alive:
        found.server_errors += 1
        found.finding(f"the daemon is dead: {daemon.log.read_text()[-1500:]}")
        return
    with daemon.operator() as operator:
        if (ready := operator.get("/readyz")).status_code != 200:
            found.finding(f"not ready afterwards: {ready.text}")
        before = {job["job"]: job["run"] for job in operator.get("/v1/jobs", params={"limit": 1000}).json()["items"]}
    if (status := daemon.stop()) != 0:
        found.finding(f"it ended with status {status}: {daemon.log.read_text()[-1500:]}")
    try:
        daemon.start()
    except RuntimeError as error:
        found.finding(str(error))
        return
    with daemon.operator() as operator:
        after = {job["job"]: job["run"] for job in operator.get("/v1/jobs", params={"limit": 1000}).json()["items"]}
    if before != after:
        found.finding(f"after a restart there are other jobs: {before} before, {after} after")
    said = daemon.log.read_text()
    for bug in re.finditer(r"^.*(http_failed|input_crashed|broken_invariant|sink_failed).*$", said, re.MULTILINE):
        last = [line for line in said[bug.end() : bug.end() + 20_000].splitlines() if line[:1].isalpha()][:2]
        found.finding(f"logged: {bug[0][35:]}: {' '.join(last)}")


def fuzz(budget_s: float, start: int, least: int = 0) -> Found:
    """Fuzz a daemon for so long, and for ``least`` cases however long they take."""
    found = Found()
    with live() as daemon:
        begun = time.monotonic()
        fuzz_calls(daemon, found, begun + budget_s * 0.5, start)
        fuzz_nearly(daemon, found, begun + budget_s * 0.9, start, least)
        fuzz_bytes(daemon, found, begun + budget_s, start)
        judge(daemon, found)
    return found
