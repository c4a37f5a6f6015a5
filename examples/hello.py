"""The smallest complete client: a search that learns by trial, whose two phases are asked for by name.

In the rollout, points are drawn around a centre and scored; in training, the centre moves to the best of
them.  Without a daemon nothing waits, and the program is the one you had before.  With one, start it twice
(the second with another name) and look at `rollmuxd slot list`: one rolls out while the other trains.
"""

import argparse
import random

import rollmuxd

Point = tuple[float, float]


def score(point: Point) -> float:
    """Best at (3, -1), which the search does not know."""
    return -((point[0] - 3) ** 2) - (point[1] + 1) ** 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="hello")
    name = parser.parse_args().name
    rng, centre = random.Random(7), (0.0, 0.0)
    try:
        job = rollmuxd.job(name, rollout=dict(nodes=1), train=dict(nodes=1))
    except ValueError as error:
        parser.error(str(error))
    with job:
        for step in range(10):
            with job.phase("rollout"):
                points = [(rng.gauss(centre[0], 1), rng.gauss(centre[1], 1)) for _ in range(20_000)]
                best = sorted(points, key=score)[-1000:]
            with job.phase("train"):
                centre = (sum(x for x, _ in best) / len(best), sum(y for _, y in best) / len(best))
            print(f"step {step}: centre ({centre[0]:.2f}, {centre[1]:.2f}), score {score(centre):.3f}")


if __name__ == "__main__":
    main()
