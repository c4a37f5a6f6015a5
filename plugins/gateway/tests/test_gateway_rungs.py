"""Engines of several degrees on the same GPUs: one rung is awake, and lengths say which."""

import asyncio
import dataclasses
from array import array

import httpx
import msgspec
import pytest
from gateway_live import alone
from gateway_processes import processes
from gateway_world import World
from patience import PATIENCE_S

from rollmuxd_gateway.core import effects as e
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core.model import Replica, ReplicaStatus, Request
from rollmuxd_gateway.core.rungs import Rules, Rungs
from rollmuxd_gateway.fakes.hashlm import Model

GPUS = [f"host1/gpu{number}" for number in range(4)]


def on(tp):
    """The GPUs of each replica of a degree."""
    return [tuple(GPUS[at : at + tp]) for at in range(0, len(GPUS), tp)]


def replicas(*degrees):
    return [
        Replica(f"tp{tp}-{at}", "http://nowhere", gpus=gpus, tp=tp) for tp in degrees for at, gpus in enumerate(on(tp))
    ]


def responses(rungs, count, length):
    for number in range(count):
        request = Request(f"q{number}", "", 0, f"prompt {number // 4}", array("i", [1] * 200), None, {})
        request.max_tokens, request.finish = 2 * length, "stop"
        request.ids = array("i", [1] * (length if number % 2 else length // 2))
        rungs.ended(request)


def test_few_responses_choose_a_high_degree_and_many_a_low_one():
    rungs = Rungs(Rules("h800", "qwen2.5-14b"))
    found = []
    for count, length in ((16, 2_000), (1_024, 200), (16, 2_000)):
        responses(rungs, count, length)
        found.append(rungs.choose(2, replicas(1, 2, 4), None))
    assert (found[0], found[1]) == (4, 1)
    assert found[2] == 4


def test_without_responses_and_without_another_degree_the_rung_stays():
    rungs = Rungs(Rules("h800", "qwen2.5-14b"))
    assert rungs.choose(2, replicas(1, 2, 4), None) == 2
    responses(rungs, 16, 2_000)
    assert rungs.choose(2, replicas(2), None) == 2
    responses(rungs, 16, 2_000)
    half = [replica for replica in replicas(1, 2, 4) if replica.id not in ("tp1-3", "tp4-0")]
    assert rungs.choose(2, half, None) == 2, "three replicas of one GPU leave a GPU unused"


def test_preemptions_double_the_degree_and_four_calm_rollouts_halve_it():
    rungs = Rungs(Rules("h800", "qwen2.5-14b", "preemptions"))
    degree, counted, seen = 1, {1: 0, 2: 0}, []
    for more in (10, 10, 20, 0, 0, 0, 0):
        counted[degree] += more
        responses(rungs, 16, 200)
        degree = rungs.choose(degree, replicas(1, 2, 4), counted[degree])
        seen.append(degree)
    assert seen == [1, 1, 2, 2, 2, 2, 1]
    responses(rungs, 16, 200)
    assert rungs.choose(2, replicas(1, 2, 4), None) == 2, "engines that count nothing change nothing"


def world(rung):
    it = World(0)
    it.gateway.rungs = Rungs(Rules("h800", "qwen2.5-14b"))
    it.gateway.rung = rung
    for replica in replicas(rung, 5 - rung):  # as a file names first what it begins with
        it.engines[replica.id] = World(1).engines["r0"]
        it.engines[replica.id].model = it.model
        it.tell(i.Register(replica))
    return it


def test_requests_go_to_the_rung_that_is_used_and_the_other_is_put_to_sleep():
    it = world(rung=4)
    it.deliver()
    assert it.asleep == {f"tp1-{number}" for number in range(4)}
    it.tell(i.BeginRollout(total=8))
    it.deliver()
    assert it.asleep == {f"tp1-{number}" for number in range(4)}
    for number in range(8):
        it.ask([number + 1, 2, 3])
    it.run()
    assert {segment.replica for request in it.ended.values() for segment in request.segments} == {"tp4-0"}


def test_the_rung_that_is_awake_is_learned_before_the_gateway_has_woken_any():
    it = World(0)
    it.gateway.rungs, it.gateway.rung = Rungs(Rules("h800", "qwen2.5-14b")), 4
    seen, handle = [], it.gateway.handle
    it.gateway.handle = lambda what, now: seen.extend(told := handle(what, now)) or told
    for replica in replicas(4, 1):
        it.engines[replica.id] = World(1).engines["r0"]
        replica.status = ReplicaStatus.PARKED if replica.tp == 4 else ReplicaStatus.OPEN
        it.asleep |= {replica.id} if replica.tp == 4 else set()
        it.tell(i.Register(replica))
    assert it.gateway.rung == 1
    assert not seen, "nothing is put to sleep"
    it.tell(i.BeginRollout())
    late = Replica("late", "http://nowhere", gpus=tuple(GPUS), tp=4)
    it.engines["late"] = World(1).engines["r0"]
    it.tell(i.Register(late))
    assert it.gateway.rung == 1
    assert e.Park("late") in seen


def test_the_rung_changes_between_rollouts_only():
    it = world(rung=1)
    it.tell(i.BeginRollout(total=16))
    for number in range(16):
        it.ask([number + 1, 2, 3])
    it.run()
    it.tell(i.Boundary())
    assert it.gateway.rung == 1
    it.tell(i.CloseRollout())
    it.tell(i.Boundary(tuple(GPUS[:2])))
    assert it.gateway.rung == 1, "the slot has two GPUs, and the other rung needs four"


def test_a_rung_with_old_weights_gets_no_request_before_it_has_new_ones():
    it = world(rung=1)
    it.deliver()
    it.tell(i.Weights(tuple(f"tp1-{number}" for number in range(4)), "7"))
    responses(it.gateway.rungs, 16, 2_000)
    it.tell(i.Boundary())
    assert it.gateway.rung == 4
    it.tell(i.Woken("tp4-0", ok=True))
    it.asleep.discard("tp4-0")
    name = it.ask([1, 2, 3])
    for _ in range(5):
        it.step()
    assert not it.gateway.requests[name].segments
    it.tell(i.Weights(("tp4-0",), "8"))
    it.run()
    assert it.ended[name].segments[0].replica == "tp4-0"


MODEL = Model(median=120, sigma=0.3)


@dataclasses.dataclass
class Loop:
    client: httpx.AsyncClient
    version: int = 0
    #: of the last rollout, at its end
    view: dict | None = None

    async def post(self, path, body):
        answer = await self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def step(self, *lengths):
        """As a loop without a daemon does it: wake, weights, rollout, sleep. Returns the degree that it began with."""
        await self.post("/rollmux/wake", {})
        self.version += 1
        await self.post("/update_weights_from_disk", {"weight_version": str(self.version)})
        began = await self.post("/rollmux/rollouts", {"total": len(lengths)})
        prompts = [[1 + number // 4, 2, 3] for number in range(len(lengths))]
        body = {"temperature": 0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
        calls = [{"prompt": one, "max_tokens": most, **body} for one, most in zip(prompts, lengths, strict=True)]
        answers = await asyncio.gather(*(self.post("/v1/completions", call) for call in calls))
        model = msgspec.structs.replace(MODEL, version=str(self.version))
        longest = {one[0]: alone(one, model, max_tokens=max(lengths), **body).out.tolist() for one in prompts}
        for prompt, most, told in zip(prompts, lengths, answers, strict=True):
            assert told["choices"][0]["token_ids"] == longest[prompt[0]][:most]
        self.view = (await self.client.get("/rollmux/rollout")).json()
        await self.post("/rollmux/rollouts", {"close": True})
        await self.post("/rollmux/park", {})
        return began["tp"]


@pytest.mark.asyncio
async def test_the_degree_of_a_rollout_follows_the_one_before_and_no_gpu_has_two_engines_awake(tmp_path):
    with processes(tmp_path) as them:
        text = '[estimate]\ngpu = "h800"\nmodel = "qwen2.5-14b"\n[rungs]\n'
        for tp in (2, 1, 4):
            for gpus in on(tp):
                url = them.engine(gpus, "--asleep", "--median", "120", "--sigma", "0.3", "--like", "h800,qwen2.5-14b,2")
                text += f'[[replica]]\nurl = "{url}"\ngpus = {list(gpus)}\n'.replace("'", '"')
        _, url = them.gateway(text)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as it:
            loop = Loop(it)
            rollouts = ((16, 200), (16, 200), (448, 20), (16, 20))
            degrees = [await loop.step(*[length] * count) for count, length in rollouts]
        assert degrees == [2, 4, 4, 1]
        notes = them.notes()
        assert not [note for note in notes if note["event"] == "violation"]
        awake = [note["gpu"].count(",") + 1 for note in notes if note["event"] == "awake"]
        assert awake == [2, 2, 4, 4, 1, 1, 1, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize("again", [True, False])
async def test_a_rung_that_is_woken_within_a_rollout_gets_the_weights_of_the_step_or_is_left_asleep(tmp_path, again):
    lengths = [20, 60, 150, 300] * 6 + [1_500] * 4
    with processes(tmp_path) as them:
        text = 'tail = "keep"\n[estimate]\ngpu = "h800"\nmodel = "qwen2.5-14b"\n'
        text += "[rungs]\nin_step = true\nswitch_s = 0.1\n"
        for tp in (1, 4):
            for gpus in on(tp):
                url = them.engine(gpus, "--asleep", "--median", "120", "--sigma", "0.3", "--like", "h800,qwen2.5-14b,4")
                text += f'[[replica]]\nurl = "{url}"\ngpus = {list(gpus)}\n'.replace("'", '"')
        _, url = them.gateway(text)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as it:
            loop = Loop(it)
            if not again:
                post = loop.post

                async def by_network(path, body):
                    return await post(path.replace("_from_disk", ""), body)

                loop.post = by_network
            assert await loop.step(*lengths) == 1
        notes = them.notes()
        assert not [note for note in notes if note["event"] == "violation"]
        if again:
            assert (loop.view["switches"], loop.view["tp"], loop.view["in_step"]) == (1, 4, "on")
            assert loop.view["switch_ms"] > 0
        else:
            assert (loop.view["switches"], loop.view["tp"]) == (0, 1)
            assert loop.view["in_step"] == "the last weights came by /update_weights, which cannot be sent again"
