"""Where the phases of a ``trl.GRPOTrainer`` begin and end.

    from rollmuxd_hook_trl import GRPOTrainer          # was: from trl import GRPOTrainer
    GRPOTrainer(..., rollmux=dict(name="math-7b", slo=2.0))

- ``init``: the constructor, and the set-up of ``train()`` (a checkpoint is loaded) until the first phase of the cycle.
- ``rollout``: generation, in TRL's ``_generate``: all turns of it, tools and ``rollout_func`` included.
- ``train``: from the first need for the trainer's GPUs (log-probabilities, a reward model, the loss) until the next
  rollout. It includes all steps on what was generated, the optimizer, logging and saving. Reward functions that are
  plain functions run before it, in a time of the job's own, unless log-probabilities come first.
- ``sync`` (with a vLLM server): the weights on their way to it, which takes both pools. With a mover
  (``rollmux=dict(weights=...)``) there is no such phase: they travel while no GPU is held.
- Evaluation has ``eval``, and saving ``save``, where the job declares these (``rollmux=dict(side=...)``). Else both are
  within ``train``; with a vLLM server evaluation has ``sync``, since it generates and computes losses.

One is left before the next begins, also where TRL nests them: generation is within its training step. What evaluates,
saves or computes outside of these methods (a callback with a forward pass in ``on_step_end``) is within ``train``.
"""

import contextlib
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import trl

import rollmuxd
from rollmuxd.client import calls
from rollmuxd.client.registration import registration
from rollmuxd.client.retry import persist
from rollmuxd.client.sync import Daemon
from rollmuxd_channel.torch_state import TorchState
from rollmuxd_hook_kit.contract import check_class, look_at
from rollmuxd_hook_kit.ranks import settle, store
from rollmuxd_hook_kit.turns import Mover, Turns, check_settings, job_name, with_sides
from rollmuxd_hook_trl.contract import TRL

look_at(TRL)


#: what a mixin is mixed into, to a type checker
_Trainer: Any = object


