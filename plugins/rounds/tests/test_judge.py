"""A judge is asked only while the actor leaves room."""

import asyncio

import httpx
import pytest

from rollmuxd_rounds import Judge, Response
from rollmuxd_rounds.judge import used_of

pytestmark = pytest.mark.filterwarnings("error")

METRICS = """# HELP vllm:kv_cache_usage_perc KV-cache usage.
vllm:kv_cache_usage_perc{engine="0",model_name="m"} %s
vllm:num_requests_running{engine="0"} 3.0
"""


def judge_beside(used, asked, **more):
    async def judging(prompt, sample):
        asked.append((prompt, round(asyncio.get_running_loop().time(), 1)))
        return Response("good", 1)

    judge = Judge(judging, ["http://a", "http://b/"], **more)
    looks = []

    def answer(request):
        looks.append(request.url)
        found = used(request.url.host, asyncio.get_running_loop().time())
        return httpx.Response(500) if found is None else httpx.Response(200, text=METRICS % found)

    judge._client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return judge, looks


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_it_waits_for_the_fullest_actor_and_looks_once_for_all():
    asked = []
    begun = asyncio.get_running_loop().time()
    judge, looks = judge_beside(lambda host, now: 0.9 if host == "b" and now - begun < 10 else 0.1, asked, kv_share=0.8)
    async with judge:
        await asyncio.gather(*(judge(f"p{number}") for number in range(20)))

    assert {round(at - begun, 1) for _, at in asked} == {10.0}
    assert len(asked) == 20
    assert len(looks) <= 2 * (10 / 0.5 + 1), "every half second, and not for each question"


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_an_actor_that_is_parked_or_gone_keeps_no_judge_waiting():
    asked = []
    judge, _ = judge_beside(lambda host, now: None, asked)
    async with judge:
        assert (await judge("p")).text == "good"


@pytest.mark.parametrize(
    ("text", "used"),
    [(METRICS % 0.25, 0.25), ('sglang:token_usage{a="b c"} 0.5\nvllm:kv_cache_usage_perc 0.75', 0.75), ("", 0.0)],
)
def test_the_use_is_read_from_what_engines_say(text, used):
    assert used_of(text) == used


def test_numbers_that_cannot_be_are_refused():
    for wrong in ({"actors": []}, {"actors": ["http://a"], "kv_share": 0.0}):
        with pytest.raises(ValueError, match="name an actor, and a share above 0"):
            Judge(None, **wrong)
