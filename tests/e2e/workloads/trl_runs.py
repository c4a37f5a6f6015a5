"""Starts TRL runs, each a process of its own that has imported TRL already: importing it takes longer than they do.

A line of JSON on stdin, a line of JSON on stdout:

    {"run": NAME, "with": {...}, "cwd": FOLDER, "log": FILE, "environment": {...}}    the process: its pid
    {"ask": PID}                                                                      its exit status; null: it runs

Runs are the functions below; the program that is under test in them is ``examples/trl_grpo.py``.
"""

import functools
import gc
import itertools
import json
import os
import sys
import time
import warnings
from typing import Any

import forked
import httpx  # noqa: F401  (each run would import it)
import torch
import transformers
import trl
import trl_grpo
from accelerate.commands import launch
from fake_trl import FakeGeneration
from trl.trainer import grpo_trainer


def weights(name: str, run: Any) -> None:
    print(f"{name}: weights {trl_grpo.digest(run.model)}", flush=True)


# ---- runs ------------------------------------------------------------------------------------------------------------


def example(arguments: list[str], saves: int | None = None) -> None:
    """The program, as a user starts it; with ``saves`` it stays in the midst of the checkpoint after so many."""
    sys.argv[1:] = arguments
    saved = transformers.Trainer._save_checkpoint
    done = itertools.count()

    @functools.wraps(saved)
    def save(*given: Any, **more: Any) -> None:
        while saves is not None and next(done) >= saves:
            time.sleep(3600)
        saved(*given, **more)

    transformers.Trainer._save_checkpoint = save
    trl_grpo.main()


def alone(runs: dict[str, dict[str, Any]], **more: Any) -> None:
    """The same by TRL itself, one after the other."""
    for name, of in runs.items():
        run = trl_grpo.trainer(**of, out="alone", kind=trl.GRPOTrainer, **more)
        run.train()
        weights(name, run)


def ranks(name: str, more: dict[str, Any]) -> None:
    """By TRL itself, and then shared, in one process group."""
    solo = trl_grpo.trainer("high", "alone", kind=trl.GRPOTrainer, **more)
    solo.train()
    shared = trl_grpo.trainer("high", "shared", rollmux=dict(name=name, parking=True), **more)
    shared.train()
    weights("alone", solo)
    weights("shared", shared)
    torch.distributed.barrier()  # rank 0 has the store, from which the others may still read
    torch.distributed.destroy_process_group()


def served(task: str) -> None:
    """By TRL itself, and then shared, with a server each, and evaluations."""
    grpo_trainer.VLLMGeneration = FakeGeneration
    more: dict[str, Any] = dict(
        max_steps=4, use_vllm=True, vllm_mode="server", vllm_importance_sampling_correction=False,
        eval_strategy="steps", eval_steps=2, eval_dataset=trl_grpo.Dataset.from_dict({"prompt": ["1="] * 8}),
    )  # fmt: skip
    alone({task: {"task": task}}, **more)
    pools = dict(rollout=dict(nodes=1), train=dict(nodes=1))
    shared = trl_grpo.trainer(task, "shared", rollmux=dict(name=task, **pools), **more)
    shared.train()
    weights(task, shared)


def launched(words: list[str]) -> None:
    """``accelerate launch``, as a user types it."""
    sys.argv[1:] = words
    launch.main()


def rollmuxd(words: list[str], python: str) -> None:
    """The command line, as a user types it. What it starts by ``python`` begins with what is imported here."""
    asked = {"argv": ["-m", "rollmuxd", *words], "cwd": os.getcwd(), "env": dict(os.environ), "session": False}
    asked["stand_in"] = python
    forked._become(asked, sys.path[:])


RUNS = {run.__name__: run for run in (example, alone, ranks, served, launched, rollmuxd)}

# ---- starting them ---------------------------------------------------------------------------------------------------


def start(asked: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(asked["cwd"])
    os.environ.update(asked["environment"])
    torch.set_num_threads(1)
    RUNS[asked["run"]](**asked["with"])
    sys.exit()  # by way of what is to be done at exit


def main() -> None:
    warnings.simplefilter("ignore")
    # A fork that looks for garbage writes to each page of what was imported: two seconds of processor time, for each.
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        if "ask" in asked:
            pid, status = os.waitpid(asked["ask"], os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            answer = {"pid": start(asked)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
