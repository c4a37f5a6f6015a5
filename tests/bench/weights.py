"""Weights over slow lines: W1 to W6 and W11 of the weight mover's acceptance, on shaped network namespaces.

W1 is always a transfer of 64 MB from 8 trainer hosts to 8 rollout hosts, with 10 Mbit/s each between the clusters; its
figures are at the top. ``W=2,3`` picks others. All floors are computed from the rates; ``flat`` runs in the same call.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from figures import Json, at_least, at_most, say, short

from rollmuxd.fabric.sync import Links, seconds
from rollmuxd_weights.bench import CHUNK, Run, in_namespaces
from rollmuxd_weights.namespaces import Clusters, removed_on_signals, unavailable

MBIT: Final = 125_000.0
SLOW, FAST = 10.0, 200.0
TRIES: Final = 3
KNOWN: Final = ("1", "2", "3", "4", "5", "11")


def run(budget_s: float, *, small: bool = False) -> Json:
    """What ``W`` picks (default: all), as one object."""
    del budget_s
    asked = [one.strip().lower().removeprefix("w") for one in os.environ.get("W", "").split(",") if one.strip()]
    if stray := [one for one in asked if one not in KNOWN]:
        raise ValueError(
            f"W={stray[0]}: there are W=1, 2, 3, 4, 5 and 11; W6 and W7 are tests of plugins/weights, W8 is BENCH=delta"
        )
    asked = asked or list(KNOWN)
    if any(one != "11" for one in asked) and (why := unavailable()):
        raise OSError(f"no network namespaces here: {why}")
    found: Json = {"targets": {}, **machine()}
    with removed_on_signals():
        for one in asked:
            say(f"weights W{one}")
            told = globals()[f"w{one}"](mb=8 if small else 64)
            for name, target in told.pop("targets").items():
                found["targets"][f"w{one}_{name}"] = target
            if one == "1":
                found.update(told)
            else:
                found[f"w{one}"] = told
    return found


def machine() -> Json:
    """What a figure depends on, beside the rates."""
    path = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {"congestion_control": path.read_text().strip() if path.exists() else "?"}


def tries(run: Run, mb: float, times: int = TRIES, **more: Any) -> tuple[Json, list[float]]:
    """The quickest of so many transfers, and what each took. It is identical only if each was."""
    made = []
    for version in range(1, times + 1):
        found = run.transfer(version, mb, **more)
        say(f"  {found['seconds']:.2f} s, {found['slow_bytes']} bytes over the slow lines, load {found['load']:.1f}")
        made.append(found)
    return quickest(made)


def quickest(made: list[Json]) -> tuple[Json, list[float]]:
    """Of these transfers, and what each took; identical if all are."""
    best = min(made, key=lambda one: one["seconds"])
    return {**best, "identical": all(one["identical"] for one in made)}, [short(one["seconds"]) for one in made]


def flat(clusters: Clusters, mb: float) -> Json:
    """Every rollout host fetches everything over its own line."""
    with in_namespaces(clusters, flat=True) as hosts:
        found = hosts.transfer(1, mb)
    say(f"  flat: {found['seconds']:.2f} s")
    return found


def w1(mb: float) -> Json:
    """Two stages against flat, 8 + 8 hosts."""
    with Clusters(8, 8, slow=SLOW, fast=FAST) as clusters:
        with in_namespaces(clusters) as hosts:
            before = clusters.crossed()
            best, took = tries(hosts, mb)
            received = clusters.crossed() - before
        all_at_once = flat(clusters, mb)
    size, links = best["bytes"], Links(slow=(SLOW * MBIT,) * 8, hosts=8, fabric=FAST * MBIT)
    share = size / best["seconds"] / (8 * SLOW * MBIT)
    ratio = all_at_once["seconds"] / best["seconds"]
    over = best["slow_bytes"] / size
    identical = best["identical"] and all_at_once["identical"]
    return {
        "share_of_slow": short(share),
        "ratio_to_flat": short(ratio),
        "slow_bytes": best["slow_bytes"],
        "slow_copies": short(over),
        # The pullers' own count is of payload; the cards count headers, requests and what came in vain, of all tries.
        "slow_copies_by_cards": short(received / TRIES / size),
        "identical": identical,
        "bytes": size,
        "publish_s": short(best["publish_s"]),
        "copy_s": short(best["copy_s"]),
        "seconds": took,
        "flat_s": short(all_at_once["seconds"]),
        "flat_slow_bytes": all_at_once["slow_bytes"],
        "floor_s": short(size / (8 * SLOW * MBIT)),
        "predicted_s": short(seconds("rails", size, links, CHUNK)),
        "load": short(best["load"]),
        "hosts": "8 + 8",
        "mbit_per_host": SLOW,
        "targets": {
            "share_of_slow": at_least(share, 0.92),
            "ratio_to_flat": at_least(ratio, 7.6),
            "slow_copies": at_most(over, 1.01),
            "identical": at_least(float(identical), 1.0),
        },
    }


def w2(mb: float) -> Json:
    """Fewer hosts, and one line that all share."""
    told: Json = {"targets": {}}
    for name, clusters, least in (
        ("4+4", Clusters(4, 4, slow=2 * SLOW, fast=FAST), 0.90),
        ("shared", Clusters(8, 8, slow=4 * SLOW, fast=FAST, shared=8 * SLOW), 0.88),
    ):
        with clusters, in_namespaces(clusters) as hosts:
            best, took = tries(hosts, mb)
        share = best["bytes"] / best["seconds"] / (8 * SLOW * MBIT)
        told[name] = {
            "share_of_slow": short(share),
            "seconds": took,
            "first_equal_shards": short(best["bytes"] / took[0] / (8 * SLOW * MBIT)),
            "slow_copies": short(best["slow_bytes"] / best["bytes"]),
            "taken_over": best["taken_over"],
            "identical": best["identical"],
            "load": short(best["load"]),
        }
        told["targets"][name] = at_least(share if best["identical"] else 0.0, least)
    return told


def w3(mb: float) -> Json:
    """A slow line dies in the middle."""
    with Clusters(8, 8, slow=SLOW, fast=FAST) as clusters:
        with in_namespaces(clusters) as hosts:
            whole, _ = tries(hosts, mb)
        cut_s = whole["seconds"] * 0.36
        made = []
        for _ in range(TRIES):
            with in_namespaces(clusters) as hosts:

                def cut() -> None:
                    time.sleep(cut_s)  # the line is to die in the middle of the transfer
                    clusters.cut("roll3")

                found = hosts.transfer(1, mb, during=cut)
            clusters.mend("roll3")
            say(f"  cut: {found['seconds']:.2f} s, {found['taken_over']} chunks taken over")
            made.append(found)
    best, took = quickest(made)
    lost = (whole["seconds"] - cut_s) / 7
    ratio = best["seconds"] / whole["seconds"]
    return {
        "uncut_s": short(whole["seconds"]),
        "cut_at_s": short(cut_s),
        "seconds": took,
        "ratio_to_uncut": short(ratio),
        "lost_share_s": short(lost),
        "taken_over": best["taken_over"],
        "slow_copies": short(best["slow_bytes"] / best["bytes"]),
        "identical": best["identical"] and whole["identical"],
        "targets": {
            "ratio_to_uncut": at_most(ratio, 1.2),
            # A cut that no host has to make up for shows nothing.
            "taken_over": at_least(best["taken_over"], 1.0),
            "seconds": at_most(best["seconds"], 1.1 * (whole["seconds"] + lost + 5 * CHUNK / (SLOW * MBIT))),
            "identical": at_least(float(best["identical"] and whole["identical"]), 1.0),
        },
    }


def w4(mb: float) -> Json:
    """Two hosts with eight cards each on either side; between the hosts a card carries a 32nd of what is inside."""
    mb /= 2
    inside = 20 * SLOW * 32
    with Clusters(2, 2, slow=SLOW, fast=2 * SLOW, rails=8) as clusters, in_namespaces(clusters) as hosts:
        best, took = tries(hosts, mb)
    # Flat, each of the 16 ranks fetches everything over its own card: 16 hosts with a card each.
    with Clusters(16, 16, slow=SLOW, fast=2 * SLOW) as clusters:
        all_at_once = flat(clusters, mb)
    ratio = all_at_once["seconds"] / best["seconds"]
    links = Links(slow=(SLOW * MBIT,) * 16, hosts=2, fabric=8 * 2 * SLOW * MBIT, inside=inside * MBIT)
    identical = best["identical"] and all_at_once["identical"]
    return {
        "ratio_to_flat": short(ratio),
        "seconds": took,
        "flat_s": short(all_at_once["seconds"]),
        "predicted_s": short(seconds("rails", best["bytes"], links, CHUNK)),
        "slow_copies": short(best["slow_bytes"] / best["bytes"]),
        "identical": identical,
        "goal": 10,
        "targets": {
            "ratio_to_flat": at_least(ratio, 2.75),
            "identical": at_least(float(identical), 1.0),
        },
    }


_GLOO: Final = """
import sys, time, torch, torch.distributed as dist
rank, world, where, size = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo", init_method="tcp://" + where, rank=rank, world_size=world)
weights = torch.full((size,), 7 if rank == 0 else 0, dtype=torch.uint8)
dist.barrier()
began = time.monotonic()
dist.broadcast(weights, 0)
print(began, time.monotonic(), int(weights.sum()), flush=True)
dist.barrier()
"""


def w5(mb: float) -> Json:
    """Against one broadcast of torch.distributed over the same slow lines, from one trainer."""
    mb /= 8
    python = _torch()
    with Clusters(8, 8, slow=SLOW, fast=FAST) as clusters:
        with in_namespaces(clusters) as hosts:
            best, took = tries(hosts, mb)
        where = clusters.hosts["trainers"]["train0"][0].replace("7501", "29500")
        places = ["train0", *clusters.rollouts]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "wan0", "OMP_NUM_THREADS": "1"}
        started = []
        for rank, host in enumerate(places):
            words = clusters.command(host, python, "-c", _GLOO, str(rank), "9", where, str(best["bytes"]))
            started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env))
        told = [process.communicate(timeout=600)[0].split() for process in started]
    gloo_s = max(float(one[1]) for one in told) - min(float(one[0]) for one in told)
    say(f"  gloo: {gloo_s:.2f} s")
    if (sums := {int(one[2]) for one in told}) != {7 * best["bytes"]}:
        raise ValueError(f"gloo has not brought the bytes to every host: sums {sums}, and {7 * best['bytes']} is right")
    ratio = gloo_s / best["seconds"]
    return {
        "ratio_to_gloo": short(ratio),
        "seconds": took,
        "gloo_s": short(gloo_s),
        "bytes": best["bytes"],
        "identical": best["identical"],
        "targets": {"ratio_to_gloo": at_least(ratio if best["identical"] else 0.0, 20)},
    }


def _torch() -> str:
    """A Python that has torch: this one, or that of VLLM_VENV."""
    for python in (sys.executable, f"{os.environ.get('VLLM_VENV', '.venv-vllm')}/bin/python"):
        if (
            Path(python).exists()
            and not subprocess.run([python, "-c", "import torch.distributed"], capture_output=True).returncode
        ):
            return python
    raise OSError("W5 needs torch: `make real-vllm` makes an environment that has it; or name one by VLLM_VENV")


#: the paper's table: seconds of a flat all-gather and of its two stages, on 8 + 8 and on 16 + 16 GPUs
MEASURED: Final = {
    "flat": {(7, 1): 7.5, (14, 1): 13.8, (32, 1): 30.7, (7, 2): 8.2, (14, 2): 15.2, (32, 2): 33.8},
    "two": {(7, 1): 0.9, (14, 1): 1.7, (32, 1): 3.9, (7, 2): 3.1, (14, 2): 5.8, (32, 2): 12.3},
}


def w11(mb: float) -> Json:
    """The simulator's times against the paper's twelve, and what it costs to hold no GPU meanwhile."""
    from rollmuxd_evaluation.workloads.shapes import sync_ms

    del mb
    off = {
        f"{how} {size}B on {8 * nodes} GPUs": short(sync_ms(how, size, nodes) / 1000 / paper_s - 1)
        for how, cells in MEASURED.items()
        for (size, nodes), paper_s in cells.items()
    }
    places = (("table", "phase"), ("flat", "phase"), ("two", "within"), ("two", "phase"), ("two", "between"))
    costs = {f"{sync} {place}": _cost("weave-production", sync, place) for sync, place in places}
    # Here no job trains on more nodes than it wants. Elsewhere such a job halves its training phase, and with `within`
    # the way of its weights, which is in that phase.
    own = {place: _cost("weave-production-honest", "two", place) for place in ("within", "between")}
    worst = max(map(abs, off.values()))
    more = costs["two between"]["paper"] / costs["two within"]["paper"]
    more_work = own["between"]["work"] / own["within"]["work"]
    return {
        "off": off,
        "worst_off": short(worst),
        "total_cost": costs,
        "total_cost_on_own_nodes": own,
        "between_over_within": short(more),
        "between_over_within_work": short(costs["two between"]["work"] / costs["two within"]["work"]),
        "between_over_within_work_on_own_nodes": short(more_work),
        "targets": {
            "worst_off": at_most(worst, 0.08),
            "between_over_within": at_most(more, 1.0),
            "between_over_within_work_on_own_nodes": at_most(more_work, 1.0),
        },
    }


def _cost(workload: str, sync: str, place: str) -> dict[str, float]:
    """Dollars of all jobs, by accounting."""
    words = ["sim", "compare", "--workload", workload, "--switch", "table", "--sync", sync, "--sync-place", place,
             "--policies", "rollmux", "--json"]  # fmt: skip
    ran = subprocess.run([sys.executable, "-m", "rollmuxd", *words], capture_output=True, text=True, check=True)
    row = json.loads(ran.stdout)["policies"][0]
    return {how: short(row[how]["total_cost"]) for how in ("paper", "work")}
