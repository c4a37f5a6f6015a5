"""``attach``: what the gateway says goes to the slot, and what the daemon wishes goes to the gateway."""

import asyncio
import contextlib
import re

import httpx
import pytest
from gateway_live import alone, live

import rollmuxd
from rollmuxd.testing import fake_daemon
from rollmuxd.wire.answers import Directive
from rollmuxd_gateway import attach, hooks
from rollmuxd_hooks.loop import Loop, Shape

PROMPTS = [[1 + number, 2, 3, 4, 5, 6, 7, 8, 9] for number in range(24)]
GPUS = tuple(f"host1/gpu{number}" for number in range(4))


class Slot:
    """A slot as a job has it, of which a test is the daemon."""

    def __init__(self):
        self.gpus, self.directive, self.lost = GPUS, None, False
        self.told, self.shrunk, self.measured, self.grown = [], [], {}, 0

    def progress(self, done, total):
        self.told.append((done, total))

    def shrink(self, keep):
        self.gpus = tuple(keep)
        self.shrunk.append(self.gpus)
        self.directive = None

    def grow(self):
        self.gpus, self.directive, self.grown = GPUS, None, self.grown + 1

    def measure(self, **figures):
        self.measured |= figures


async def rollout(it, prompts=PROMPTS):
    body = {"max_tokens": 200, "temperature": 0, "return_token_ids": True}
    answers = await asyncio.gather(*(it.client.post("/v1/completions", json={**body, "prompt": p}) for p in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == alone(prompt, max_tokens=200, temperature=0).out.tolist()


class Beside:
    """``attach`` blocks as a loop does: here in threads, since the gateway runs in this loop."""

    def __init__(self, slot, url, **more):
        self.attached = attach(slot, url, **more)

    async def __aenter__(self):
        return await asyncio.to_thread(self.attached.__enter__)

    async def __aexit__(self, *error):
        await asyncio.to_thread(self.attached.__exit__, None, None, None)


@pytest.mark.asyncio
async def test_a_tail_gives_its_gpus_back_as_replicas_are_parked_and_takes_them_again():
    async with live(4, engine={"step_s": 0.01}) as it:
        slot = Slot()
        async with Beside(slot, it.url, total=24) as attached:
            for fake in it.engines:  # the tail goes on for a minute, or until it has been looked at
                fake.pace = lambda running, kv_used: 0.3 if it.app.core.rollout.done >= 18 else 0.01
            work = asyncio.create_task(rollout(it))
            await it.settled(lambda: slot.told and slot.told[-1][0] >= 18)
            slot.directive = Directive("shrink", "s1", keep=("host1/gpu0",))
            await it.settled(lambda: len(slot.gpus) == 1)
            asleep = {f"host1/gpu{n}" for n, fake in enumerate(it.engines) if fake.sleeping}
            assert asleep == set(GPUS) - set(slot.gpus)
            assert not work.done()
            slot.directive = Directive("grow", "s1", gpus=GPUS)
            await it.settled(lambda: slot.grown == 1 and not any(fake.sleeping for fake in it.engines))
            for fake in it.engines:
                fake.pace = None
            await work
        done = [one[0] for one in slot.told]
        assert done == sorted(done), "progress fell"
        assert slot.told[-1][1] == 24
        assert slot.measured["work"] == slot.measured["tokens"] > 1_000
        assert slot.measured["moved"] > 0
        assert attached.told["verdicts"] == ["accepted"]
        assert it.app.core.rollout.status == "closed"


def test_a_report_from_before_a_grow_gives_none_of_the_new_gpus_back(monkeypatch):
    slot, posted = Slot(), []
    slot.gpus, slot.directive = GPUS[:1], Directive("grow", "s1", gpus=GPUS)
    attached = attach(slot, "http://127.0.0.1:1", total=24)
    attached._gpus = slot.gpus
    monkeypatch.setattr(attached, "_post", lambda path, body: posted.append((path, body)))
    parked = [{"status": "parked", "gpus": [gpu]} for gpu in GPUS[1:]]
    attached._follow({"done": 20, "total": 24, "status": "tail", "replicas": parked})
    assert posted == [("/rollmux/grow", {"gpus": list(GPUS)})]
    assert (slot.gpus, slot.shrunk) == (GPUS, [])


@pytest.mark.asyncio
async def test_without_its_total_a_rollout_is_as_large_as_those_before():
    async with live(2) as it:
        async with Beside(Slot(), it.url):
            await rollout(it, PROMPTS[:6])
        slot = Slot()
        async with Beside(slot, it.url):
            await rollout(it, PROMPTS[:6])
            await it.settled(lambda: slot.told and slot.told[-1] == (6, 6))


@pytest.mark.asyncio
async def test_a_lost_slot_stops_the_rollout():
    async with live(2, engine={"step_s": 0.02}) as it:
        slot = Slot()
        async with Beside(slot, it.url, total=4):
            body = {"prompt": PROMPTS[0], "max_tokens": 1000, "ignore_eos": True}
            work = asyncio.create_task(it.client.post("/v1/completions", json=body))
            await it.settled(lambda: it.app.core.rollout.tokens > 3)
            slot.lost = True
            answer = await work
        assert answer.status_code == 503
        assert "slot is lost" in answer.text


@pytest.mark.asyncio
async def test_a_gateway_that_is_gone_shrinks_nothing(caplog):
    async with live(4, engine={"step_s": 0.01}) as it:
        slot = Slot()
        beside = Beside(slot, it.url, total=24)
        async with beside as attached:
            it.server.servers[0].close()
            for connection in list(it.server.server_state.connections):
                connection.transport.abort()
            slot.directive = Directive("shrink", "s1", keep=("host1/gpu0",))
            await it.settled(lambda: attached._unwell)
        assert slot.shrunk == []
        assert "keeps its GPUs" in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize("keyed", [False, True])
async def test_a_hook_joins_its_rollouts_to_the_gateway_that_its_file_names(monkeypatch, tmp_path, keyed):
    keys = tmp_path / "control.keys"
    keys.write_text("a-key-for-control\n")
    async with live(2, **({"keys": {"control": str(keys)}} if keyed else {})) as it:
        for replica in it.app.core.replicas.values():
            replica.gpus = ()  # the fake daemon has GPUs of its own
        file = tmp_path / "job.toml"
        named = f'{{url = "{it.url}", key_file = "{keys}"}}' if keyed else f'"{it.url}"'
        file.write_text(f'name = "math"\ngateway = {named}\nresident = true\n')
        monkeypatch.setenv("ROLLMUX_HOOK", str(file))
        with contextlib.ExitStack() as stack:
            stack.enter_context(fake_daemon())

            def framework():
                """As a framework's driver would run, in its own thread."""
                loop = Loop(None, name="x", shape=Shape.TWO_POOLS)
                loop.begin()
                loop.rollout()
                statuses.append(it.app.core.rollout.status.value)
                asyncio.run_coroutine_threadsafe(rollout(it, PROMPTS[:4]), here).result()
                loop.train()
                statuses.append(it.app.core.rollout.status.value)
                loop.end()

            statuses, here = [], asyncio.get_running_loop()
            await asyncio.to_thread(framework)
        assert statuses == ["open", "closed"]
        assert it.app.core.rollout.number == 1


def test_without_a_gateway_a_loop_is_told_where_it_looked_and_what_to_start():
    says = "no gateway answers at http://127.0.0.1:9.*rollmuxd gateway run"
    with pytest.raises(httpx.ConnectError, match=says), attach(Slot(), "http://127.0.0.1:9"):
        pass
    with fake_daemon() as daemon:
        job = rollmuxd.job("a")
        hooks(job, "http://127.0.0.1:9")
        with job:
            told = daemon.result_of(daemon.order("load", "rollout"))
    assert not told.ok
    assert re.search(says, told.error)
