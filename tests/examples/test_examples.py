"""Each example runs to its end without a daemon, since that is how a reader tries it first."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest
from patience import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCH = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
TRL = pytest.mark.skipif(not find_spec("trl"), reason="trl is not installed")
LOOPS = EXAMPLES.with_name("plugins") / "demo" / "rollmuxd_demo" / "loops"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (["hello.py"], "step 9: centre (3.00, -1.00)"),
        (["async_hello.py"], "hello-b step 9"),
        (["tail.py", "--step-s", "0"], "step 2: 6885 tokens"),
        (["vllm_filler.py", os.devnull, os.devnull], "0 requests answered"),
        pytest.param(
            ["torch_states.py", "--iterations", "5", "--width", "16"],
            "step 4: reward",
            marks=TORCH,
        ),
        ([LOOPS / "sort_digits.py", "--iterations", "2", "--scale", "0.01", "--name", "mine"], "mine   1  reward"),
    ],
    ids=lambda value: Path(value[0]).name if isinstance(value, list) else "",
)
def test_an_example_runs_to_its_end_without_a_daemon(program, says, tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX", "XDG_"))}
    nowhere = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, EXAMPLES / program[0], *program[1:]]
    done = subprocess.run(command, env=kept | nowhere, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (["hello.py", "--help"], "usage: hello.py"),
        (["tail_batching.py", "http://127.0.0.1:9"], "http://127.0.0.1:9 is no engine"),
        (["tail_batching.py", "127.0.0.1:9"], "write http://HOST:PORT"),
        (["vllm_filler.py", "missing", os.devnull], "No such file or directory: 'missing'"),
        (["vllm_filler.py", __file__, os.devnull], "JSONDecodeError"),
        (["vllm_filler.py", os.devnull, "missing/answers"], "No such file or directory: 'missing/answers'"),
        (["vllm_filler.py", os.devnull, os.devnull, "--gpu-gb", "-1"], "gpu_gb=-1.0: expected `float` >= 0"),
        (["vllm_filler.py", os.devnull, os.devnull, "--name", "a b"], "error: the job's name is 'a b'"),
        (["hello.py", "a b"], "error: the job's name is 'a b'"),
        (["tail.py", "--name", "a b"], "error: the job's name is 'a b'"),
        (["tail.py", "--step-s", "-1"], "error: --step-s is -1.0, and it is at least 0"),
        pytest.param(["torch_states.py", "--name", "a b"], "error: the job's name is 'a b'", marks=TORCH),
        pytest.param(["torch_states.py", "--gpu-gb", "-1"], "gpu_gb=-1.0: expected `float` >= 0", marks=TORCH),
        pytest.param(["torch_states.py", "--width", "0"], "error: --width is 0, and it is at least 1", marks=TORCH),
        pytest.param(["trl_grpo.py", "--name", "a b"], "error: the job's name is 'a b'", marks=TRL),
        pytest.param(["trl_grpo.py", "--width", "7"], "error: --width is 7, and it is a multiple of 2", marks=TRL),
        pytest.param(["trl_grpo.py", "--steps", "0"], "error: --steps is 0, and it is at least 1", marks=TRL),
    ],
)
def test_an_example_says_in_a_line_what_is_wrong_with_its_arguments(program, says, tmp_path):
    command = [sys.executable, EXAMPLES / program[0], *program[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_filler_sends_again_what_its_server_could_not_answer_and_keeps_what_it_was_told_at_last(tmp_path):
    asked = Counter()

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["name"]
            asked[name] += 1
            if name == "breaks" and asked[name] == 1:
                self.connection.close()
                return
            status = {"broken": 500, "busy": 503 if asked[name] < 3 else 200, "wrong": 404}.get(name, 200)
            body = b"no such page" if name == "wrong" else b'{"choices": []}'
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

        def finish(self):
            with suppress(OSError, ValueError):
                super().finish()

    names = ("fine", "breaks", "busy", "broken", "wrong")
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text(
        "".join(json.dumps({"custom_id": it, "url": "/v1", "body": {"name": it}}) + "\n" for it in names)
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX", "XDG_"))}
        command = [sys.executable, EXAMPLES / "vllm_filler.py", requests, answers, "--url", url]
        done = subprocess.run(
            command, env=kept | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=PATIENCE_S
        )
        first = Counter(asked)
        again = subprocess.run(
            command, env=kept | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=PATIENCE_S
        )
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert "4 requests answered, 1 failed" in done.stdout
    assert again.returncode == 0, again.stderr
    assert asked - first == {"broken": 3}
    dead = subprocess.run(
        command, env=kept | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (dead.returncode, "did not answer 3 times: ConnectError" in dead.stderr) == (1, True)
    told = {it["custom_id"]: it["response"] for it in map(json.loads, answers.read_text().splitlines())}
    assert {name: it["status_code"] for name, it in told.items()} == {
        **dict.fromkeys(("fine", "breaks", "busy"), 200), "broken": 500, "wrong": 404,
    }  # fmt: skip
    assert told["wrong"]["body"] == {"error": {"message": "no such page"}}
    assert first == {"fine": 1, "breaks": 2, "busy": 3, "broken": 3, "wrong": 1}


CONFIG = """
[daemon]
listen = ""
state_dir = {state}
[lease]
heartbeat_s = 0.1
[limits]
observe_s = 0.2
[[hosts]]
id = "box"
backend = "mock"
[[hosts.nodes]]
gpus = "0-3"
pools = ["rollout"]
[[hosts.nodes]]
gpus = "4"
pools = ["train"]
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_the_tail_gives_gpus_to_a_second_one_of_its_kind(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX", "XDG_"))}
    socket = tmp_path / "state" / "rollmux.sock"
    env = {**kept, "HOME": str(tmp_path), "ROLLMUX_URL": f"unix://{socket}", "ROLLMUX_REQUIRED": "1"}
    config = tmp_path / "rollmux.toml"
    config.write_text(CONFIG.format(state=json.dumps(str(tmp_path / "state"))))
    with (
        (tmp_path / "daemon.log").open("wb") as log,
        forked.Popen(
            [sys.executable, "-m", "rollmuxd", "daemon", "run", "--config", str(config)], env=env, stderr=log
        ) as daemon,
    ):
        both = []
        try:
            give_up = time.monotonic() + PATIENCE_S
            while not (tmp_path / "state" / "daemon.json").exists():
                assert time.monotonic() < give_up, (tmp_path / "daemon.log").read_text()
                time.sleep(0.05)
            tail = [sys.executable, str(EXAMPLES / "tail.py"), "--step-s", "0.01", "--iterations", "2"]
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            both += [forked.Popen([*tail, "--name", name], env=env, **pipes) for name in "ab"]
            said = [one.communicate(timeout=PATIENCE_S) for one in both]
        finally:
            for process in (*both, daemon):
                process.terminate()
    assert [one.returncode for one in both] == [0, 0], said
    assert any("sequences go on, on box/gpu0" in out for out, _ in said), said
