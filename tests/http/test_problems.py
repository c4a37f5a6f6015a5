"""Every error is a problem body that says what is, names the field, and changes nothing."""

import inspect

import pytest
import structlog

from rollmuxd.core import errors
from rollmuxd.core.causes import said
from rollmuxd.core.model import JobStatus
from rollmuxd.daemon.http.problems import KINDS, problem_of
from rollmuxd.daemon.writer import Unavailable
from rollmuxd.explain.causes import refusal

#: The statuses, written down a second time.
STATUSES = {
    errors.UnknownThing("job", "j1"): 404,
    errors.Conflict("no"): 409,
    errors.StaleFence("s1", "released", said("its lease ran out")): 409,
    errors.TakesNoRequests("math", "lost", said("a node is away")): 409,
    errors.RunAlive("math", 1, 4711, "h1"): 409,
    errors.Impossible("never"): 422,
    errors.TooMany("full"): 429,
    errors.Rejected("no"): 409,
    errors.BrokenInvariant("a bug, with internals"): 500,
    Unavailable("the disk is full", retry_after_s=30): 503,
}


def test_every_error_of_the_core_is_mapped_and_so_are_its_parts():
    core = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)}
    assert core <= set(KINDS)
    assert core <= {type(error) for error in STATUSES}


@pytest.mark.parametrize(("error", "status"), STATUSES.items(), ids=lambda value: type(value).__name__)
def test_an_error_becomes_its_status_with_its_sentence(error, status):
    problem, _ = problem_of(error, "r1")
    assert problem.status == status
    assert problem.request_id == "r1"
    assert problem.type.startswith("urn:rollmux:problem:")
    if status != 500:
        assert problem.detail == refusal(error)


def test_the_parts_of_a_refusal_are_data():
    problem, _ = problem_of(errors.RunAlive("math", 1, 4711, "h1", started="7"), "r1")
    assert problem.data == {"name": "math", "run": 1, "pid": 4711, "host": "h1", "started": "7"}
    problem, _ = problem_of(errors.TakesNoRequests("math", JobStatus.QUARANTINED, said("no sleep")), "r1")
    assert problem.data == {"name": "math", "status": "quarantined", "reason": "no sleep"}
    assert problem.detail == "job math is quarantined (no sleep)"


def test_a_bug_says_nothing_of_what_is_inside():
    for error in (errors.BrokenInvariant("secret"), KeyError("secret")):
        problem, _ = problem_of(error, "r1")
        assert problem.status == 500
        assert "secret" not in str(problem)


def test_who_is_to_come_back_is_told_when():
    assert ("retry-after", "30") in problem_of(Unavailable("full", retry_after_s=30), "")[1]
    assert any(name == "retry-after" for name, _ in problem_of(errors.TooMany("full"), "")[1])


BAD_BODIES = [
    (b"", 400, None),
    (b"{", 400, None),
    (b'{"name": "\xff"}', 400, None),
    (b"[" * 200_000, 413, None),
    (b"[" * 900, 422, ""),
    (b"[]", 422, ""),
    (b'{"name": "x"}', 422, "phases"),
    (b'{"name": "x", "phases": [], "wants": {"a": {}}}', 422, "phases"),
    (b'{"name": "x", "nmae": "y"}', 422, "nmae"),
    (b'{"name": "x\\n", "phases": [{"name": "a", "pools": ["a"]}], "wants": {"a": {}}}', 422, "name"),
    (
        b'{"name": "x", "phases": [{"name": "a", "pools": ["a"], "seconds": "long"}], "wants": {"a": {}}}',
        422,
        "phases[0].seconds",
    ),
    (b'{"name": "x", "phases": [{"name": "a", "pools": ["a"], "secs": 1}], "wants": {"a": {}}}', 422, "phases[0].secs"),
    (b'{"name": "x", "slo": 0.5, "phases": [{"name": "a", "pools": ["a"]}], "wants": {"a": {}}}', 422, "slo"),
    (b'{"name": "x", "slo": 1e999, "phases": [{"name": "a", "pools": ["a"]}], "wants": {"a": {}}}', 422, "slo"),
]


