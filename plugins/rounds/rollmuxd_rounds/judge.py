"""A judge model beside the actor, on the same GPUs: it is asked while the actor leaves room in its KV cache.

Both engines fit on the GPUs together (the job's ``gpu_gb`` counts both). In a long rollout's tail the actor's batch is
small, so that the judge gets what is left (RollPacker, reward scheduler).
"""

import asyncio
from types import TracebackType
from typing import Final, Self

import httpx

from rollmuxd_rounds.generate import Generate, Response

#: the share of the KV cache that is in use, by engine
_GAUGES: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")


class Judge:
    """Asks ``judge`` while the fullest of the ``actors`` (URLs of engines, which have ``/metrics``) uses less than
    ``kv_share`` of its KV cache. The actors are asked every ``look_s`` at most.

    An actor that does not answer counts as empty: it generates nothing.
    """

    def __init__(self, judge: Generate, actors: list[str], *, kv_share: float = 0.8, look_s: float = 0.5) -> None:
        if not actors or not 0 < kv_share <= 1:
            raise ValueError(
                f"{len(actors)} actors, kv_share {kv_share:g}: name an actor, and a share above 0, at most 1"
            )
        self._judge, self._kv_share, self._look_s = judge, kv_share, look_s
        self._client = httpx.AsyncClient(timeout=5.0)
        self._urls = [f"{url.rstrip('/')}/metrics" for url in actors]
        self._looking = asyncio.Lock()
        self._used, self._looked_at = 1.0, float("-inf")

    async def __call__(self, prompt: object) -> Response:
        """The judge's answer, once there is room. Raises what the judge raises."""
        while await self._use() >= self._kv_share:  # noqa: ASYNC110  (what changes it is in another process)
            await asyncio.sleep(self._look_s)
        return await self._judge(prompt, 0)

    async def _use(self) -> float:
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now - self._looked_at >= self._look_s:
                self._used = max(await asyncio.gather(*map(self._use_of, self._urls)))
                self._looked_at = now
            return self._used

    async def _use_of(self, url: str) -> float:
        try:
            answer = await self._client.get(url)
            answer.raise_for_status()
        except httpx.HTTPError:
            return 0.0
        return used_of(answer.text)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._client.aclose()


def used_of(metrics: str) -> float:
    """The largest share of a KV cache in use, from Prometheus text; 0 where no engine says it."""
    used = [0.0]
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in _GAUGES:
            used.append(float(value))
    return max(used)
