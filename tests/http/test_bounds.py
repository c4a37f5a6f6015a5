"""What one owner's calls may cost: the numbers in them, their bodies, their answers, and the questions they ask."""

import asyncio
import json
import os
import pickle
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import anyio
import httpx
import pytest
from msgspec import inspect
from msgspec.structs import replace
from patience import PATIENCE_S

from rollmuxd.core.spec import LaunchSpec
from rollmuxd.daemon import question
from rollmuxd.daemon.http import background, limits, routing
from rollmuxd.daemon.http.app import ENDPOINTS
from rollmuxd.daemon.http.routes import jobs, plan
from rollmuxd.daemon.journal import store
from rollmuxd.daemon.usage.daily import DailyUsage, LiveUsage

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def copied_questions():
    """No process is a copy here."""


#: before the tests set it to 0
NICE = question.NICE
ROLLOUT = "h1/gpu0-1"


def waiting_job(body_of_job, **more):
    """A job that waits beside another one: it wants a node for itself."""
    phases = [
        {"name": "rollout", "pools": ["rollout"], "seconds": 30},
        {"name": "train", "pools": ["train"], "seconds": 5},
    ]
    return body_of_job("second", phases=phases, slo=1.0, **more)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [str(2**53 + 1), str(2**64), str(-(2**64)), "1" + 400 * "0", "1" + 5000 * "0"])
async def test_an_integer_beyond_2_to_the_53_is_refused_and_nothing_is_registered(running, body_of_job, number):
    async with running() as world, world.client() as client:
        registration = body_of_job("math", states={"rollout": {"options": {"x": "HERE"}}})
        body = httpx.Request("POST", "http://x", json=registration).content.replace(b'"HERE"', number.encode())
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/jobs", content=body, headers=headers)
        assert answer.status_code == 422, answer.text
        assert answer.json()["data"] == {"in": "body", "field": "states[...].options[...]"}
        ended = await client.request(
            "DELETE", "/v1/jobs/math", content=b'{"run": %s}' % number.encode(), headers=headers
        )
        assert (ended.status_code, ended.json()["data"]["field"]) == (422, "run")
        assert not world.state.jobs


@pytest.mark.parametrize("body", [route.body for route in ENDPOINTS if route.body is not None])
async def test_every_integer_of_a_body_has_bounds_within_2_to_the_53(body):
    seen, left = set(), [inspect.type_info(body)]
    while left:
        match left.pop():
            case inspect.IntType(ge=ge, gt=gt, le=le, lt=lt):
                least, most = gt if ge is None else ge, lt if le is None else le
                assert least is not None
                assert most is not None
                assert -(2**53) <= least <= most <= 2**53
            case inspect.StructType(cls=cls, fields=fields) if cls not in seen:
                seen.add(cls)
                left += [field.type for field in fields]
            case inspect.DictType(key_type=key, value_type=value):
                left += [key, value]
            case inspect.ListType(item_type=item):
                left.append(item)
            case inspect.UnionType(types=types):
                left += types
            case inspect.Metadata(type=inner):
                left.append(inner)
            case it:
                assert isinstance(
                    it,
                    inspect.StructType
                    | inspect.StrType
                    | inspect.FloatType
                    | inspect.BoolType
                    | inspect.NoneType
                    | inspect.LiteralType,
                )


async def test_integers_up_to_2_to_the_53_and_texts_of_many_digits_are_taken(running, body_of_job):
    async with running() as world, world.client() as client:
        world.services.drivers["channel"] = TakesAnything()
        options = {"most": 2**53, "least": -(2**53), "text": "9" * 40, "real": 1e30}
        body = body_of_job("math", states={"rollout": {"options": options}}, idempotency_key="1" * 50)
        job = (await client.post("/v1/jobs", json=body)).json()["job"]
        assert dict(world.state.jobs[job].spec.states[0].options) == options