@pytest.mark.asyncio
async def test_what_is_no_name_is_told_what_a_name_has_and_no_pattern(running):
    async with running() as world, world.client() as client:
        answer = await client.post("/v1/jobs", json={"name": "my job", "phases": [], "wants": {}})
        needed = "letters, digits, . _ - are needed (first a letter or digit), at most 100 of them"
        assert answer.json()["detail"] == f"body: name: {needed}"


@pytest.mark.asyncio
@pytest.mark.parametrize(("body", "status", "field"), BAD_BODIES)
async def test_a_bad_body_is_refused_by_the_name_of_its_field_and_changes_nothing(running, body, status, field):
    async with running(limits={"max_body_mb": 0.1}) as world, world.client() as client:
        before = world.writer.durable_seq
        answer = await client.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text
        problem = answer.json()
        assert problem["status"] == status
        if status == 422:
            assert problem["data"]["field"] == field
        assert world.writer.durable_seq == before


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("limit=", "limit"),
        ("limit=1&limit=2", "limit"),
        ("lmit=1", "lmit"),
        ("status=sleeping", "status"),
        ("status=null", "status"),
    ],
)
async def test_a_bad_query_is_refused_by_the_name_of_its_parameter(running, query, field):
    async with running() as world, world.client() as client:
        answer = await client.get(f"/v1/jobs?{query}")
        assert answer.status_code == 422
        assert answer.json()["data"] == {"in": "query", "field": field}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "path", ["jobs/math/pause", "jobs/math/resume", "jobs/math/reinstate", "nodes/h1/gpu0-1/undrain"]
)
@pytest.mark.parametrize(
    ("body", "status", "field"),
    [(b'{"reason": "x"}', 422, "reason"), (b"[]", 422, ""), (b"{", 400, None), (b"{}", None, None), (b"", None, None)],
)
async def test_a_call_that_takes_no_body_refuses_one_and_does_nothing(running, path, body, status, field):
    async with running() as world, world.client("root") as root:
        await world.job(root, "math")
        before = world.writer.durable_seq
        answer = await root.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"})
        if status is None:
            assert answer.status_code in (200, 409), answer.text
            return
        assert answer.status_code == status, answer.text
        if field is not None:
            assert answer.json()["data"] == {"in": "body", "field": field}
        assert world.writer.durable_seq == before


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "jobs/math"), ("POST", "jobs/math/pause"), ("GET", "nodes/h1/gpu0-1"), ("DELETE", "jobs/math")],
)
async def test_a_call_that_takes_no_query_refuses_its_parameters_by_name(running, method, path):
    async with running() as world, world.client("root") as root:
        await world.job(root, "math")
        answer = await root.request(method, f"/v1/{path}?force=1")
        assert answer.status_code == 422
        assert answer.json()["data"] == {"in": "query", "field": "force"}
        assert (await root.get("/v1/jobs/math")).json()["status"] == "admitted"


@pytest.mark.asyncio
async def test_a_query_that_is_not_text_is_400(running):
    async with running() as world, world.client() as client:
        assert (await client.get("/v1/jobs?after=%ff")).status_code == 400


@pytest.mark.asyncio
async def test_a_body_too_large_is_413_whether_it_says_its_length_or_not(running):
    async def pieces():
        for _ in range(40):
            yield b" " * 10_000

    async with running(limits={"max_body_mb": 0.1}) as world, world.client() as client:
        for content in (b" " * 200_000, pieces()):
            answer = await client.post("/v1/plan", content=content)
            assert answer.status_code == 413
            assert answer.json()["data"]["limit"] == 100_000


