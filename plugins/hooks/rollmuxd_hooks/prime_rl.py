"""prime-rl: ``torchrun -m rollmuxd_hooks.prime_rl ARGS`` in place of ``torchrun -m prime_rl.trainer.rl.train ARGS``.

Its trainer is asynchronous, and computes in these processes. Each rank's slot is from when its batch has arrived until
it waits for the next one: weights are sent and checkpoints written by then. Ranks wait in no collective. Model and
optimizer are parked in host memory meanwhile.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from rollmuxd_hook_kit.contract import look_at_or_exit
from rollmuxd_hook_kit.turns import around
from rollmuxd_hooks.contract import PRIME_RL
from rollmuxd_hooks.loop import Loop, Shape, from_file, get, refuse

look_at_or_exit(PRIME_RL, __name__)

import torch  # noqa: E402
from prime_rl.trainer.rl import train as theirs  # noqa: E402

from rollmuxd_channel.torch_state import TorchState  # noqa: E402
from rollmuxd_hook_kit.ranks import settle, store  # noqa: E402


def train(config: Any, *, rollmux: Mapping[str, Any] | None = None) -> None:
    """prime-rl's, as a job. ``rollmux``: keywords of :func:`rollmuxd.job`."""
    if get(config, "weight_broadcast", "type") == "nixl":
        raise refuse(
            "weight_broadcast.type=nixl",
            "say nccl or filesystem",
            "engines read the trainer's weights where they were, and another job's bytes may be there",
        )
    if get(config, "model", "full_offload"):
        raise refuse(
            "model.full_offload", "leave it out", "gradients are in buffers of prime-rl's own, which parking would lose"
        )
    if get(config, "max_concurrent_runs", default=1) > 1:
        raise refuse("max_concurrent_runs > 1", "set it to 1", "the optimizers of several runs come and go")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    group = {"ranks": ranks, "rank": int(os.environ["RANK"]), "store": store()} if ranks > 1 else {}
    loop = Loop(
        {**group, **from_file(), **(rollmux or {})},
        name=str(get(config, "output_dir", default="prime-rl")).rpartition("/")[2],
        shape=Shape.ASYNCHRONOUS,
        settle=settle,
    )
    #: what is on this rank's GPUs
    parts: dict[str, Any] = {}
    if not loop.resident:
        TorchState(model=lambda: parts.get("model", ()), optimizer=lambda: parts.get("optimizer", ())).attach(
            loop.job, pool="train"
        )

    def optimizer(made: Any) -> None:
        made = made[0] if isinstance(made, tuple) else made  # (with what manages gradients)
        # (One whose state is in host memory is a class of prime-rl's.)
        parts["optimizer"] = made if isinstance(made, torch.optim.Optimizer) else ()

    def batches(loader: Any) -> None:
        around(loader, "wait_for_batch", before=loop.turns.leave, after=loop.train)
        if hasattr(loader, "receiver"):  # what follows it may be a barrier
            around(loader.receiver, "wait", after=loop.train)

    kept = {name: getattr(theirs, name) for name in ("setup_model", "setup_optimizer", "DataLoader", "FakeDataLoader")}
    seen: dict[str, Callable[[Any], None]] = {
        "setup_model": lambda made: parts.update(model=made),
        "setup_optimizer": optimizer,
        "DataLoader": batches,
        "FakeDataLoader": batches,
    }
    for name, made in kept.items():
        setattr(theirs, name, _seen(made, seen[name]))
    loop.begin()
    try:
        theirs.train(config)
    except BaseException as error:
        # (prime-rl makes an exit of an error.)
        loop.end(error.__context__ if isinstance(error, SystemExit) and error.__context__ else error)
        raise
    finally:
        for name, made in kept.items():
            setattr(theirs, name, made)
    loop.end()


def _seen(make: Callable[..., Any], then: Callable[[Any], None]) -> Callable[..., Any]:
    """The same, after which ``then`` is called with what was made."""

    def making(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        then(made)
        return made

    return making


def main() -> None:
    """Train as the command line says, as prime-rl's own entry point does."""
    train(theirs.cli(theirs.TrainerConfig))


if __name__ == "__main__":
    main()
