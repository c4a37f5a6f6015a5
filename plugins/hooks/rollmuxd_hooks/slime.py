"""slime: in the ``train.py`` of one's own, ``from rollmuxd_hooks.slime import`` the three that make what it drives.

``create_placement_groups`` begins the job, and ``dispose`` of the rollout manager ends it. The manager is a handle of
Ray, so a stand-in goes to the loop in its place; groups of trainers are objects, with brackets around their methods.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import ray

from rollmuxd_hooks.contract import SLIME
from rollmuxd_hooks.installed import look_at
from rollmuxd_hooks.loop import Loop, Shape, around, get, refuse

look_at(SLIME, "slime")

from slime.ray import placement_group as theirs  # noqa: E402

__all__ = ["create_placement_groups", "create_rollout_manager", "create_training_models"]

#: of this process: its driver makes one run
_run: dict[str, Loop] = {}


def _loop() -> Loop:
    if "loop" not in _run:
        raise RuntimeError("nobody has begun the job: import create_placement_groups from rollmuxd_hooks.slime too")
    return _run["loop"]


def create_placement_groups(args: Any, *, rollmux: Mapping[str, Any] | None = None) -> Any:
    """slime's, once the job has its place. ``rollmux``: keywords of :func:`rollmuxd.job`."""
    if not waits_for_rollouts(_source_of_main()):
        raise refuse("this driver goes on while rollout_manager.generate.remote(...) runs", "use slime's train.py")
    loop = Loop(
        rollmux,
        name=str(get(args, "wandb_group") or "slime"),
        shape=Shape.ONE_POOL if args.colocate else Shape.TWO_POOLS,
        stays=""
        if args.offload_train and args.offload_rollout
        else "slime takes engines and models off the GPUs only with --offload-rollout and --offload-train",
    )
    loop.begin()
    _run["loop"] = loop
    return theirs.create_placement_groups(args)


def create_rollout_manager(args: Any, pg: Any) -> Any:
    """slime's, with the stand-in in the manager's place."""
    loop = _loop()
    manager, *rest = theirs.create_rollout_manager(args, pg)
    return (Manager(manager, loop), *rest)


def create_training_models(args: Any, pgs: Any, rollout_manager: Any, **more: Any) -> Any:
    """slime's, with brackets around the groups' methods."""
    loop = _loop()
    groups = theirs.create_training_models(args, pgs, rollout_manager.handle, **more)
    for group in groups:
        if group is None:
            continue
        around(group, "async_train", before=loop.train)
        around(group, "update_weights", before=loop.sync)
        around(group, "save_model", within=loop.saving)
        if hasattr(group, "create"):  # with --release-train trainers are made anew for each step
            around(group, "create", before=loop.train)
    return groups


class Manager:
    """Stands for the handle of slime's ``RolloutManager``: what is called of it is called in its phase."""

    def __init__(self, handle: Any, loop: Loop) -> None:
        self.handle = handle
        self._loop = loop
        #: whether its engines are on the GPUs, as the loop has asked
        self._loaded = False
        if not loop.resident:
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
        method = getattr(self.handle, name)
        if name == "dispose":
            return _Call(method, nullcontext, self._loop.end)
        return _Call(method, brackets[name]) if name in brackets else method

    def _generating(self) -> AbstractContextManager[Any]:
        self._loop.rollout()
        self._loaded = True
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


class _Call:
    """A method of the handle, whose ``remote`` returns once the work is done: the driver would wait for it anyway."""

    def __init__(
        self, method: Any, within: Callable[[], AbstractContextManager[Any]], after: Callable[[], Any] = lambda: None
    ) -> None:
        self._method = method
        self._within = within
        self._after = after

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        with self._within():
            answer = self._method.remote(*args, **kwargs)
            ray.wait([answer])
        self._after()
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
