"""The checks that need torch, and no daemon: memory, bandwidth, overlap, weights."""

import gc
import hashlib
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rollmuxd_channel.storages import PIECE
from rollmuxd_channel.torch_state import TorchState

#: of the time that a plain copy takes, so much a park or a load has to reach
AIM = 0.9
#: GB/s of the copy from a model into host memory, for which a job holds its slot: 32B in bf16 in 33 s
COPY_AIM = 2.0
MB = 2**20


def device_of(asked: Any) -> str:
    return "cpu" if asked.cpu else "cuda"


def bytes_of(asked: Any) -> int:
    if asked.gb:
        return int(asked.gb * 1e9)
    if asked.cpu:
        return 64 * MB
    free, _ = torch.cuda.mem_get_info()
    return min(8 * 10**9, free // 3)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def used_bytes(device: str) -> int:
    """On the whole GPU, by whomever: what a backend would see."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


class Workload(torch.nn.Module):
    """Layers of weights and moments, large and small, tied and sliced: as many bytes as asked."""

    def __init__(self, nbytes: int, device: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        layer = max(4096, min(256 * MB, nbytes // 16)) // 2
        self.layers = torch.nn.ParameterList()
        while nbytes > 0:
            size = min(layer, nbytes // 2 + 1)
            random = torch.randint(-(2**15), 2**15, (size,), dtype=torch.int16, device=device)
            self.layers.append(torch.nn.Parameter(random.view(torch.bfloat16), requires_grad=False))
            nbytes -= size * 2
        self.norms = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(256, device=device)) for _ in range(200))
        self.tied = self.layers[0]
        self.register_buffer("slice", self.layers[-1].detach()[: min(64, len(self.layers[-1]))])

    def digest(self) -> str:
        told = hashlib.blake2b(digest_size=16)
        for tensor in (*self.layers, *self.norms):
            # Copied on a CPU too: torch takes no memory away under what numpy has been shown.
            told.update(tensor.detach().reshape(-1).view(torch.uint8).to("cpu", copy=True).numpy())
        return told.hexdigest()


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory(asked: Any) -> dict:
    device = device_of(asked)
    synchronize(device)
    before = used_bytes(device)
    model = Workload(bytes_of(asked), device)
    state = TorchState(model=model, device=device)
    digest, loaded = model.digest(), used_bytes(device)
    state.park()
    parked = used_bytes(device)
    state.load()
    back = used_bytes(device)
    model.slice[0] = 1.0
    shared = bool(model.layers[-1][0] == 1.0) and model.tied is model.layers[0]
    model.slice[0] = model.slice[0]
    exact = _again_exact(state, model, digest)
    size = state.device_bytes()
    freed = (loaded - parked) / size if device != "cpu" else None
    return {
        "ok": exact and shared and (freed is None or freed > 0.97),
        "bytes": size,
        "freed_share": freed,
        "used_before_mb": before // MB,
        "used_loaded_mb": loaded // MB,
        "used_parked_mb": parked // MB,
        "used_again_mb": back // MB,
        "bit_exact": exact,
        "still_shared": shared,
        "host_mb": state.host_bytes() // MB,
    }


def _again_exact(state: TorchState, model: Workload, digest: str) -> bool:
    """Whether the bits of a fresh workload, parked and loaded five times, are the ones that it was made with."""
    with torch.no_grad():
        fresh = Workload(sum(layer.nbytes for layer in model.layers), str(model.layers[0].device))
        for mine, made in zip(model.layers, fresh.layers, strict=True):
            mine.copy_(made)
        for mine, made in zip(model.norms, fresh.norms, strict=True):
            mine.copy_(made)
    del fresh
    gc.collect()
    wanted = model.digest()
    for _ in range(5):
        state.park()
        state.load()
    return model.digest() == wanted == digest


# ---- bandwidth ------------------------------------------------------------------------------------------------------


def bandwidth(asked: Any) -> dict:
    device = device_of(asked)
    nbytes = bytes_of(asked)
    state = TorchState(model=Workload(nbytes, device), device=device)
    size = state.device_bytes()
    began = time.monotonic()
    state.reserve()
    pinning_s = time.monotonic() - began
    pieces = [min(PIECE, size - at) for at in range(0, size, PIECE)]
    host = [torch.empty(piece, dtype=torch.uint8, pin_memory=device != "cpu") for piece in pieces]
    there = [torch.empty(piece, dtype=torch.uint8, device=device) for piece in pieces]
    times: dict[str, list[float]] = {"plain_out": [], "park": [], "plain_in": [], "load": []}
    for turn in range(asked.rounds + 1):  # the first one warms up
        for name, move in (
            ("plain_out", lambda: _copy(there, host, device)),
            ("park", state.park),
            ("plain_in", lambda: _copy(host, there, device)),
            ("load", state.load),
        ):
            synchronize(device)
            began = time.perf_counter()
            move()
            synchronize(device)
            if turn:
                times[name].append(time.perf_counter() - began)
    took = {name: statistics.median(all_) for name, all_ in times.items()}
    shares = {"park": took["plain_out"] / took["park"], "load": took["plain_in"] / took["load"]}
    return {
        "ok": None if device == "cpu" else min(shares.values()) >= AIM,
        "bytes": size,
        "gb_per_s": {name: round(size / 1e9 / seconds, 2) for name, seconds in took.items()},
        "share_of_plain": {name: round(share, 3) for name, share in shares.items()},
        "aim": AIM,
        "pinning_s_per_gb": round(pinning_s / (size / 1e9), 3),
    }


def _copy(here: list[torch.Tensor], there: list[torch.Tensor], device: str) -> None:
    for one, other in zip(here, there, strict=True):
        other.copy_(one, non_blocking=True)
    synchronize(device)


# ---- overlap --------------------------------------------------------------------------------------------------------


def overlap(asked: Any) -> dict:
    """A is loaded and B is parked; then A parks and B loads: one after the other, and at the same time."""
    device, nbytes = device_of(asked), bytes_of(asked)
    context = multiprocessing.get_context("spawn")
    lines, jobs = [], []
    for _ in range(2):
        line, end = context.Pipe()
        job = context.Process(target=_job, args=(end, nbytes, device), daemon=True)
        job.start()
        end.close()  # so that a job that has died is noticed
        lines.append(line)
        jobs.append(job)
    try:
        digests = [line.recv() for line in lines]
        _tell(lines[1:], ["park"])
        one_by_one, at_once = [], []
        for _ in range(asked.rounds):
            for first, second in (lines, lines[::-1]):
                began = time.perf_counter()
                _tell([first], ["park"])
                _tell([second], ["load"])
                one_by_one.append(time.perf_counter() - began)
            for first, second in (lines, lines[::-1]):
                began = time.perf_counter()
                _tell([first, second], ["park", "load"])
                at_once.append(time.perf_counter() - began)
        _tell(lines[1:], ["load"])
        same = [line.send("digest") or line.recv() for line in lines] == digests
    finally:
        for job in jobs:
            job.terminate()
            job.join()
    apart, together = statistics.median(one_by_one), statistics.median(at_once)
    return {
        "ok": same if device == "cpu" else same and together < apart,
        "bytes_each": nbytes,
        "one_after_the_other_s": round(apart, 4),
        "at_the_same_time_s": round(together, 4),
        "gain": round(apart / together, 2),
        "bit_exact": same,
    }


def _tell(lines: list, verbs: list[str]) -> None:
    for line, verb in zip(lines, verbs, strict=True):
        line.send(verb)
    for line in lines:
        line.recv()


def _job(line: Any, nbytes: int, device: str) -> None:
    model = Workload(nbytes, device)
    state = TorchState(model=model, device=device)
    state.park()  # takes the host memory
    state.load()
    line.send(model.digest())
    while True:
        verb = line.recv()
        line.send(model.digest() if verb == "digest" else getattr(state, verb)().bytes)


# ---- weights --------------------------------------------------------------------------------------------------------


def weights(asked: Any) -> dict:
    """A version of weights goes from its file in host memory into a model, against a plain copy from pinned memory."""
    from rollmuxd_weights import NoRoom, Publisher, load_into

    device = device_of(asked)
    model = Workload(bytes_of(asked), device)
    digest = model.digest()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        try:
            with Publisher("gpu", dir=Path(folder) / "weights") as publisher:
                made = publisher.publish(model.state_dict(), 1)
        except NoRoom as error:
            return {"ok": None, "why": f"{error}; in a container, --shm-size"}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        pieces = [min(PIECE, made.bytes - at) for at in range(0, made.bytes, PIECE)]
        host = [torch.empty(piece, dtype=torch.uint8, pin_memory=device != "cpu") for piece in pieces]
        there = [torch.empty(piece, dtype=torch.uint8, device=device) for piece in pieces]
        times: dict[str, list[float]] = {"plain_in": [], "load_into": []}
        for turn in range(asked.rounds + 1):  # the first one warms up
            for name, move in (
                ("plain_in", lambda: _copy(host, there, device)),
                ("load_into", lambda: load_into(model, made.path)),
            ):
                synchronize(device)
                began = time.perf_counter()
                move()
                synchronize(device)
                if turn:
                    times[name].append(time.perf_counter() - began)
    took = {name: statistics.median(all_) for name, all_ in times.items()}
    exact, share = model.digest() == digest, took["plain_in"] / took["load_into"]
    copied = made.bytes / 1e9 / made.copy_s
    return {
        "ok": exact if device == "cpu" else exact and share >= AIM and copied >= COPY_AIM,
        "bytes": made.bytes,
        "bit_exact": exact,
        "publish_s": round(made.seconds, 3),
        "copy_s": round(made.copy_s, 3),
        "copy_gb_per_s": round(copied, 2),
        "copy_aim": COPY_AIM,
        "gb_per_s": {name: round(made.bytes / 1e9 / seconds, 2) for name, seconds in took.items()},
        "share_of_plain": round(share, 3),
        "aim": AIM,
    }
