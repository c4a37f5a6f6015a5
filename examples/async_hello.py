"""`hello.py` for a program that runs in asyncio: the same calls, awaited.

While one job waits for its slot, the event loop goes on: here two searches share one process, and each is
a job of its own.
"""

import asyncio
import random

import rollmuxd

Point = tuple[float, float]


def score(point: Point) -> float:
    """Best at (3, -1), which the search does not know."""
    return -((point[0] - 3) ** 2) - (point[1] + 1) ** 2


async def search(name: str, seed: int) -> None:
    rng, centre = random.Random(seed), (0.0, 0.0)
    async with rollmuxd.ajob(name, rollout=dict(nodes=1), train=dict(nodes=1)) as job:
        for step in range(10):
            async with job.phase("rollout") as slot:
                points = []
                for done in range(20):
                    points += [(rng.gauss(centre[0], 1), rng.gauss(centre[1], 1)) for _ in range(1000)]
                    slot.progress(done + 1, 20)
                    await asyncio.sleep(0)  # a computation that never awaits would hold up the other search
                best = sorted(points, key=score)[-1000:]
            async with job.phase("train"):
                centre = (sum(x for x, _ in best) / len(best), sum(y for _, y in best) / len(best))
            print(f"{name} step {step}: centre ({centre[0]:.2f}, {centre[1]:.2f}), score {score(centre):.3f}")


async def main() -> None:
    async with asyncio.TaskGroup() as searches:
        searches.create_task(search("hello-a", seed=1))
        searches.create_task(search("hello-b", seed=2))


if __name__ == "__main__":
    asyncio.run(main())