async def test_whatever_number_the_journal_holds_plans_and_explanations_are_made(running, body_of_job):
    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        first = await world.job(client, "first", slo=1.0, states={"rollout": {"gpu_gb": 1}})
        spec = world.state.jobs[first.id].spec
        large = tuple(replace(kept, options=(("x", 2**64),)) for kept in spec.states)
        world.state.jobs[first.id].spec = replace(spec, states=large)
        assert (await stranger.post("/v1/plan", json={"jobs": [body_of_job("a")]})).status_code == 200
        waiting = (await client.post("/v1/jobs", json=waiting_job(body_of_job))).json()
        assert waiting["status"] == "waiting"
        assert (await client.get("/v1/jobs/second/explain")).status_code == 200


class TakesAnything:
    admin_options = frozenset()
    traits = None

    def check(self, state):
        pass


# ---- questions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "gpus", "jobs"), [(4_999, 1_000, 1), (4_000, 8, 101), (5_000, 1, 1)])
async def test_a_plan_on_too_many_made_up_gpus_is_refused_before_anything_is_made_up(
    running, body_of_job, held_questions, nodes, gpus, jobs
):
    async with running() as world, world.client() as client:
        body = {
            "jobs": [body_of_job(f"a{number}") for number in range(jobs)],
            "pools": {"rollout": {"nodes": nodes, "gpus": gpus}, "train": {"nodes": 1}},
        }
        with anyio.fail_after(PATIENCE_S):
            answer = await client.post("/v1/plan", json=body)
        assert answer.status_code == 422
        assert answer.json()["data"] == {"in": "body", "field": "pools"}
        assert held_questions.pids == []


@pytest.mark.parametrize("resource", ["processor", "time", "memory", "text"])
async def test_a_question_that_takes_too_much_is_422_and_its_process_is_gone(
    running, body_of_job, monkeypatch, resource
):
    change = {
        "processor": "question.CPU_S = 1; question.Copy.scheduler = lambda self: [0 for _ in iter(int, 1)]",
        "time": "import time; question.Copy.scheduler = lambda self: time.sleep(10**6)",
        "memory": "question.Copy.scheduler = lambda self: bytes(10**10)",
        "text": "question.ANSWER = 10",
    }[resource]
    script = f"import sys; from rollmuxd.daemon import question; {change}; sys.exit(question.main())"
    monkeypatch.setattr(background, "_COMMAND", (sys.executable, "-c", script))
    if resource == "time":
        monkeypatch.setattr(question, "LIMIT_S", 1)
    async with running() as world, world.client() as client:
        with anyio.fail_after(PATIENCE_S):
            answer = await client.post("/v1/plan", json={"jobs": [body_of_job("a")]})
        assert answer.status_code == 422, answer.text
        assert answer.json()["type"] == "urn:rollmux:problem:too_much"
        assert f"{question.CPU_S} s" in answer.json()["detail"]
        assert f"{question.LIMIT_S} s in all" in answer.json()["detail"]


@pytest.mark.parametrize("what", ["plan", "explain"])
async def test_when_the_caller_hangs_up_the_process_that_answers_is_killed(running, body_of_job, held_questions, what):
    async with running() as world, world.client() as client:
        await world.job(client, "first", slo=1.0)
        await client.post("/v1/jobs", json=waiting_job(body_of_job))
        ask = asking(client, body_of_job, what)
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await held_questions.have_begun(1)
                (pid,) = held_questions.pids
                assert is_there(pid)
                tasks.cancel_scope.cancel()
            while is_there(pid):
                await anyio.sleep(0.01)
            held_questions.let_go()
            assert (await ask()).status_code == 200


