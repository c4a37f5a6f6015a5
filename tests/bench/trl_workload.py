"""Real TRL runs for ``trl_runs.py``: ``trl_workload.py SOCKET FOLDER ROLLOUTS TOKENS``, one JSON object on stdout.

Each part is a process of its own, forked from this one, which has imported TRL. The runs are those of
``examples/trl_grpo.py``; with completions of 64 tokens a phase takes some tenths of a second.
"""

import functools
import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch
import trl_grpo
from transformers import TrainerCallback

import rollmuxd
from rollmuxd.client.sync import Daemon
from rollmuxd_hook_kit.turns import Turns
from rollmuxd_hook_trl.trainer import Sharing

STEPS_EACH: Final = 2
#: what the hook stands before in each step
METHODS: Final = ("_generate", "_get_per_token_logps_and_entropies", "_calculate_rewards", "compute_loss")
RUNS: Final[dict[str, dict[str, Any]]] = {
    "one": dict(task="high", seed=1), "two": dict(task="same", seed=2), "three": dict(task="high", seed=3)
}  # fmt: skip


def size(tokens: int) -> dict[str, Any]:
    """What makes a phase so long: a model as wide as its completions are long, which are all of one length."""
    return dict(
        width=8 * tokens, max_completion_length=tokens, generation_kwargs=dict(min_new_tokens=tokens),
        num_iterations=STEPS_EACH, logging_steps=10_000, learning_rate=1e-5,
    )  # fmt: skip


# ---- the hook without a daemon ---------------------------------------------------------------------------------------


class Bare:
    """A trainer that does nothing."""

    reward_funcs = (trl_grpo.high,)

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self._turns = Turns(rollmuxd.job("nobody"), lambda: None)

    def _generate(self, prompts: list[Any]) -> None: ...
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> None: ...
    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> None: ...
    def compute_loss(self, *args: Any, **kwargs: Any) -> None: ...


class Hooked(Sharing, Bare):
    __init__ = Bare.__init__


def without_daemon(rollouts: int, tokens: int) -> dict[str, Any]:
    """What the hook's own lines take in a step, by the calls that a real step makes to them, beside such a step."""
    counts = dict.fromkeys(METHODS, 0)
    ends: list[float] = []

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())

    run = trl_grpo.trainer("high", "bare", callbacks=[Steps()], max_steps=rollouts * STEPS_EACH, **size(tokens))

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(*args, **kwargs)

        return counting

    for name in METHODS:
        setattr(run, name, counted(name, getattr(run, name)))
    run.train()
    ends = ends[STEPS_EACH - 1 :: STEPS_EACH]
    a_rollout = [later - earlier for earlier, later in itertools.pairwise(ends)]
    hook = sum(counts[name] / rollouts * (_each(Hooked(), name) - _each(Bare(), name)) for name in METHODS)
    return {"hook_s": hook / STEPS_EACH, "step_s": median(a_rollout) / STEPS_EACH}


def _each(of: Any, name: str, calls: int = 20_000) -> float:
    """Seconds of processor time for a call; the least of five."""
    method, taken = getattr(of, name), []
    for _ in range(5):
        began = time.process_time()
        for _ in range(calls):
            method(None)
        taken.append((time.process_time() - began) / calls)
    return min(taken)


# ---- with a daemon, and nobody else ----------------------------------------------------------------------------------


class Watched(Turns):
    """Turns that write down when they have had a phase, how long they have kept the loop, and with how many calls."""

    def watch(self) -> None:
        self.kept_s = 0.0
        #: processor time of the loop's thread
        self.cpu_s = 0.0
        self.calls = 0
        self.had: list[tuple[str, float, float]] = []
        self._since = 0.0
        self._inside = 0

    def go(self, phase: str) -> None:
        if not self.on or self.current == phase:
            return
        self._timed(lambda: super(Watched, self).go(phase))
        self._since = time.perf_counter()

    def leave(self, **more: Any) -> None:
        if self.current is not None:
            self.had.append((self.current, self._since, time.perf_counter()))
        self._timed(lambda: super(Watched, self).leave(**more))

    def _timed(self, call: Callable[[], None]) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        self._inside += 1
        try:
            call()
        finally:
            self._inside -= 1
            if not self._inside:
                self.kept_s += time.perf_counter() - began
                self.cpu_s += time.thread_time() - cpu

    def called(self) -> None:
        self.calls += bool(self._inside)


def watched(run: Any) -> Watched:
    run._turns.__class__ = Watched
    run._turns.watch()
    turns: Watched = run._turns
    send = Daemon.call

    def call(daemon: Daemon, what: Any) -> Any:
        turns.called()
        return send(daemon, what)

    Daemon.call = call  # type: ignore[method-assign]
    return turns


