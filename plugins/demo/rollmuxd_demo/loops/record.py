"""What the three jobs share around their loop: settings from the command line, and the record of a run.

A run leaves two files: ``OUT/NAME.npz``, the weights, and ``OUT/NAME.json``, with the rewards, the checksum of the
weights, and when each phase began and ended. Those times are taken inside the slot, so they hold the computing and
none of the waiting. They are of the monotonic clock, which all processes of one machine share. So the records of
several jobs give the time of any schedule of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo import Learner


def settings(name: str, about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default=name, help="the job's name (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the work of both phases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for NAME.npz and NAME.json (default: write nothing)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per iteration")
    return parser.parse_args()


class Record:
    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.rewards: list[float] = []
        self.phases: list[dict[str, object]] = []
        self._seconds: dict[str, float] = {}
        self._cpu_seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, cpu = time.monotonic(), time.process_time()
        yield
        end = time.monotonic()
        self.phases.append({"step": len(self.rewards), "phase": name, "start": start, "end": end})
        self._seconds[name], self._cpu_seconds[name] = end - start, time.process_time() - cpu

    def iteration(self, reward: float) -> None:
        """Call at the end of each iteration: prints its line."""
        step, seconds = len(self.rewards), self._seconds
        self.rewards.append(reward)
        if self.settings.json:
            times = {f"{name}_s": round(took, 4) for name, took in seconds.items()}
            times |= {f"{name}_cpu_s": round(took, 4) for name, took in self._cpu_seconds.items()}
            print(json.dumps({"step": step, "reward": round(reward, 4), **times}), flush=True)
        else:
            times = "  ".join(f"{name} {took:.2f} s" for name, took in seconds.items())
            print(f"{self.settings.name} {step:3}  reward {reward:.3f}  {times}", flush=True)

    def save(self, learner: Learner) -> None:
        """Call after the last iteration: writes the two files, if a folder was given."""
        if self.settings.out is None:
            return
        self.settings.out.mkdir(parents=True, exist_ok=True)
        stem = self.settings.out / self.settings.name
        learner.save(Path(f"{stem}.npz"))
        record = {
            "job": self.settings.name,
            "seed": self.settings.seed,
            "scale": self.settings.scale,
            "iterations": len(self.rewards),
            "rewards": self.rewards,
            "sha256": learner.checksum(),
            "phases": self.phases,
        }
        Path(f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
