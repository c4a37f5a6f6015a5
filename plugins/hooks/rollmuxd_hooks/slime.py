"""slime: in the ``train.py`` of one's own, ``from rollmuxd_hooks.slime import`` the three that make what it drives.

``create_placement_groups`` begins the job, and ``dispose`` of the rollout manager ends it. The manager is a handle of
Ray, so the loop gets a stand-in for it. Groups of trainers are objects, with brackets around their methods.

A driver that asks for the next rollout before it trains, as ``train_async.py`` does, is asynchronous. Its slot is for
the weights of the step before and for training. It waits for its next rollout between the two, without a slot.
"""

import ast
import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import ray

from rollmuxd_hook_kit.contract import look_at
from rollmuxd_hook_kit.turns import around
from rollmuxd_hooks.contract import SLIME
from rollmuxd_hooks.loop import Loop, Shape, get, refuse

look_at(SLIME)

from slime.ray import placement_group as theirs  # noqa: E402

__all__ = ["create_placement_groups", "create_rollout_manager", "create_training_models"]


def create_placement_groups(args: Any, *, rollmux: Mapping[str, Any] | None = None) -> Any:
    """slime's, once the job has its place. ``rollmux``: keywords of :func:`rollmuxd.job`."""
    shape = Shape.ONE_POOL if args.colocate else Shape.TWO_POOLS
    needs: tuple[str, ...] = ("offload_rollout", "offload_train")
    if not waits_for_rollouts(_source_of_main()):
        if get(args, "use_critic"):
            raise refuse(
                "--use-critic with train_async.py",
                "leave it out",
                "where only the critic trains, the slot would be held while the driver waits for its rollout",
            )
        shape, needs = Shape.ASYNCHRONOUS, ("offload_train",)
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in needs)
    loop = Loop(
        rollmux,
        name=str(get(args, "wandb_group") or "slime"),
        shape=shape,
        stays=""
        if all(getattr(args, name) for name in needs)
        else f"slime takes its state off the GPUs only with {flags}",
        ahead=0,
    )
    loop.begin()
    return theirs.create_placement_groups(args)


def create_rollout_manager(args: Any, pg: Any) -> Any:
    """slime's, with the stand-in in the manager's place."""
    loop = Loop.begun("create_placement_groups from rollmuxd_hooks.slime")
    manager, *rest = theirs.create_rollout_manager(args, pg)
    return (Manager(manager, loop), *rest)


def create_training_models(args: Any, pgs: Any, rollout_manager: Any, **more: Any) -> Any:
    """slime's, with brackets around the groups' methods."""
    loop = Loop.begun("create_placement_groups from rollmuxd_hooks.slime")
    groups = theirs.create_training_models(args, pgs, rollout_manager.handle, **more)
    for group in groups:
        if group is None:
            continue
        if loop.asynchronous:
            group.async_train = functools.partial(_train, loop, group.async_train)
        else:
            around(group, "async_train", before=loop.train)
        group.update_weights = functools.partial(_send, loop, group.update_weights)
        around(group, "save_model", within=loop.saving)
        if hasattr(group, "create"):  # with --release-train trainers are made again for each step
            around(group, "create", before=loop.train)
    return groups


def _train(loop: Loop, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Train to the end, in a slot: what the driver does next is to wait for its rollout."""
    loop.train()
    answers = theirs(*args, **kwargs)
    ray.wait(answers, num_returns=len(answers))
    loop.rest()
    return answers


def _send(loop: Loop, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with loop.ending_with_an_error():
        return loop.send(lambda: theirs(*args, **kwargs))


class Manager:
    """Stands for the handle of slime's ``RolloutManager``: what is called of it is called in its phase."""

    def __init__(self, handle: Any, loop: Loop) -> None:
        self.handle = handle
        self._loop = loop
        #: whether its engines are on the GPUs, as the loop has asked
        self._loaded = False
        #: whether a rollout was asked for
        self._begun = False
        if not loop.resident and not loop.asynchronous:
            loop.parked_by(self._park, load=self._load, pool=loop.rollout_pool)

    def __getattr__(self, name: str) -> Any:
        brackets: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "generate": self._generating,
            "eval": self._loop.evaluating,
            "onload": self._loading,
            "onload_weights": self._loading,
            "onload_kv": self._loading,
            "offload": self._offloading,
        }
        if self._loop.asynchronous:
            brackets = {"generate": self._running_on, "eval": self._loop.evaluating}
        brackets["dispose"] = self._loop.to_its_end
        method = getattr(self.handle, name)
        waits = name != "generate" or not self._loop.asynchronous
        return _Call(method, brackets[name], waits) if name in brackets else method

    def _generating(self) -> AbstractContextManager[Any]:
        self._loop.rollout()
        self._loaded = True
        return nullcontext()

    def _running_on(self) -> AbstractContextManager[Any]:
        """The first rollout is waited for at once; a later one while this step trains."""
        if not self._begun:
            self._loop.turns.leave()
        self._begun = True
        return nullcontext()

    def _loading(self) -> AbstractContextManager[Any]:
        self._loop.sync()
        self._loaded = True
        return nullcontext()

    def _offloading(self) -> AbstractContextManager[Any]:
        self._loaded = False
        return nullcontext()

    def _park(self) -> None:
        if self._loaded:
            ray.get(self.handle.offload.remote())

    def _load(self) -> None:
        if self._loaded:
            ray.get(self.handle.onload.remote())


class _Call(NamedTuple):
    """A method of the handle. Its ``remote`` returns once the work is done, where the driver would wait for it anyway.

    ``waits``: it would.
    """

    method: Any
    within: Callable[[], AbstractContextManager[Any]]
    waits: bool

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        with self.within():
            answer = self.method.remote(*args, **kwargs)
            if self.waits:
                ray.wait([answer])
        return answer


def waits_for_rollouts(source: str) -> bool:
    """Whether a driver waits for each rollout where it asks for it: ``ray.get(manager.generate.remote(...))``."""
    tree = ast.parse(source)
    waited = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ray.get"
        for argument in node.args
    }
    asked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".generate.remote")
    ]
    return all(id(node) in waited for node in asked)


def _source_of_main() -> str:
    path = getattr(sys.modules["__main__"], "__file__", None)
    return Path(path).read_text(encoding="utf-8") if path and Path(path).suffix == ".py" else ""
