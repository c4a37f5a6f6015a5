"""``make -s real-weights``: a real vLLM on the CPU gets new weights from another namespace, and answers as one started
from them does. One JSON object; exit 1 where it does not.

Two network namespaces: a trainer, and a host with the puller and the server. vLLM finds our engine by its entry point.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import distribution
from pathlib import Path

import httpx

from rollmuxd_weights import Publisher, Puller
from rollmuxd_weights.apply import vllm
from rollmuxd_weights.namespaces import Clusters, removed_on_signals, unavailable

REPOSITORY = Path(__file__).parents[3]
TINY = REPOSITORY / "plugins/vllm/tests/tiny_model.py"
PATIENCE_S = 600.0
PROMPTS = [f"w{number} w{7 * number % 125} w{13 * number % 125}" for number in range(12)]
STEP = 2
_CHANGED = """
import sys, torch
from transformers import LlamaForCausalLM
model = LlamaForCausalLM.from_pretrained(sys.argv[1])
torch.manual_seed(1)
with torch.no_grad():
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.05)
model.save_pretrained(sys.argv[2])
"""


def main():
    """Make the models, the namespaces and both hosts; judge."""
    why = unavailable() or ("" if os.environ.get("ROLLMUX_VLLM_PYTHON") else "ROLLMUX_VLLM_PYTHON names no vLLM")
    if why:
        print(json.dumps({"ok": False, "error": why}))
        return 1
    python = os.environ["ROLLMUX_VLLM_PYTHON"]
    with tempfile.TemporaryDirectory(prefix="rollmuxd-real-weights-") as name, removed_on_signals():
        folder = Path(name)
        run = {"check": True, "timeout": PATIENCE_S, "stdout": sys.stderr}
        subprocess.run([python, TINY, folder / "old"], **run)
        shutil.copytree(folder / "old", folder / "new")
        subprocess.run([python, "-c", _CHANGED, folder / "old", folder / "new"], **run)
        with serving(python, folder, "new") as url:
            wanted = state_of(url)
        with Clusters(1, 1, slow=100, fast=100) as clusters:
            config = json.dumps({"folder": name, "hosts": clusters.hosts, "python": python})
            env = {**os.environ, "ROLLMUX_WEIGHTS_KEY": os.urandom(16).hex()}
            words = (sys.executable, __file__)
            trainer = subprocess.Popen(
                clusters.command("train0", *words, "trainer", config), stdin=subprocess.PIPE, env=env
            )
            try:
                inside = clusters.command("roll0", *words, "rollout", config)
                ran = subprocess.run(inside, stdout=subprocess.PIPE, env=env, timeout=PATIENCE_S, check=True)
            finally:
                trainer.communicate()
        told = json.loads(ran.stdout)
    before, after = told.pop("before"), told.pop("after")
    judged = {
        "tokens_equal": after["tokens"] == wanted["tokens"],
        "checksums_equal": bool(wanted["checksums"]) and after["checksums"] == wanted["checksums"],
        "tokens_changed": before["tokens"] != after["tokens"],
        "checksums_changed": before["checksums"] != after["checksums"],
        "weight_version": after["version"] == str(STEP) != before["version"],
        "no_request_lost": told["requests"] > 0 and told["lost"] == 0,
    }
    result = {
        "ok": all(judged.values()),
        **judged,
        **told,
        "prompts": len(PROMPTS),
        "tensors": len(wanted["checksums"]),
    }
    print(json.dumps(result, indent=1))
    return 0 if result["ok"] else 1


def trainer(config):
    """Publish the new model's tensors, and serve until the input ends."""
    import numpy as np

    from rollmuxd_weights.safetensors import tensors
    from rollmuxd_weights.store import mapped

    file = Path(config["folder"], "new", "model.safetensors")
    made = {}
    for name, one, body in tensors(mapped(file)):
        assert one.dtype == "F32", f"the tiny model is of {one.dtype}"
        made[name] = np.frombuffer(body, dtype="<f4").reshape(one.shape)
    with Publisher(
        "real", config["hosts"], me="train0", dir=Path(config["folder"], "train0"), chunk=1 << 14
    ) as publisher:
        publisher.publish(made, STEP, fence="1.17")
        sys.stdin.read()