class Sharing(_Trainer):  # type: ignore[misc]
    """Mixin for a ``GRPOTrainer``, to come first: ``class Mine(Sharing, MyGRPOTrainer)``.

    ``rollmux``: the keywords of :func:`rollmuxd.job`, all optional, and

    - ``name``: default: the job that `rollmuxd run` has started this for, else ``run_name``, or the last part of
      ``output_dir``;
    - ``parking``: whether model and optimizer are moved to host memory while another job has the GPUs (default: where
      they are on an accelerator);
    - ``communicators``: whether NCCL's give back what they keep there meanwhile ("suspend"), or not ("keep", the
      default);
    - ``weights``: a :class:`~rollmuxd_hook_kit.turns.Mover` that brings weights to the server, in place of TRL's
      collective over both pools.

    Raises TypeError and ValueError for settings that cannot be, :class:`UnknownTrl` for a class that cannot.
    """

    #: rollouts run all the time, on GPUs of the run's own
    _asynchronous = False

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if issubclass(cls, trl.GRPOTrainer):
            check_class(TRL, cls, Sharing, trl.GRPOTrainer)

    def __init__(self, *args: Any, rollmux: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        config = inspect.signature(super().__init__).bind(*args, **kwargs).arguments.get("args")
        if config is None:
            raise TypeError("give the trainer args=...Config(...): its phases and its name follow from it")
        #: a server of its own generates: rollout and training are on different GPUs
        self._has_server = not self._asynchronous and config.use_vllm and config.vllm_mode == "server"
        self._on_cpu = config.device.type == "cpu"
        settings = dict(rollmux or {})
        side = settings.get("side") or {}
        #: brings the weights to the server while no GPU is held; None: TRL sends them, which takes both pools
        self._mover: Mover | None = settings.pop("weights", None)
        if self._mover is not None and not self._has_server:
            raise ValueError("rollmux=dict(weights=...): there is no server that weights go to; leave it out")
        alone = "eval" in side or self._mover is not None
        self._eval_phase = "eval" if alone else "sync" if self._has_server else "train"
        self._save_phase = "save" if "save" in side else "train"
        self._generating = False
        #: the trainer's GPUs were needed since the last rollout; and needed before its rewards, in the cycle before
        self._computed = self._computes_first = False
        self._parking: bool = settings.pop("parking", not self._on_cpu)
        communicators = settings.pop("communicators", "keep")
        gateway = settings.pop("gateway", "")
        shape = "asynchronous" if self._asynchronous else "server" if self._has_server else "one pool"
        shares = self._parking or not self._on_cpu
        settings = _job_settings(settings, config, self._mover, shape=shape, shares=shares)
        check_settings(settings, gateway=gateway)
        self._job = rollmuxd.job(**settings)
        if self._parking:
            _check_parking(config)
            TorchState(
                model=lambda: self._part("model_wrapped"),  # (FSDP's outermost one knows what it has gathered)
                optimizer=lambda: self._part("optimizer"),
                others=lambda: [self._part("ref_model"), self._part("reward_funcs"), self._part("_buffered_inputs")],
                communicators=communicators,
            ).attach(self._job, pool="train")
        self._turns = Turns(self._job, settle, gateway=gateway)
        self._turns.start()
        with self._turns.ending_with_an_error():
            _check_joined(self._job, settings)
            self._turns.go("init")
            super().__init__(*args, **kwargs)
            self._watch_sync()
            self._turns.leave()

    # ---- the cycle ---------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> Any:
        if not (self._turns.on and self.model.training):
            return super()._generate(prompts)
        if not self._sync_is_due():
            self._turns.go("rollout")
        self._generating = True
        try:
            generated = super()._generate(prompts)
        finally:
            self._generating = False
        if self._turns.slot is not None:
            completions = generated[1]
            self._turns.slot.measure(sequences=len(completions), tokens=sum(len(one) for one in completions))
        self._computed = False
        # Images go to the GPU at once. If no reward function runs before the trainer's GPUs are needed, a later request
        # gains nothing: one call releases the rollout and asks for train.
        if self._is_vlm or self._computes_first:
            self._turns.go("train")
        else:
            self._turns.leave()
        return generated

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self._training()
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(function, torch.nn.Module) for function in self.reward_funcs):
            self._training()
        if self._turns.on and self.model.training:
            self._computes_first = self._computed
        return super()._calculate_rewards(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, in a slot for ``train``."""
        self._training()
        return super().compute_loss(*args, **kwargs)

    def _training(self) -> None:
        if self._turns.on and self.model.training:
            self._computed = True
            self._turns.go("train")

    def _sync_is_due(self) -> bool:
        return self._has_server and self.state.global_step != self._last_loaded_step

    def _watch_sync(self) -> None:
        if not self._has_server:
            return
        send = self.vllm_generation.sync_weights

        mover = self._mover

        def sync_weights(*args: Any, **kwargs: Any) -> Any:
            if not self._generating:
                with self._turns.within(self._eval_phase, or_in=("init", "eval")):
                    if mover is None:
                        return send(*args, **kwargs)
                    mover.publish(self._turns.fence)
                    mover.wait()
                    return mover.load()
            if mover is not None:
                self._turns.bring(mover)
                return mover.load()
            self._turns.go("sync")
            sent = send(*args, **kwargs)
            self._turns.go("rollout")
            return sent

        self.vllm_generation.sync_weights = sync_weights

    # ---- around it ---------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, as a job; it ends with this. A model that was parked is on the CPU afterwards, to be saved from."""
        if not self._turns.on and not self._job.alone:
            self._turns.start()
            self._turns.go("init")
            self.model.to(self.args.device)
        self._turns.go("init")
        try:
            trained = super().train(*args, **kwargs)
        except BaseException as error:
            self._hand_back()
            self._turns.end(error)
            raise
        self._turns.go("train")
        self._hand_back()
        self._turns.end()
        return trained

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        super()._load_optimizer_and_scheduler(*args, **kwargs)
        # On the CPU what torch has read from a file lies in memory that is not its own, which cannot be parked.
        for state in self._part("optimizer").state.values() if self._parking and self.optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not value.untyped_storage().resizable():
                    state[key] = value.clone()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, in a slot for all that it needs."""
        with self._turns.within(self._eval_phase):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, in a slot for all that it needs."""
        with self._turns.within(self._eval_phase):
            return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, in a slot for it, or one that is held anyway."""
        with self._turns.within(self._save_phase, or_in=("init", "sync", "eval")):
            return super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self._turns.within(self._save_phase, or_in=("init", "sync", "eval")):
            return super()._save_checkpoint(*args, **kwargs)

    # ---- what is parked ----------------------------------------------------------------------------------------------

    def _part(self, name: str) -> Any:
        """One part of what the trainer keeps on its GPUs, as it is now; nothing, once it was handed back."""
        part = getattr(self, name, None) if self._turns.on else None
        if name == "reward_funcs":
            return [function for function in part or () if isinstance(function, torch.nn.Module)]
        # Accelerate's wrapper has no state of its own.
        return getattr(part, "optimizer", part) if name == "optimizer" else part

    def _hand_back(self) -> None:
        """Take what is parked with the job out of its hands, while it is loaded: the job's end would discard it."""
        if not (self._parking and self._turns.current is not None) or self._on_cpu:
            return
        # (After an error of the device nothing can be taken from it.)
        with contextlib.suppress(RuntimeError):
            self.model.to("cpu")
            for state in self._part("optimizer").state.values() if self.optimizer is not None else ():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        state[key] = value.to("cpu")
            self._buffered_inputs = None
            torch.cuda.empty_cache()


class GRPOTrainer(Sharing, trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's, taking part in rollmuxd: see :class:`Sharing`."""


def _job_settings(
    given: Mapping[str, Any], config: Any, mover: Mover | None, *, shape: str, shares: bool
) -> dict[str, Any]:
    """The keywords of :func:`rollmuxd.job` for this shape of TRL. ``shares``: there is state that others wait for."""
    name = config.run_name or Path(config.output_dir or "grpo").name
    settings = {"name": job_name(name, "grpo"), "train": {"nodes": 1}, **given}
    if shape == "asynchronous":
        if "rollout" in settings:
            raise ValueError("rollmux=dict(rollout=...): this run generates on GPUs of its own, so give train= only")
        settings = {"phases": {"train": "train"}, "asynchronous": True, **settings}
    elif shape == "server":
        settings.setdefault("rollout", {"nodes": 1})
        if mover is None:
            settings.setdefault("phases", {"rollout": "rollout", "train": "train", "sync": ["rollout", "train"]})
        _check_levels(settings["rollout"], config, "sync" if mover is None else "eval")
    elif "rollout" not in settings:
        settings.setdefault("phases", {"rollout": "train", "train": "train"})
    elif shares:
        raise ValueError(
            "rollmux=dict(rollout=...): without a vLLM server the trainer generates on the GPUs that it trains on, so "
            "give it those of train= only; for GPUs of its own, generation needs use_vllm=True, vllm_mode='server'"
        )
    settings = with_sides(settings, mover)
    if config.world_size > 1:
        settings = {"ranks": config.world_size, "rank": config.process_index, "store": store(), **settings}
    return settings


def _check_parking(config: Any) -> None:
    vllm = getattr(config, "use_vllm", False)  # an asynchronous run always has a server
    if vllm and config.vllm_mode == "colocate" and not config.vllm_enable_sleep_mode:
        raise ValueError(
            "vLLM in the trainer's process keeps its GPU memory between rollouts, where others could not use it: say "
            "vllm_enable_sleep_mode=True"
        )
    if config.deepspeed or getattr(config, "deepspeed_plugin", None) is not None:
        raise ValueError(
            "DeepSpeed keeps weights and optimizer in buffers of its own, which cannot be parked: train with FSDP, or "
            "take the hook out again: from trl import GRPOTrainer"
        )


def _check_levels(rollout: Mapping[str, Any], config: Any, sends: str) -> None:
    """A server that drops its weights in its sleep must be sent them before each rollout, and not drop them after that.

    ``sends``: a phase that may send them before a rollout that does not.
    """
    options = rollout.get("options") or {}
    if rollout.get("driver") != "vllm" or all(options.get(key, 1) == 1 for key in ("level", "level.rollout")):
        return
    sent_each_time = config.steps_per_generation * config.num_iterations % config.gradient_accumulation_steps == 0
    if options.get(f"level.{sends}") != 1 or not sent_each_time:
        raise ValueError(
            "rollmux=dict(rollout=dict(options=...)): at level 2 the server drops its weights, and TRL sends them only "
            f"after an optimizer step: say level 1, or {{'level': 2, 'level.{sends}': 1}} where each rollout follows a "
            "step (steps_per_generation * num_iterations is a multiple of gradient_accumulation_steps)"
        )


def _check_joined(job: rollmuxd.Job, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if `rollmuxd run` has registered other phases than this run has: whose GPUs would it use?"""
    if job.alone or settings.get("rank") or os.environ.get("ROLLMUX_JOB") != job.name:
        return
    pools = {pool: settings[pool] for pool in ("rollout", "train") if settings.get(pool) is not None}
    body = registration(job.name, pools={**pools, **(settings.get("pools") or {})}, phases=settings["phases"])
    needed = {phase.name: phase.pools for phase in body.phases}
    with Daemon(settings.get("url"), settings.get("api_key")) as daemon:
        registered = daemon.run(persist(calls.job(job.id))).cycle
    if registered != needed:
        says = ", ".join(f"{phase} = {json.dumps(pools)}" for phase, pools in needed.items())
        raise ValueError(
            f"job {job.name} was registered with the phases {json.dumps(registered)}, and this run has others: say in "
            f"its file phases = {{{says}}}, and what it wants of {' and of '.join(body.wants)}"
        )
