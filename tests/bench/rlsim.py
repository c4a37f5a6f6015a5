"""How fast rollouts and networks are simulated, and rollouts planned: 2,048 GPUs with 32,768 requests, and one plan.

The floor is the work that any simulation of these requests does: one event on a heap for the end of each response.
"""

import os
import time
from heapq import heappop, heappush
from typing import Final

import numpy as np
from figures import Json, Rounds, at_least, at_most, median, say, short

from rollmuxd.core.spec import JobSpec, PhaseSpec, Want
from rollmuxd.rollout.lengths import fit, fresh, sample
from rollmuxd.rollout.plan import Gate, Plan, improve, replicas, spread
from rollmuxd.sim.executions.network import Networks
from rollmuxd.sim.inside import Inside, hard_math
from rollmuxd.sim.policies import policy_under_test
from rollmuxd.sim.rollouts.batches import read
from rollmuxd.sim.rollouts.run import Policy, Setting, Step
from rollmuxd.sim.workload import Pool, SimJob, Workload
from rollmuxd.sim.world import World

NODES: Final = 256
PROMPTS, SAMPLES = 2048, 16


def run(budget_s: float, *, small: bool = False) -> Json:
    """Simulated seconds per second of this machine, and milliseconds of a plan."""
    share = 16 if small else 1
    setting = Setting(nodes=NODES // share, prompts=PROMPTS // share, samples=SAMPLES)
    source = read("skythought")
    before, batch = (source.draw(setting.prompts, SAMPLES, str(i)) for i in range(2))
    prior = fit(before, source.limit)
    assert prior is not None
    speeds, floors = [], []
    for _ in Rounds(budget_s, least=2, most=5):
        began = time.process_time()
        result = Step(setting, Policy("static-tp2", "", 2), batch, prior).run()
        took = time.process_time() - began
        speeds.append(result.seconds / took)
        floors.append(took / _floor(result.ends))
        say(f"rlsim: {result.seconds:.0f} simulated s in {took:.1f} s")
    networks = [_network(small=small) for _ in range(2)]
    plans = [_plan_ms(seed) for seed in range(3 if small else 9)]
    found: Json = {
        "gpus": 8 * setting.nodes, "requests": setting.prompts * SAMPLES, "simulated_s_per_s": short(median(speeds)),
        "times_the_floor": short(median(floors)), "network_simulated_s_per_s": short(median(networks)),
        "plan_ms": short(median(plans)), "loadavg": short(os.getloadavg()[0]),
    }  # fmt: skip
    found["targets"] = {
        "simulated_s_per_s": at_least(found["simulated_s_per_s"], 50),
        "network_simulated_s_per_s": at_least(found["network_simulated_s_per_s"], 10),
        "plan_ms": at_most(found["plan_ms"], 250),
    }
    return found


def _floor(ends: list[float]) -> float:
    began = time.process_time()
    heap: list[tuple[float, int]] = []
    for i, end in enumerate(ends):
        heappush(heap, (end, i))
    while heap:
        heappop(heap)
    return time.process_time() - began


def _network(*, small: bool) -> float:
    """Two 72B jobs on 64 + 64 nodes each (or a quarter of that), whose responses are drawn for each of four iterations.

    They train, and send weights, over one RFabric.
    """
    nodes, iterations = (16, 2) if small else (64, 4)
    requests = 256 * nodes
    times = (150_000, 60_000, 1_000)
    pools = ("rollout",), ("train",), ("rollout", "train")
    names = ("rollout", "train", "sync")
    phases = [PhaseSpec(name, its, planned_ms=ms) for name, its, ms in zip(names, pools, times, strict=True)]
    jobs = []
    for name in "ab":
        batches = tuple(hard_math(8192, requests, f"bench {name} {number}") for number in range(iterations))
        inside = Inside("qwen2.5-72b", "h800", 8, batches)
        wants = tuple(Want(pool, nodes=nodes) for pool in ("rollout", "train"))
        spec = JobSpec(name, tuple(phases), wants)
        size = {"rollout": nodes, "train": nodes}
        jobs.append(SimJob(name, "72B", 0, 1, spec, (times,), size, iterations=iterations, inside=inside))
    there = tuple(Pool(pool, "H800", 1.0, nodes=2 * nodes) for pool in ("rollout", "train"))
    began = time.process_time()
    outcome = World(
        Workload("bench", tuple(jobs), there), policy_under_test("solo"), seed=0, accounting="work",
        executions=Networks("rfabric", 20.0),
    ).run()  # fmt: skip
    took = time.process_time() - began
    say(f"rlsim: {outcome.span_ms / 1000:.0f} simulated s of two jobs on a network in {took:.1f} s")
    return outcome.span_ms / 1000 / took


def _plan_ms(seed: int) -> float:
    """One look for a better layout: 16 layouts, 16 scenarios, 1,024 unfinished requests on 40 GPUs."""
    setting = Setting()
    source = read("skythought")
    prior = fit(source.draw(64, 16, f"plan {seed}"), source.limit)
    assert prior is not None
    begun = fresh(prior, 64, 16)
    rng = np.random.default_rng(seed)
    engines = setting.engines(source.limit)
    layout = (2,) * setting.nodes
    began = time.process_time()
    lengths = sample(prior, begun, 16, rng)
    context = np.full(lengths.shape[1], 200.0)
    current = Plan(layout, spread(begun.group, len(replicas(layout))), 0.0)
    improve(current, lengths, context, engines, Gate())
    return (time.process_time() - began) * 1000