def asking(client, body_of_job, what):
    if what == "plan":
        return partial(client.post, "/v1/plan", json={"jobs": [body_of_job("a")]})
    return partial(client.get, "/v1/jobs/second/explain")


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_of_one_owners_questions_few_wait_and_more_are_429_and_none_packs_the_state_before_its_turn(
    running, body_of_job, held_questions, monkeypatch
):
    packed, answers = [], []

    async def ask(client, what):
        answers.append((await asking(client, body_of_job, what)()).status_code)

    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        await world.job(client, "first", slo=1.0)
        await client.post("/v1/jobs", json=waiting_job(body_of_job))
        for module in (jobs, plan):
            copy_of = module.copy_of
            monkeypatch.setattr(module, "copy_of", lambda *given, c=copy_of: packed.append(1) or c(*given))
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                for number in range(limits.QUESTIONS):
                    tasks.start_soon(ask, client, ["plan", "explain"][number % 2])
                await held_questions.have_begun(1)
                await world.settle()
                refused = await client.get("/v1/jobs/second/explain")
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert "owner team" in refused.json()["detail"]
                for _ in range(2):
                    tasks.start_soon(ask, stranger, "plan")
                await held_questions.have_begun(2)  # one of each owner
                await world.settle()
                assert len(held_questions.pids) == len(packed) == 2
                held_questions.let_go()
        assert answers == [200] * (limits.QUESTIONS + 2)


async def test_a_question_of_another_owner_waits_for_one_of_each_owner_and_not_for_all(
    running, body_of_job, held_questions, monkeypatch
):
    monkeypatch.setattr(limits, "AT_ONCE", 1)
    answered = []

    async def ask(name, client):
        assert (await asking(client, body_of_job, "plan")()).status_code == 200
        answered.append(name)

    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                for _ in range(limits.QUESTIONS):
                    tasks.start_soon(ask, "team", client)
                await held_questions.have_begun(1)
                tasks.start_soon(ask, "others", stranger)
                await world.settle()
                held_questions.let_go()
        assert answered.index("others") == 1


async def test_a_copy_of_the_state_has_all_but_what_can_be_large_and_no_question_needs(running, body_of_job):
    async with running() as world, world.client("root") as client:
        states = {"rollout": {"gpu_gb": 10, "options": {"urls": ["http://h:1"] * 100}}}
        launch = {"argv": ["python", "x" * 4000], "env": {"X": "x" * 4000}}
        for name, more in {"first": {"states": states}, "second": {"launch": launch}, "third": {}}.items():
            assert (await client.post("/v1/jobs", json=body_of_job(name, **more))).status_code == 201
        call = SimpleNamespace(services=world.services)
        copy = background.copy_of(call, world.writer.scheduler)
        first, second, third = world.state.jobs.values()
        assert first.spec.states[0].options
        assert list(copy.decoded().jobs.values()) == [
            replace(first, spec=replace(first.spec, states=(replace(first.spec.states[0], options=()),))),
            replace(second, spec=replace(second.spec, launch=LaunchSpec(("python",)))),
            third,
        ]


@pytest.mark.looptime
async def test_an_owner_pauses_for_the_processor_time_of_its_questions_and_others_do_not():
    questions = limits.Questions()

    async def begins(owner):
        asked_at = anyio.current_time()
        async with questions.turn(owner):
            return anyio.current_time() - asked_at

    questions.account.charge("team", limits.QUESTIONS_BURST_S)
    assert await begins("team") == 0, "this was its burst"
    questions.account.charge("team", 1.5)
    waits = asyncio.create_task(begins("team"))
    await asyncio.sleep(0)
    assert await begins("others") == 0
    assert await waits == pytest.approx(limits.QUESTIONS_PAUSE * 1.5)


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_the_processor_time_of_a_question_is_charged_also_where_its_caller_hangs_up(
    running, body_of_job, monkeypatch, tmp_path, hangs_up
):
    burnt, charged, charge = tmp_path / "burnt", [], limits.Account.charge

    def charges(account, owner, seconds):
        charged.append((owner, seconds))
        charge(account, owner, seconds)

    end = "time.sleep(1000)" if hangs_up else "sys.exit(question.main())"
    script = f"""if True:
        import pathlib, sys, time
        from rollmuxd.daemon import question
        began = time.process_time()
        while time.process_time() - began < 0.5:
            pass
        pathlib.Path({str(burnt)!r}).touch()
        {end}"""
    monkeypatch.setattr(background, "_COMMAND", (sys.executable, "-c", script))
    monkeypatch.setattr(limits.Account, "charge", charges)
    async with running() as world, world.client() as client:
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(asking(client, body_of_job, "plan"))
                while not burnt.exists():
                    await anyio.sleep(0.01)
                if hangs_up:
                    tasks.cancel_scope.cancel()
            while not [seconds for owner, seconds in charged if owner == "team" and seconds >= 0.5]:
                await anyio.sleep(0.01)