class Block(NamedTuple):
    """A rollout, and the steps on it."""

    #: of three: 2 is the one without the daemon
    which: int
    took_s: float
    kept_s: float
    cpu_s: float
    calls: int


def no_rival(rollouts: int, tokens: int) -> dict[str, Any]:
    """Rollouts, each with the steps on it: how long, how long in the hook; and every third without the daemon.

    Of those with it the second of two is looked at, since it also ends what the one before it has held.
    """
    blocks: list[Block] = []

    class Toggled(TrainerCallback):
        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            number, inside = divmod(state.global_step, STEPS_EACH)
            if inside:
                return
            now = (time.perf_counter(), turns.kept_s, turns.cpu_s, turns.calls)
            if number:
                took_s, kept_s, cpu_s, calls = (after - before for after, before in zip(now, self.began, strict=True))
                blocks.append(Block((number - 1) % 3, took_s, kept_s, cpu_s, int(calls)))
            if number % 3 == 2:
                turns.leave()
            turns.on = number % 3 != 2
            self.began = (time.perf_counter(), turns.kept_s, turns.cpu_s, turns.calls)

    more: dict[str, Any] = dict(max_steps=3 * rollouts * STEPS_EACH + 1, callbacks=[Toggled()])
    run = trl_grpo.trainer("high", "alone", rollmux=dict(name="alone", parking=True), **more, **size(tokens))
    turns = watched(run)
    run.train()
    shared = [block for block in blocks if block.which == 1]
    apart = [block for block in blocks if block.which == 2]
    longer = [one.took_s - other.took_s for one, other in zip(shared, apart, strict=True)]
    return {
        "kept_s": median(block.kept_s for block in shared) / STEPS_EACH,
        "cpu_s": median(block.cpu_s for block in shared) / STEPS_EACH,
        "calls": median(block.calls for block in shared) / STEPS_EACH,
        "step_s": median(block.took_s - block.kept_s for block in shared) / STEPS_EACH,
        "paired": median(longer) / median(block.took_s for block in apart),
        "steps": len(shared) * STEPS_EACH,
    }


# ---- three of them ---------------------------------------------------------------------------------------------------


def shared(name: str, folder: Path, rollouts: int, tokens: int) -> dict[str, Any]:
    """One of three runs; it begins with its first rollout once all are there. Its phases, by the machine's clock."""

    class Gated(trl_grpo.GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            if self.state.global_step == 0:
                self._turns.leave()
                (folder / f"{name}.ready").touch()
                while not all((folder / f"{other}.ready").exists() for other in RUNS):
                    time.sleep(0.01)
            return super()._generate(prompts)

    rollmux = dict(name=name, rollout=dict(nodes=1), train=dict(nodes=1))
    more = dict(rollmux=rollmux, max_steps=rollouts * STEPS_EACH)
    run = trl_grpo.trainer(**RUNS[name], out=name, kind=Gated, **more, **size(tokens))
    turns = watched(run)
    run.train()
    return {"phases": [phase for phase in turns.had if phase[0] != "init"], "weights": trl_grpo.digest(run.model)}


# ---- all of it -------------------------------------------------------------------------------------------------------


def started(part: Callable[[], dict[str, Any]], path: Path, url: str) -> int:
    """A process of its own for a part, which leaves its result in a file."""
    pid = os.fork()
    if pid:
        return pid
    os.dup2(2, 1)  # TRL talks
    os.environ["ROLLMUX_URL"] = url
    torch.set_num_threads(1)
    try:
        path.write_text(json.dumps(part()))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.exit()


def ended(*pids: int) -> None:
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        raise SystemExit(f"{sum(map(bool, statuses))} of {len(pids)} processes failed")


def main() -> None:
    url, folder, rollouts, tokens = f"unix://{sys.argv[1]}", Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    few = -(-rollouts // 3)
    parts: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
        "hook": (lambda: without_daemon(few + 1, tokens), "off"),
        "alone": (lambda: no_rival(rollouts, tokens), url),
    }
    os.chdir(folder)
    gc.freeze()  # a fork that looks for garbage would write to each page of what was imported
    for name, (part, there) in parts.items():
        ended(started(part, folder / f"{name}.json", there))
    three = [functools.partial(shared, name, folder, rollouts, tokens) for name in RUNS]
    ended(*(started(part, folder / f"{name}.json", url) for name, part in zip(RUNS, three, strict=True)))
    print(json.dumps({name: json.loads((folder / f"{name}.json").read_text()) for name in (*parts, *RUNS)}))


if __name__ == "__main__":
    main()
