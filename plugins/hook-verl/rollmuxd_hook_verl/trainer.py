"""Where the phases of verl's PPO trainers begin and end: of ``RayPPOTrainer``, of v1's, and of one_step_off_policy's.

    export VERL_USE_EXTERNAL_MODULES=rollmuxd_hook_verl
    python -m verl.trainer.main_ppo ... +rollmux.name=math-7b +rollmux.slo=2.0

- ``init``: workers and engines are made, a checkpoint is loaded, the engine gets its first weights.
- ``sync``: the weights on their way to the engine, which wakes for it.
- ``rollout``: from the request to generate until the engine sleeps.
- ``train``: from the first work on the trainer's GPUs after that (a reward model beside it, log-probabilities, values)
  through the updates of critic and actor. The advantage is computed by the controller, within it.
- Validation has ``eval``, and saving ``save``, where the job declares these (``+rollmux.side.eval.seconds=120``). Else
  validation is within ``sync``, with whose weights it generates, and saving within ``train``.

Trainer and engine of these trainers are on the same GPUs, so all phases are of one pool, ``train``. One is left before
the next begins. What the controller does between them (rewards, metrics, logging) is a time of the job's own.

With ``trainer_mode=separate_async`` the engines run all the time, on GPUs of the run's own. Its job is asynchronous: it
has the phase ``train`` only, from the first work on a complete batch until the weights are at the engines. With
``parameter_sync_step`` > 1 the slot is also left after each other mini-batch. Validation needs no slot.

``OneStepOffRayTrainer`` asks for its slot when a batch is complete. It sends the weights of the step before, begins the
next batch with them, and leaves the slot when the actor is updated.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import rollmuxd
from rollmuxd_hook_kit.contract import check, check_class, facts_under, release
from rollmuxd_hook_kit.turns import Turns, around, check_settings, job_name
from rollmuxd_hook_verl.contract import ONE_STEP, PPO_TRAINER, TRAINING, V1_TRAINER, VERL
from rollmuxd_hook_verl.residency import Engine, check_offload

#: In this order: the next job finds an engine that sleeps, and no weights are sent twice.
_PHASES = ("sync", "rollout", "train")

#: what a mixin is mixed into, to a type checker
_Trainer: Any = object


def share(module: ModuleType) -> None:
    """Have the trainer of one of verl's modules take part. Raises :class:`UnknownVerl`; then nothing was changed."""
    import verl

    root = Path(verl.__file__).parents[1]
    check(VERL, verl.__version__, facts_under(root, VERL))
    known, mixin = next(
        (known, mixin)
        for known, mixin in ((ONE_STEP, SharingOneStep), (PPO_TRAINER, SharingPPO), (V1_TRAINER, SharingV1))
        if hasattr(module, known.name)
    )
    if release(verl.__version__) < known.since:
        return  # made from one that takes part, it is refused as an unknown one
    theirs = getattr(module, known.name)
    same = {name: getattr(theirs, name) for name in ("__module__", "__qualname__", "__doc__")}
    setattr(module, known.name, type(theirs)(known.name, (mixin, theirs), {**same, "theirs": theirs}))