@pytest.mark.asyncio
@pytest.mark.parametrize(("headers", "read"), [({}, 3), ({"content-length": "99999999999"}, 0)])
async def test_no_more_of_a_body_that_is_too_large_is_read_than_shows_it(running, send_raw, headers, read):
    async with running(limits={"max_body_mb": 0.1}) as world:
        pieces = 0

        async def receive() -> dict[str, object]:
            nonlocal pieces
            pieces += 1
            return {"type": "http.request", "body": b" " * 40_000, "more_body": True}

        headers = {"authorization": f"Bearer {world.secrets['alice']}", **headers}
        sent = await send_raw(world.app, "POST", "/v1/plan", receive, headers=headers)
        assert sent[0]["status"] == 413
        assert pieces == read


@pytest.mark.asyncio
async def test_a_body_that_is_not_json_by_its_own_word_is_415(running):
    async with running() as world, world.client() as client:
        assert (await client.post("/v1/jobs", data={"name": "x"})).status_code == 415


@pytest.mark.asyncio
async def test_what_is_not_there_is_404_and_a_wrong_method_405_with_what_is_allowed(running):
    async with running() as world, world.client() as client:
        for path in ("/v2", "/v1", "/v1/jobs/", "/v1/nothing", "/v1/jobs/j1/slots/s1"):
            answer = await client.get(path)
            assert answer.status_code == 404, path
            assert answer.headers["content-type"] == "application/problem+json"
        answer = await client.put("/v1/jobs")
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}


@pytest.mark.asyncio
async def test_every_answer_carries_a_request_id_the_callers_if_it_is_sane(running):
    async with running() as world, world.client() as client:
        assert (await client.get("/v1/jobs", headers={"X-Request-Id": "abc-1.2"})).headers["x-request-id"] == "abc-1.2"
        for strange in ("a b", "x" * 200, "<script>"):
            given = (await client.get("/v1/jobs", headers={"X-Request-Id": strange})).headers["x-request-id"]
            assert given != strange
            assert len(given) == 16
        problem = await client.get("/v1/jobs/none", headers={"X-Request-Id": "abc"})
        assert problem.json()["request_id"] == problem.headers["x-request-id"] == "abc"


@pytest.mark.asyncio
async def test_a_handler_that_crashes_is_500_without_a_word_of_what_is_inside(running, body_of_job, monkeypatch):
    from rollmuxd.daemon.http import views

    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("the inside")

    monkeypatch.setattr(views, "job_view", crash)
    async with running() as world, world.client() as client, world.client(None) as nobody:
        answer = await client.post("/v1/jobs", json=body_of_job("x"))
        assert answer.status_code == 500
        assert "the inside" not in answer.text
        assert (await nobody.get("/healthz")).status_code == 200


@pytest.mark.asyncio
async def test_calls_that_crash_again_and_again_fill_no_log(running, monkeypatch):
    from rollmuxd.daemon.http import views

    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("the inside")

    async with running() as world, world.client() as client:
        await world.job(client, "math")
        monkeypatch.setattr(views, "job_view", crash)
        with structlog.testing.capture_logs() as lines:
            for _ in range(50):
                assert (await client.get("/v1/jobs/math")).status_code == 500
    assert [line["event"] for line in lines] == ["http_failed"] * 20


@pytest.mark.asyncio
async def test_while_the_journal_cannot_be_written_calls_are_503_and_so_is_readyz(running, body_of_job):
    from rollmuxd.daemon.journal.file import JournalFailed

    async with running() as world, world.client() as client:
        assert (await client.get("/readyz")).status_code == 200
        world.journal.failing = JournalFailed("disk on fire")
        answer = await client.post("/v1/jobs", json=body_of_job("math"))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200
        world.journal.failing = None


@pytest.mark.asyncio
async def test_head_answers_like_get_without_the_body(running):
    async with running() as world, world.client() as client:
        answer = await client.head("/v1/jobs")
        assert answer.status_code == 200
        assert answer.content == b""
        assert int(answer.headers["content-length"]) > 0
