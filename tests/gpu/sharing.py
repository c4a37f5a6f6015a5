"""The checks that need a daemon's packages: cuda-checkpoint, and two jobs on one GPU."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# ---- cuda-checkpoint ------------------------------------------------------------------------------------------------

#: says what it has, and says it again when asked
HOLDER = """
import hashlib, sys, torch
torch.manual_seed(3)
held = torch.randint(0, 255, (int(sys.argv[1]),), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
for line in ["", *iter(sys.stdin.readline, "")]:
    print(hashlib.blake2b(held.cpu().numpy(), digest_size=16).hexdigest(), flush=True)
"""


def cuda_checkpoint(asked: Any) -> dict:
    if asked.cpu:
        return {"ok": None, "why": "needs a GPU"}
    import torch

    nbytes = int(min((asked.gb or 4) * 1e9, torch.cuda.mem_get_info()[0] / 2))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        digest = holder.stdout.readline()
        return asyncio.run(_checkpointed(holder, digest, nbytes))
    finally:
        holder.kill()
        holder.wait()


async def _checkpointed(holder: subprocess.Popen, digest: str, nbytes: int) -> dict:
    import torch
    from fake_engines import EngineHost

    from rollmuxd.spi import OrderKind, PluginError, StateOrder, StateSpec
    from rollmuxd_cuda_checkpoint import CudaCheckpointResidency

    tool = shutil.which("cuda-checkpoint") or str(Path(__file__).with_name("cuda_checkpoint.py"))
    driver = CudaCheckpointResidency(tool=tool)
    started = Path(f"/proc/{holder.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]

    def order(kind: OrderKind) -> StateOrder:
        return StateOrder(
            order=f"o-{kind.value}", kind=kind, job="j1", run=1, owner="gpu", name="holder", pool="train",
            node="here/gpu0", host="here", gpus=("here/gpu0",), state=StateSpec(pool="train"), ranks=1, warm=True,
            pid=holder.pid, started=started, backend=EngineHost("here", {}),
        )  # fmt: skip

    def used() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    try:
        loaded, began = used(), time.perf_counter()
        await driver.park(order(OrderKind.PARK))
        parked, park_s = used(), time.perf_counter() - began
        began = time.perf_counter()
        await driver.load(order(OrderKind.LOAD))
        load_s = time.perf_counter() - began
    except PluginError as error:
        old = "needs 570" in str(error) or "NOT_SUPPORTED" in str(error)
        return {"ok": None if old else False, "why": str(error), "tool": tool}
    holder.stdin.write("again\n")
    holder.stdin.flush()
    exact = holder.stdout.readline() == digest
    return {
        "ok": exact and loaded - parked >= nbytes,
        "tool": tool,
        "bytes": nbytes,
        "freed_mb": (loaded - parked) // 2**20,
        "park_s": round(park_s, 2),
        "load_s": round(load_s, 2),
        "bit_exact": exact,
    }


# ---- two jobs -------------------------------------------------------------------------------------------------------

CONFIG = """
[daemon]
listen = ""
state_dir = {state}
[lease]
heartbeat_s = 0.5
[[hosts]]
id = "here"
backend = "{backend}"
ram_gb = 64
[[hosts.nodes]]
gpus = [0]
pools = ["rollout", "train"]
{gpu}
"""
JOBS = (("a", 1), ("b", 2))


def two_jobs(asked: Any) -> dict:
    iterations, width = ("3", "32") if asked.cpu else ("30", "8192")
    gpu_gb = "0.1" if asked.cpu else "8"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        home = Path(folder)
        alone = {}
        for name, seed in JOBS:
            alone[name] = _weights(_start(home, name, seed, iterations, width, gpu_gb))
        socket = _daemon(home, ending, cpu=asked.cpu)
        both = [_start(home, name, seed, iterations, width, gpu_gb, socket) for name, seed in JOBS]
        shared = {name: _weights(one) for (name, _), one in zip(JOBS, both, strict=True)}
        facts = _facts(socket)
    moved = {kind: sum(fact.get("kind") == kind for fact in facts["order_issued"]) for kind in ("load", "park")}
    quarantined = [fact["reason"]["text"] for fact in facts["job_quarantined"] + facts["node_quarantined"]]
    left = [fact["mb"] for fact in facts["residual_memory_observed"]]
    return {
        "ok": alone == shared and moved["park"] > 2 and not quarantined,
        "same_weights": alone == shared,
        "weights": shared,
        "orders": moved,
        "quarantined": quarantined,
        "residual_mb": max(left, default=0),
        "backend": "mock" if asked.cpu else "local",
    }


def _start(
    home: Path, name: str, seed: int, iterations: str, width: str, gpu_gb: str, socket: Path | None = None
) -> subprocess.Popen:
    where = {"ROLLMUX_URL": "off"} if socket is None else {"ROLLMUX_URL": f"unix://{socket}", "ROLLMUX_REQUIRED": "1"}
    program = [sys.executable, str(ROOT / "examples/torch_states.py"), "--name", name, "--seed", str(seed)]
    more = ["--iterations", iterations, "--width", width, "--gpu-gb", gpu_gb, "--colocate"]
    log = (home / f"{name}-{'alone' if socket is None else 'shared'}.log").open("w+", encoding="utf-8")
    paths = os.pathsep.join(filter(None, [str(ROOT / "plugins/channel"), os.environ.get("PYTHONPATH")]))
    env = {**_plain(), **where, "HOME": str(home), "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": paths}
    started = subprocess.Popen([*program, *more], env=env, stdout=log, stderr=subprocess.STDOUT, text=True)
    started.log = log  # type: ignore[attr-defined]
    return started


def _plain() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("ROLLMUX")}


def _weights(started: subprocess.Popen) -> str:
    try:
        code = started.wait(timeout=240)
    finally:
        started.kill()
        started.log.seek(0)
        said = started.log.read()
        started.log.close()
    found = re.search(r"weights (\w+)", said)
    if code or found is None:
        raise RuntimeError(f"a job ended with {code}:\n{said[-2000:]}")
    return found[1]


def _daemon(home: Path, ending: contextlib.ExitStack, *, cpu: bool) -> Path:
    config = home / "rollmux.toml"
    gpu = 'gpu_type = "none"\ngpu_gb = 16' if cpu else ""
    config.write_text(CONFIG.format(state=json.dumps(str(home / "state")), backend="mock" if cpu else "local", gpu=gpu))
    log = ending.enter_context((home / "daemon.log").open("w+"))
    daemon = subprocess.Popen(
        [sys.executable, "-m", "rollmuxd", "daemon", "run", "--config", str(config)],
        env={**_plain(), "HOME": str(home)},
        stdout=log,
        stderr=log,
    )
    ending.callback(daemon.wait)
    ending.callback(daemon.terminate)
    give_up = time.monotonic() + 60
    while not (home / "state/daemon.json").exists():
        if daemon.poll() is not None or time.monotonic() > give_up:
            log.seek(0)
            raise RuntimeError(f"the daemon did not start:\n{log.read()[-2000:]}")
        time.sleep(0.1)
    return home / "state/rollmux.sock"


def _facts(socket: Path) -> dict[str, list[dict]]:
    import httpx

    found: dict[str, list[dict]] = {
        "order_issued": [], "job_quarantined": [], "node_quarantined": [], "residual_memory_observed": []
    }  # fmt: skip
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://rollmuxd") as client:
        after = 0
        while facts := client.get("/v1/facts", params={"after": after}).raise_for_status().json()["facts"]:
            after = facts[-1]["seq"]
            for fact in facts:
                if fact["fact"] in found:
                    found[fact["fact"]].append(fact)
    return found