def rollout(config):
    """Pull while the server answers; load; say what it answered before and after."""
    folder = Path(config["folder"])
    with (
        serving(config["python"], folder, "old") as url,
        Puller("real", config["hosts"], me="roll0", dir=folder / "roll0") as puller,
        asking(url) as asked,
    ):
        before = state_of(url)
        began = time.monotonic()
        path = puller.ready(STEP, PATIENCE_S)
        pulled = time.monotonic()
        vllm.update(url, path)
        updated = time.monotonic()
        after = state_of(url)
        # A second update of the same server, and a version that is not there: it is refused, and the server goes on.
        vllm.update(url, path)
        with contextlib.suppress(RuntimeError):
            vllm.update(url, path.with_name("0.0.0.99.safetensors"))
            raise AssertionError("a version that is not there was loaded")
        vllm.update(url, path)
        assert state_of(url) == after
    print(
        json.dumps({"before": before, "after": after, **asked, "pull_s": pulled - began, "update_s": updated - pulled})
    )


@contextlib.contextmanager
def asking(url):
    """Ask all the time, and count answers and failures."""
    told, over = {"requests": 0, "lost": 0}, threading.Event()

    def ask():
        while not over.is_set():
            told["requests"] += 1
            try:
                says(url, PROMPTS[0])
            except (httpx.HTTPError, AssertionError, KeyError) as error:
                print("lost:", repr(error), file=sys.stderr)
                told["lost"] += 1

    asks = threading.Thread(target=ask)
    asks.start()
    try:
        yield told
    finally:
        over.set()
        asks.join()


def says(url, prompt):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def state_of(url):
    """Greedy answers, a sum of every tensor, and the version that the server says."""
    sums = httpx.post(f"{url}/weight_checker", json={"action": "checksum"}, timeout=PATIENCE_S)
    version = httpx.get(f"{url}/weight_info", timeout=PATIENCE_S)
    assert sums.status_code == version.status_code == 200, (sums.text, version.text)
    return {
        "tokens": [says(url, prompt) for prompt in PROMPTS],
        "checksums": sums.json()["checksums"],
        "version": version.json()["weight_version"],
    }


@contextlib.contextmanager
def serving(python, folder, model):
    """A server of a model in this process's namespace."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMUX_")}
    env |= {
        "PYTHONPATH": os.pathsep.join(map(str, (known(folder), REPOSITORY, REPOSITORY / "plugins/weights"))),
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1",
    }  # fmt: skip
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / model),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager",
        "--max-model-len", "128", "--max-num-seqs", "2",
        "--dtype", "float32", "--weight-transfer-config", json.dumps({"backend": vllm.BACKEND}),
    ]  # fmt: skip
    log = folder / f"{model}.log"
    url = f"http://127.0.0.1:{port}"
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None, f"vLLM ended: {log.read_text()[-5000:]}"
            assert time.monotonic() < until, f"vLLM is not there: {log.read_text()[-5000:]}"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200:
                    break
            time.sleep(0.5)
        yield url
    except Exception:
        print(log.read_text()[-5000:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()


def known(folder):
    """A folder with what an installation of this package tells vLLM: its entry points."""
    where = folder / "installed" / "rollmuxd-0.1.0.dist-info"
    where.mkdir(parents=True, exist_ok=True)
    for name in ("METADATA", "entry_points.txt"):
        (where / name).write_text(distribution("rollmuxd").read_text(name))
    return where.parent


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"trainer": trainer, "rollout": rollout}[sys.argv[1]](json.loads(sys.argv[2]))
    else:
        sys.exit(main())