async def test_time_in_which_a_question_gets_no_processor_is_not_charged():
    charged, began = [], time.monotonic()
    assert await background._answered(SimpleNamespace(answer=partial(time.sleep, 1)), charged.append) == b"null"
    assert 0 < charged[0] <= time.monotonic() - began - 1


# ---- bodies and answers ----------------------------------------------------------------------------------------------


async def test_a_registration_has_32_kb_and_a_larger_one_is_413_that_names_the_limit(running, body_of_job):
    async with running() as world, world.client() as client:
        named = {"rollout": {"named": ["x" * 100] * 400}, "train": {}}
        answer = await client.post("/v1/jobs", json=body_of_job("math", wants=named))
        assert answer.status_code == 413
        assert answer.json()["data"] == {"limit": limits.REGISTRATION}
        assert str(limits.REGISTRATION) in answer.json()["detail"]
        assert not world.state.jobs


async def test_an_owners_half_sent_bodies_are_counted_together_and_given_back(running, send_raw, monkeypatch):
    monkeypatch.setattr(limits, "BODIES", 100_000)
    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        headers = {"Authorization": f"Bearer {world.secrets['alice']}", "content-type": "application/json"}

        async def half(hangs_up):
            parts = [{"type": "http.request", "body": b" " * 30_000, "more_body": True}]

            async def receive():
                if parts:
                    return parts.pop()
                await hangs_up.wait()
                return {"type": "http.disconnect"}

            return await send_raw(world.app, "POST", "/v1/plan", receive, headers=headers)

        hangs_up = asyncio.Event()
        halves = [asyncio.create_task(half(hangs_up)) for _ in range(5)]
        await world.settle()
        statuses = [task.result()[0]["status"] for task in halves if task.done()]
        assert statuses == [429, 429]

        async def in_two():
            yield b'{"jobs": ['
            yield b" " * 30_000 + b"]}"

        refused = await client.post("/v1/plan", content=in_two(), headers=headers)
        assert (refused.status_code, refused.json()["data"]) == (429, {"limit": 100_000})
        assert int(refused.headers["retry-after"]) >= 1
        other = {"Authorization": f"Bearer {world.secrets['stranger']}"}
        taken = await stranger.post("/v1/plan", content=in_two(), headers={**headers, **other})
        assert taken.status_code == 422, "another owner's body is read to its end, and has no job in it"
        hangs_up.set()
        await asyncio.gather(*halves)
        assert (await client.post("/v1/plan", content=in_two(), headers=headers)).status_code == 422


async def test_long_answers_that_one_owner_does_not_take_are_counted_together_and_given_back(running, monkeypatch):
    monkeypatch.setattr(routing, "LONG", 10)
    monkeypatch.setattr(limits, "ANSWERS", 10_000)
    async with running() as world, world.client() as client, world.client("stranger") as stranger:
        await world.job(client, "first")
        takes, statuses = asyncio.Event(), []

        async def ask():
            async def receive():
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message):
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                elif message["body"] == b"":  # uvicorn waits here until what went before was taken
                    await takes.wait()

            headers = [(b"authorization", b"Bearer " + world.secrets["alice"].encode())]
            scope = {"type": "http", "method": "GET", "path": "/v1/jobs", "query_string": b"", "root_path": ""}
            await world.app({**scope, "headers": headers}, receive, send)

        fit = 10_000 // len((await client.get("/v1/jobs")).content)
        asked = [asyncio.create_task(ask()) for _ in range(fit + 2)]
        with anyio.fail_after(PATIENCE_S):
            while len(statuses) < len(asked):  # not for a number of turns: a page leaves the loop for some time
                await anyio.sleep(0.001)
        assert sorted(statuses) == [200] * fit + [429] * 2
        assert (await stranger.get("/v1/jobs")).status_code == 200, "another owner's answers count for it alone"
        takes.set()
        await asyncio.gather(*asked)
        statuses.clear()
        await ask()
        assert statuses == [200]