class Sharing(_Trainer):  # type: ignore[misc]
    """What the trainers have in common."""

    #: verl's own class
    theirs: type
    #: how many batches an asynchronous run begins beyond the one that it trains on
    ahead = 1

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Refuse a class that hides what the hook looks at, also one whose constructor never calls this one's."""
        # (Of an actor's class Ray derives another, to make actors from: that is no trainer.)
        if not any(kind.__module__ == "ray.actor" for kind in cls.__mro__):
            check_class(VERL, cls, Sharing, cls.theirs)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made(super().__init__, *args, **kwargs)

    def _made(self, construct: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        config = inspect.signature(construct).bind(*args, **kwargs).arguments["config"]
        #: engines run all the time, on GPUs of their own
        self._asynchronous = self._is_asynchronous(config)
        given = _given(config)
        side = given.get("side") or {}
        self._eval_phase = "eval" if "eval" in side else "sync"
        self._save_phase = "save" if "save" in side else "train"
        parking = given.pop("parking", config.trainer.device != "cpu")
        gateway = given.pop("gateway", "")
        settings = _job_settings(given, config, ahead=self.ahead if self._asynchronous else None)
        check_settings(settings, gateway=gateway)
        construct(*args, **kwargs)
        if parking:
            check_offload(
                config, reference=self.use_reference_policy, critic=self.use_critic, engine=not self._asynchronous
            )
        self._job = rollmuxd.job(**settings)
        self._engine = Engine(lambda: self.global_steps)
        if parking and not self._asynchronous:
            self._engine.attach(self._job, pool="train")
        # What a worker has been asked to do is through when the call returns.
        self._turns = Turns(self._job, settle=lambda: None, gateway=gateway)

    def _is_asynchronous(self, config: Any) -> bool:
        return False

    # ---- life --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._turns.start()
        self._turns.go("init")

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """verl's; the job ends with it."""
        with self._turns.ending_with_an_error():
            trained = super().fit(*args, **kwargs)
        self._turns.end()
        return trained

    def _watch_engine(self) -> None:
        """Have what the trainer asks of its engines, through verl's manager of them, begin and end phases."""
        manager = self.checkpoint_manager
        self._engine.watch(manager)
        around(
            manager,
            "update_weights",
            within=lambda: self._turns.within("sync", or_in=("init", self._eval_phase)),
            after=lambda: self._leave("init"),  # the last of it
        )
        around(manager, "sleep_replicas", after=lambda: self._leave("rollout"))

    def _leave(self, phase: str) -> None:
        if self._turns.current == phase:
            self._turns.leave()

    # ---- train -------------------------------------------------------------------------------------------------------

    def _training(self) -> None:
        # (A reward model that stands beside the trainer scores validations too.)
        if self._turns.current != self._eval_phase:
            self._turns.go("train")

    # ---- around it ---------------------------------------------------------------------------------------------------

    def _validate(self, *args: Any, **kwargs: Any) -> Any:
        if self._asynchronous:  # on the engines' GPUs
            return super()._validate(*args, **kwargs)
        with self._turns.within(self._eval_phase, or_in=()):
            return super()._validate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self._turns.within(self._save_phase, or_in=()):
            return super()._save_checkpoint(*args, **kwargs)


def _in_training(name: str) -> Callable[..., Any]:
    """One of verl's methods, in a slot for ``train``."""

    def method(self: Sharing, *args: Any, **kwargs: Any) -> Any:
        self._training()
        return getattr(super(Sharing, self), name)(*args, **kwargs)

    return method


for _name in TRAINING:
    setattr(Sharing, _name, _in_training(_name))


class SharingPPO(Sharing):
    """Mixin for ``RayPPOTrainer``."""

    def init_workers(self, *args: Any, **kwargs: Any) -> Any:
        """verl's, with the job's GPUs for itself."""
        with self._turns.ending_with_an_error():
            self._begin()
            made = super().init_workers(*args, **kwargs)
            self._watch_engine()
            self._watch_generation()
            return made

    def _watch_generation(self) -> None:
        generate = self.async_rollout_manager.generate_sequences

        def generate_sequences(*args: Any, **kwargs: Any) -> Any:
            if self._turns.current != self._eval_phase:
                self._turns.go("rollout")
            generated = generate(*args, **kwargs)
            if self._turns.current == "rollout" and self._turns.slot is not None:
                answers = generated.batch["response_mask"]
                self._turns.slot.measure(sequences=len(answers), tokens=float(answers.sum()))
            return generated

        self.async_rollout_manager.generate_sequences = generate_sequences


class SharingV1(Sharing):
    """Mixin for the trainers of v1."""

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """verl's, with the job's GPUs for itself."""
        with self._turns.ending_with_an_error():
            self._begin()
            made = super().init(*args, **kwargs)
            if self._asynchronous:
                self._watch_weights()
                self._turns.leave()
            return made

    def _setup(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._setup(*args, **kwargs)
        if not self._asynchronous:
            self._watch_engine()
        return made

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """verl's, which begins with the request to generate, or with the wait for a batch."""
        if not self._asynchronous:
            self._turns.go("rollout")
        return super().step(*args, **kwargs)

    def _step_once(self, *args: Any, **kwargs: Any) -> Any:
        batch = super()._step_once(*args, **kwargs)
        if self._asynchronous and self.local_trigger_step < self.parameter_sync_step - 1:
            self._turns.leave()  # what comes next is the wait for a mini-batch, and no weights
        return batch

    def _balance_batch(self, *args: Any, **kwargs: Any) -> Any:
        if self._asynchronous:  # it is the first thing after a batch is complete; then workers copy their model
            self._training()
        return super()._balance_batch(*args, **kwargs)

    def _watch_weights(self) -> None:
        """Have a slot end when an asynchronous run's weights are at its engines."""
        manager = self.standalone_checkpoint_manager
        around(manager, "update_weights", before=lambda: self._turns.go("train"), after=self._turns.leave)

    def _is_asynchronous(self, config: Any) -> bool:
        if not _is_separate(config):
            return False
        if not hasattr(type(self), "_enable_hybrid_replicas"):
            raise ValueError(
                "trainer.v1.trainer_mode=separate_async: this release wakes an engine on the trainer's GPUs whatever "
                "actor_rollout_ref.hybrid_engine says; take verl 0.9.1"
            )
        return True


class SharingOneStep(Sharing):
    """Mixin for ``OneStepOffRayTrainer``, which is made from a ``RayPPOTrainer`` that takes part."""

    ahead = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made(super().__init__, *args, **kwargs)  # (verl's calls no other constructor)

    def _is_asynchronous(self, config: Any) -> bool:
        return True

    def init_workers(self, *args: Any, **kwargs: Any) -> Any:
        """verl's, with the job's GPUs for itself."""
        with self._turns.ending_with_an_error():
            self._begin()
            return super().init_workers(*args, **kwargs)

    async def fit(self, *args: Any, **kwargs: Any) -> Any:
        """verl's; the job ends with it."""
        with self._turns.ending_with_an_error():
            trained = await super().fit(*args, **kwargs)
        self._turns.end()
        return trained

    def _fit_update_weights(self, *args: Any, **kwargs: Any) -> Any:
        """At first in ``init``; then it is the first thing after a batch, and no other batch is being made."""
        first = self._turns.current == "init"
        if not first:
            self._turns.go("train")
        sent = super()._fit_update_weights(*args, **kwargs)
        if first:
            self._turns.leave()
        return sent

    def _fit_update_actor(self, *args: Any, **kwargs: Any) -> Any:
        batch = super()._fit_update_actor(*args, **kwargs)
        self._turns.leave()
        return batch


def _is_separate(config: Any) -> bool:
    """Whether the engines of v1 are on GPUs of their own. Raises ValueError for modes that cannot share."""
    mode = config.trainer.get("v1", {}).get("trainer_mode", "sync") if config.trainer.get("use_v1", False) else "sync"
    if mode == "sync":
        return False
    instead = f"or take the hook out again: {VERL.take_out}"
    if mode != "separate_async":
        raise ValueError(
            f"trainer.v1.trainer_mode={mode}: engines and trainer use the same GPUs all the time, so no other job "
            f"could have them. Say trainer.v1.trainer_mode=sync or separate_async, {instead}"
        )
    if config.actor_rollout_ref.get("hybrid_engine", True):
        raise ValueError(
            f"trainer.v1.trainer_mode={mode} with actor_rollout_ref.hybrid_engine=True: an engine of this run would "
            "wake on the trainer's GPUs, where another job may compute. Say actor_rollout_ref.hybrid_engine=False, "
            f"{instead}"
        )
    return True


def _given(config: Any) -> dict[str, Any]:
    """What stands under ``rollmux`` in the run's configuration."""
    from omegaconf import OmegaConf

    given = OmegaConf.select(config, "rollmux")
    plain = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
    if plain is not None and not isinstance(plain, dict):
        raise TypeError(f"rollmux={plain!r}: what a run says to rollmuxd is a mapping: +rollmux.name=math-7b")
    return {str(key): value for key, value in (plain or {}).items()}


def _job_settings(given: Mapping[str, Any], config: Any, *, ahead: int | None) -> dict[str, Any]:
    """The keywords of :func:`rollmuxd.job` for this run; ``ahead`` is an asynchronous one's."""
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    phases = ("train",) if ahead is not None else _PHASES
    settings = {
        "name": job_name(str(config.trainer.get("experiment_name") or "verl"), "verl"),
        "train": {},
        "phases": dict.fromkeys(phases, "train"),
        **given,
    }
    if ahead is not None:
        said = settings.get("asynchronous")
        settings["asynchronous"] = {"ahead": ahead, **(said if isinstance(said, Mapping) else {})}
    if "rollout" in settings or "pools" in settings:
        raise ValueError(
            "rollmux.rollout: this run shares the GPUs that it trains on, so give it those of rollmux.train"
        )
    if not {"nodes", "gpus", "named"} & settings["train"].keys():
        settings["train"] = {"gpus": gpus, **settings["train"]}
    if missing := [phase for phase in phases if phase not in settings["phases"]]:
        raise ValueError(
            f"rollmux.phases: there is no {' and no '.join(missing)} among {', '.join(settings['phases'])}"
        )
    return settings
