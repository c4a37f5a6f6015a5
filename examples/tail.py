"""A rollout with a long tail, which gives GPUs back while its last sequences are still running.

Most sequences end early and a few run on, so for the last stretch of a rollout nearly all GPUs idle.  If
another job could use them, the slot carries a directive to shrink: gather what still runs on the GPUs to
keep, and only when the others are empty say so with `slot.shrink(keep)`.  A directive may be ignored: the
rollout then just keeps what it has until its end.  `min_gpus` says how few GPUs the tail needs; a job is asked
only if it says that, and the GPUs are of use only to a job that can begin on as many.  So start it twice:

    python examples/tail.py --name a & python examples/tail.py --name b

The "tokens" are Collatz steps, since nobody can tell how long such a sequence is before it has ended.  The
sleep per step stands for the forward pass; a real engine would be computing there.
"""

import argparse
import random
import time
from collections.abc import Sequence

import rollmuxd


def spread(sequences: Sequence[int], gpus: Sequence[str]) -> dict[str, list[int]]:
    return {gpu: list(sequences[i :: len(gpus)]) for i, gpu in enumerate(gpus)}


def rollout(slot: "rollmuxd.Slot", starts: Sequence[int], step_s: float) -> int:
    """Run every sequence down to 1; the number of tokens that took."""
    placed, tokens = spread(starts, slot.gpus or ("cpu",)), 0
    while running := [n for sequences in placed.values() for n in sequences]:
        slot.progress(len(starts) - len(running), len(starts))
        if slot.directive is not None and slot.directive.kind == "shrink" and len(slot.directive.keep) < len(placed):
            keep = slot.directive.keep
            placed = spread(running, keep)
            slot.shrink(keep)
            print(f"{len(running)} sequences go on, on {', '.join(keep)}")
        time.sleep(step_s)
        tokens += len(running)
        for gpu, sequences in placed.items():
            stepped = [n // 2 if n % 2 == 0 else 3 * n + 1 for n in sequences]
            placed[gpu] = [n for n in stepped if n != 1]
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds per token (default: %(default)s)")
    parser.add_argument("--name", default="tail")
    args = parser.parse_args()
    if args.step_s < 0:
        parser.error(f"--step-s is {args.step_s}, and it is at least 0")
    try:
        job = rollmuxd.job(args.name, rollout=dict(nodes=1, min_gpus=1), train=dict(nodes=1))
    except ValueError as error:
        parser.error(str(error))
    rng, mean = random.Random(7), 0.0
    with job:
        for step in range(args.iterations):
            starts = [rng.randrange(2, 100_000) for _ in range(64)]
            with job.phase("rollout") as slot:
                tokens = rollout(slot, starts, args.step_s)
            with job.phase("train"):
                mean += (tokens / len(starts) - mean) / (step + 1)
            print(f"step {step}: {tokens} tokens; a sequence has {mean:.1f} on average")


if __name__ == "__main__":
    main()