@pytest.mark.parametrize("remembered", [True, False])
async def test_a_page_of_facts_ends_early_where_they_are_large_and_none_is_missing(
    running, body_of_job, monkeypatch, remembered
):
    monkeypatch.setattr(limits, "PAGE", 50_000)
    monkeypatch.setattr(store, "READ_BYTES", 50_000)
    async with running() as world, world.client() as client:
        for number in range(10):
            named = {"rollout": {"named": [ROLLOUT]}, "train": {}}
            side = [{"name": f"s{n}", "pools": ["rollout"] * 8} for n in range(8)]
            states = {"rollout": {"options": {"x": ["y" * 4000] * 5}}}
            body = body_of_job(f"job{number}", wants=named, side=side, states=states)
            world.services.drivers["channel"] = TakesAnything()
            assert (await client.post("/v1/jobs", json=body)).status_code == 201
        if not remembered:
            world.writer._recent.clear()
        names, after, pages = [], 0, 0
        while after < world.writer.durable_seq:
            answer = await client.get("/v1/facts", params={"after": after})
            assert len(answer.content) < 50_000 + 30_000
            names += [fact["spec"]["name"] for fact in answer.json()["facts"] if fact["fact"] == "job_registered"]
            after, pages = answer.json()["last"], pages + 1
        assert pages > 3
        assert names == [f"job{number}" for number in range(10)]


async def test_a_page_of_jobs_ends_early_where_they_are_large_and_none_is_missing(running, body_of_job, monkeypatch):
    async with running() as world, world.client() as client:
        for number in range(6):
            assert (await client.post("/v1/jobs", json=body_of_job(f"job-{number}"))).status_code == 201
        whole = (await client.get("/v1/jobs")).json()
        assert len(whole["items"]) == 6
        assert whole["next"] is None
        monkeypatch.setattr(limits, "PAGE", len(httpx.Request("POST", "http://x", json=whole["items"][:2]).content))
        seen, after = [], {}
        while True:
            page = (await client.get("/v1/jobs", params=after)).json()
            assert 1 <= len(page["items"]) <= 2
            seen += [job["job"] for job in page["items"]]
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        assert seen == [job["job"] for job in whole["items"]]


# ---- turns of the loop -----------------------------------------------------------------------------------------------


async def test_of_a_burst_of_one_owners_calls_one_begins_in_each_turn_of_the_loop():
    """So another owner's call, which comes behind them, does not wait for all of them."""
    paces, began, turns = limits.Paces(), [], 0

    async def call(owner):
        if (turn := paces.take(owner)) is not None:
            await turn
        began.append((turns, owner))

    burst = [asyncio.create_task(call("many")) for _ in range(20)]
    other = asyncio.create_task(call("few"))
    burst[5].cancel()  # (before it has begun)
    while not all(task.done() for task in burst):
        await asyncio.sleep(0)
        turns += 1
        if turns == 3:
            burst[10].cancel()  # it waits
    await other
    assert [owner for _, owner in began[:2]] == ["many", "few"]
    assert len({turn for turn, owner in began if owner == "many"}) == 18
    assert paces.take("many") is None, "it is forgotten"


@pytest.mark.looptime
async def test_an_owner_whose_calls_hold_the_loop_up_pauses_while_another_owner_calls():
    paces, loop = limits.Paces(), asyncio.get_running_loop()

    async def begins(owner, *, charged=True):
        called_at = loop.time()
        if (turn := paces.take(owner, charged=charged)) is not None:
            await turn
        return loop.time() - called_at

    await asyncio.sleep(10)
    paces.charge("many", 1.0)
    assert await begins("few") == 0
    assert await begins("many") == 0, "it was alone when it was charged"
    paces.charge("many", limits.CALLS_BURST_S)
    assert await begins("many") == 0, "this was its burst"
    paces.charge("many", 1.0)
    assert await begins("many") == pytest.approx(limits.CALLS_PAUSE, abs=0.01)
    paces.charge("many", 1.0)
    assert await begins("few") == 0
    assert await begins("many", charged=False) == 0, "what is not charged for does not wait"
    waits = asyncio.create_task(begins("many"))
    given_up = asyncio.create_task(begins("many"))
    await asyncio.sleep(1)
    given_up.cancel()
    await asyncio.sleep(10)
    assert waits.done()
    assert not paces._account._paid_at or await begins("many") == 0
    assert not paces._account._paid_at, "it is forgotten"


async def test_what_a_call_holds_the_loop_for_is_charged_and_what_it_waits_for_is_not():
    spent = []

    async def work():
        time.sleep(0.02)  # holds the loop
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.Event().wait()
        time.sleep(0.02)
        return "done"

    assert await limits.metered(work(), spent.append) == "done"
    assert len(spent) == 2
    assert all(seconds >= 0.02 for seconds in spent)


async def test_the_process_that_answers_a_question_goes_first_where_memory_is_short():
    asked = pickle.dumps(SimpleNamespace(answer=partial(Path.read_text, Path("/proc/self/oom_score_adj"))))
    done = await anyio.run_process([sys.executable, "-P", "-m", question.__name__], input=asked)
    assert json.loads(done.stdout.partition(b" ")[2]) == "1000\n"


async def test_the_process_that_answers_a_question_gives_way_before_it_imports_anything(
    running, body_of_job, held_questions, monkeypatch
):
    """Its imports take half a second of a processor, which the loop would have to share."""
    monkeypatch.setattr(question, "NICE", NICE)
    async with running() as world, world.client() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(asking(client, body_of_job, "plan"))
        with anyio.fail_after(PATIENCE_S):
            await held_questions.have_begun(1)
            (pid,) = held_questions.pids
            expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
            while os.getpriority(os.PRIO_PROCESS, pid) != expected:
                await anyio.sleep(0.01)
        assert os.getsid(pid) == pid, "Linux shares a processor between sessions: in the daemon's it takes its share"
        held_questions.let_go()


async def test_one_report_of_an_owner_is_made_at_a_time_and_no_other_owner_waits(running, send_raw, monkeypatch):
    making, statuses, go = [], [], anyio.Event()

    async def slow(*_, **__):
        making.append(0)
        await go.wait()
        return DailyUsage(), 0

    monkeypatch.setattr(LiveUsage, "between", slow)
    async with running() as world, world.client() as client, world.client("stranger") as stranger:

        async def hangs_up():
            return {"type": "http.disconnect"}

        async def ask(caller):
            statuses.append((await caller.get("/v1/report")).status_code)

        async with anyio.create_task_group() as tasks:
            with anyio.fail_after(PATIENCE_S):
                for _ in range(limits.PAGES + 1):
                    tasks.start_soon(ask, client)
                while not statuses:
                    assert len(making) <= 1
                    await anyio.sleep(0.01)
                assert (statuses, len(making)) == ([429], 1)
                tasks.start_soon(ask, stranger)
                while len(making) < 2:
                    await anyio.sleep(0.01)
                headers = {"Authorization": f"Bearer {world.secrets['stranger']}"}
                assert await send_raw(world.app, "GET", "/v1/report", hangs_up, headers=headers) == []
            go.set()
        assert sorted(statuses) == [200] * (limits.PAGES + 1) + [429]
