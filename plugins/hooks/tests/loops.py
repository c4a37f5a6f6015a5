"""Drives the loops of frameworks in one process, with nothing behind them: ``python loops.py FRAMEWORK ...``.

The loops of OpenRLHF, SkyRL, AReaL and prime-rl are those of real releases; what they import besides is made up
(``made_up.py``), and their workers write down what they are told, and in which phase. Of slime, ROLL and NeMo-RL, which
are on no package index, the folder ``standins`` has loops of our own with the same methods, which the hooks take for
them (slime's driver too can be a released one). Without
``ROLLMUX_URL`` the daemon is a fake.

Prints one JSON list: each thing that was done to GPUs, the phase and the slot that were held, and when.
"""

import asyncio
import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import os
import runpy
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

from made_up import FRAMEWORKS, Anything, Config, MadeUp, Ref, install, made_up_ray

from rollmuxd.testing import fake_daemon

#: rounds of hashing for each thing that is done (10,000 take some milliseconds)
WORK = int(os.environ.get("LOOPS_WORK", "1"))
#: without a real daemon
FAKE = os.environ.get("ROLLMUX_URL") is None
STANDINS = Path(__file__).with_name("standins")

#: what fails in a slot for training
FAILS = os.environ.get("LOOPS_FAILS")

#: what was done, in which phase and slot, and when by the monotonic clock
DONE: list[tuple[str, str | None, str | None, float]] = []
#: the turns of the job
TURNS = []
#: the fake daemon
DAEMON = []
#: batches that asynchronous rollouts have made
MADE = threading.Semaphore(0)
#: how many batches more each request for training waits for, as if another job held the GPUs until then
HOLDS_UP = []


def done(what):
    """Something is done that needs GPUs."""
    turns = TURNS[-1] if TURNS else None
    held = turns.slot.id if turns is not None and turns.slot is not None else None
    DONE.append((what, turns.current if turns is not None else None, held, time.monotonic()))
    print(f"done: {what}", file=sys.stderr)
    if what == FAILS and DONE[-1][1] == "train":
        raise ConnectionError(f"no answer to {what}")
    hashlib.pbkdf2_hmac("sha256", what.encode(), b"work", WORK)


def watched():
    """Know the turns of the job that a hook makes."""
    from rollmuxd_hooks import loop

    class Watched(loop.Turns):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            TURNS.append(self)

        def go(self, phase):
            for _ in range(HOLDS_UP.pop(0) if HOLDS_UP and phase == "train" != self.current else 0):
                assert MADE.acquire(timeout=60), "no batch is made while the loop waits for a slot"
            super().go(phase)

    loop.Turns = Watched


class Between:
    """A mover that writes down what it does; ``weights = "loops:Between"`` in the job's file."""

    expected_s = 1.0

    def publish(self, fence):
        done("mover.publish")

    def wait(self):
        done("mover.wait")

    def load(self):
        done("mover.load")


class Group:
    """Workers of OpenRLHF or SkyRL: what they are told is written down, with their role."""

    def __init__(self, role):
        self.role = role

    def tell(self, what):
        done(f"{self.role}.{what}")
        return [Ref({})]


# ---- OpenRLHF --------------------------------------------------------------------------------------------------------


def openrlhf(version, *more):
    """``train_ppo_ray`` of the release: its arguments, its driver and its trainer."""

    class Workers(Group):
        def __init__(self, nodes, gpus, kind, **_):
            super().__init__(kind if isinstance(kind, str) else "critic")

        def async_init_model_from_pretrained(self, *_, **__):
            return self.tell("load")

        def async_run_method(self, method_name, **_):
            return self.tell(method_name)

        def async_run_method_batch(self, method_name, **_):
            return self.tell(method_name)

        def async_save_model(self):
            return self.tell("save_model")

    class Samples:
        def __init__(self, **_):
            self.left = 3

        def generate_samples(self, **_):
            self.left -= 1
            done("engines.generate")
            return [Anything()], None, 1, self.left == 0

        def generate_eval_samples(self, **_):
            done("engines.generate_eval")
            return []

    class Experiences:
        def __init__(self, actor, *_):
            self.actor = actor

        def make_experience_batch(self, samples):
            self.actor.tell("forward")
            return [Anything()]

    class Loader:
        def __len__(self):
            return 3

        def state_dict(self):
            return {}

    install(
        version,
        ["openrlhf.cli.train_ppo_ray", "openrlhf.trainer.ppo_trainer", "openrlhf.utils.config"],
        openrlhf__utils={"get_strategy": lambda args: SimpleNamespace(args=args, print=lambda *_: None)},
        openrlhf__trainer__ray={"create_vllm_engines": lambda *_, **__: done("engines.start") or [Anything()]},
        openrlhf__trainer__ray__launcher={"RayActorGroup": Workers, "ReferenceModelActor": "ref"},
        openrlhf__trainer__ray__ppo_actor={"PolicyModelActor": "actor"},
        openrlhf__trainer__ray__vllm_engine={"batch_vllm_engine_call": lambda _, what, **__: done(f"engines.{what}")},
        openrlhf__trainer__ppo_utils__samples_generator={"SamplesGenerator": Samples},
        openrlhf__trainer__ppo_utils__experience_maker={"RemoteExperienceMaker": Experiences},
    )
    from rollmuxd_hook_kit.late import when_imported

    def data(module):
        module.prepare_datasets = lambda strategy, tokenizer: (Loader(), Loader(), 3)

    when_imported("openrlhf.trainer.ppo_trainer", data)
    sys.argv = [
        *("train_ppo_ray", "--actor.model_name_or_path", "tiny", "--reward.remote_url", "http://reward"),
        *("--vllm.num_engines", "8", "--train.num_episodes", "1", "--algo.kl.init_coef", "0", "--eval.steps", "2"),
        *("--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "2"),
        *("--ckpt.save_steps", "2", "--eval.dataset", "some", "--logger.logging_steps", "1", *more),
    ]
    runpy.run_module("rollmuxd_hooks.openrlhf", run_name="__main__")


# ---- SkyRL -----------------------------------------------------------------------------------------------------------


def skyrl(version, layout="colocated", *_):
    """The trainer of the release, and its dispatch to workers."""
    made = []
    colocate_all = layout not in ("apart", "fully async")

    class Engines:
        async def sleep(self, **_):
            done("engines.sleep")

        async def wake_up(self, tags=None):
            done(f"engines.wake_up {tags[0]}")

        async def pause_generation(self, **_): ...

        async def resume_generation(self, **_): ...

        def increment_weight_version(self): ...

    class Workers(Group):
        def offload_to_cpu(self, **_):
            done(f"{self.role}.offload")

        def backload_to_gpu(self, **_):
            done(f"{self.role}.backload")

        def async_run_ray_method(self, how, method, *_, **__):
            return self.tell(method)

    class Plain:
        def __init__(self, config):
            self.cfg = config

        def get_trainer(self, cfg):
            return made[0](cfg)

        def _setup_trainer(self):
            done("engines.start")
            trainer = self.get_trainer(self.cfg)
            trainer.build_models(None, None, None)
            return trainer

        def run(self):
            asyncio.run(self._setup_trainer().train())

    sky = "skyrl.backends.skyrl_train.workers.worker_dispatch"
    real = ["skyrl.train.trainer", "skyrl.train.fully_async_trainer", sky]
    install(
        version,
        real if layout == "fully async" else [*real[:1], sky],
        skyrl__train__utils__trainer_utils={"ResumeMode": SimpleNamespace(NONE=None)},
        skyrl__train__config={"SkyRLTrainConfig": SimpleNamespace(from_cli_overrides=lambda _: config(colocate_all))},
        skyrl__train__entrypoints__main_base={"BasePPOExp": Plain},
        skyrl__train__generators__utils={"prepare_generator_input": lambda *_: (Anything(), [])},
    )
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

    from rollmuxd_hooks import skyrl as hook

    class Trainer(hook.RayPPOTrainer):
        def __init__(self, config):
            self.cfg = config
            self.colocate_all = colocate_all
            self.inference_engine_client = Engines()
            self.train_dataloader = [Anything(), Anything()]
            self.eval_dataloader = Anything()
            self.generator = self.tokenizer = self.tracker = Anything()
            self.all_metrics, self.all_timings = {}, {}
            self.global_step, self.total_training_steps = 0, 2
            self.resume_mode = None
            self.ref_model = None
            self._training_control = SimpleNamespace(should_save=False, should_evaluate=False, reset=lambda: None)
            self._ray_gpu_monitor = self._vllm_metrics_scraper = self.trajectory_logger = None
            self._num_training_gpus = 1

        def build_models(self, *_):
            done("models.build")
            self.dispatch = WorkerDispatch(self.cfg, Workers("policy"), inference_engine_client=Engines())

        def init_weight_sync_state(self): ...

        def _fire(self, *_, **__): ...

        async def generate(self, input_batch):
            done("engines.generate")
            return Batch()

        def postprocess_generator_output(self, output, uids, *_):
            done("rewards")
            return output, uids

        def convert_to_training_input(self, *_):
            return Batch()

        def compute_advantages_and_returns(self, data):
            return data

        def fwd_logprobs_values_reward(self, data):
            self.dispatch._ensure_on_gpu("policy", need_optimizer=False)
            done("policy.forward")
            return data

        def train_critic_and_policy(self, data):
            self.dispatch._ensure_on_gpu("policy")
            done("policy.train")
            return {}

        async def eval(self, **_):
            done("engines.generate_eval")
            return {}

        def save_checkpoints(self):
            done("policy.save")

        def _remove_tail_data(self, batch):
            return batch

    class Batch(dict):
        metadata = Anything()

        def __missing__(self, key):
            return [Anything()]

        def pop(self, key, *_):
            return None

        def get(self, key, default=None):
            return default

    if layout == "loop of its own":

        async def train(self):
            done("policy.train")

        Trainer.train = train
    made.append(fully_async(hook, Trainer, Batch) if layout == "fully async" else Trainer)
    if layout == "fully async":

        class Experiment(hook.SharingAsync, Plain):
            """What a user writes."""

        Experiment(config(colocate_all)).run()
        return
    hook.main()


def fully_async(hook, made_up, batch):
    """SkyRL's fully asynchronous trainer; what the other one has made up is made up here too."""
    from skyrl.train import fully_async_trainer as theirs

    same = {name: value for name, value in vars(made_up).items() if inspect.isfunction(value) and name != "train"}

    class Prompts(list):
        def state_dict(self):
            return {}

        load_state_dict = Anything()

    class Trainer(theirs.FullyAsyncRayPPOTrainer):
        __init__ = same["__init__"]

        def _setup_async(self):
            self.mini_batch_size, self.max_staleness_steps, self.num_parallel_generation_workers = 1, 1, 2
            self.sample_full_batch, self.num_steps_per_epoch, self.total_training_steps = False, 3, 3
            prompts = Prompts([{"uid": str(number)}] for number in range(3))
            self.async_train_dataloader = theirs._AsyncDataloader(prompts, 1)
            self._staleness_manager = theirs._AsyncStalenessManager(2, 1, 1)
            self._profiler_start = self._profiler_step = self._profiler_stop = lambda: None

        def build_models(self, *args):
            self._setup_async()
            same["build_models"](self, *args)

        async def _run_generate_for_a_group_loop(self, buffer):
            while (prompts := await self.async_train_dataloader.get_next_non_consumed_data()) is not None:
                await self._staleness_manager.acquire_submission_slot()
                await asyncio.sleep(0)
                done("engines.generate")
                MADE.release()
                await buffer.put(theirs.GeneratedOutputGroup(batch(), prompts[0]["uid"], self.global_step))
                await self._staleness_manager.on_rollout_accepted()

        def convert_generation_group_mini_batch_to_training_input(self, *_):
            return batch()

    for name, function in same.items():
        if name not in vars(Trainer):
            setattr(Trainer, name, function)
    HOLDS_UP.extend((2, 1, 0))  # one more than is to be trained, of three
    return Trainer


def config(colocate_all):
    """What SkyRL's loop asks of its configuration."""
    return Config(
        trainer=Config(
            run_name="sky",
            placement=Config(colocate_all=colocate_all, colocate_policy_ref=False),
            eval_interval=2,
            eval_before_train=False,
            algorithm=Config(use_kl_in_reward=False, dynamic_sampling=Config(type=None)),
            epochs=1,
            dump_data_batch=False,
            ckpt_interval=2,
            hf_save_interval=0,
            update_ref_every_epoch=False,
            max_training_steps=None,
            print_example_interval=0,
            strategy="fsdp",
            policy=Config(model=Config(lora=Config(rank=0))),
        ),
        generator=Config(step_wise_trajectories=False),
    )


# ---- AReaL -----------------------------------------------------------------------------------------------------------


def areal(version, layout="colocated", *_):
    """The trainer's loop of the release; its constructor would start clusters, and is ours."""

    colocated = layout != "apart"
    heavy = {"prepare_batch", "compute_logp", "ppo_update", "update_weights", "onload", "offload"}

    class Engine:
        def __init__(self, role):
            self.role = role

        def __getattr__(self, name):
            def told(*args, **kwargs):
                done(f"{self.role}.{name}")
                return [{}] if name == "prepare_batch" else Anything()

            return told if name in heavy else Anything()

    install(version, ["areal.trainer.rl_trainer"])
    sys.modules["areal.trainer.rl_trainer"] = module = importlib.import_module("areal.trainer.rl_trainer")
    plain = module.PPOTrainer

    def made(self, config):
        self.config = config
        self.actor, self.ref, self.rollout, self.eval_rollout = (
            Engine(role) for role in ("actor", "ref", "rollout", "eval_rollout")
        )
        self.critic = self.teacher = self.data_controller = self.recover_info = None
        self.train_dataloader = [1, 2]
        self.saver = self.weight_update_meta = Anything()
        self._should_offload_rollout = colocated
        self._should_offload_actor = self._should_offload_ref = True
        self._should_offload_critic = self._should_offload_teacher = False
        done("models.build")
        self._apply_initial_offload_policy()

    plain.__init__ = made
    plain._is_actor_rollout_colocated = lambda self, config: colocated
    plain._save_hf = lambda self, **_: done("actor.save")
    plain._evaluate = lambda self, **_: done("eval_rollout.generate")
    plain._save_recover_checkpoint = plain._export_and_commit_stats = plain._save_perf_tracer = lambda self, **_: None
    plain._requires_proxy_workflow = lambda self, workflow: False
    from rollmuxd_hooks.areal import PPOTrainer

    role = SimpleNamespace(offload=True, kl_ctl=0.1, should_compute_prox_logp=lambda: False)
    trainer = PPOTrainer(
        Config(
            experiment_name="math",
            trial_name="1",
            actor=role,
            ref=SimpleNamespace(offload=layout != "stays"),
            critic=None,
            teacher=None,
            memory_profiler=None,
            total_train_epochs=1,
            total_train_steps=None,
        )
    )
    trainer.train(workflow=object())


# ---- prime-rl --------------------------------------------------------------------------------------------------------


def prime_rl(version, *more):
    """The loop of the release's trainer, over a tiny model; batches and the way to the engines are ours."""
    import torch

    class Batch(dict):
        def __missing__(self, key):
            return None if key.endswith("_weights") or key in ("ref_logprobs", "routed_experts") else Anything()

    class Loader:
        def __init__(self, *_, **__):
            self.receiver = SimpleNamespace(wait=self.wait)

        def wait(self):
            done("batch.arrives")
            if "parked" in more:  # another job has the GPUs
                assert DAEMON[-1].result_of(DAEMON[-1].order("park", "train")).ok
                assert {tensor.untyped_storage().nbytes() for tensor in model.parameters()} == {0}
                assert DAEMON[-1].result_of(DAEMON[-1].order("load", "train", warm=True)).ok

        def wait_for_batch(self):
            self.receiver.wait()
            done("ranks.barrier")

        def get_batch(self):
            return [Batch(), Batch()]

    class Weights:
        def broadcast_weights(self, model, step):
            done(f"weights.broadcast {step}")

        def maybe_clean(self, *_): ...

    def forward(*_, **__):
        done("model.forward")
        return {"logprobs": Anything(), "entropy": Anything()}

    def loss(**_):
        return model(torch.ones(2, 4)).square().mean(), {}

    def clean_exit(train):
        def exiting(*args):
            try:
                train(*args)
            except Exception:
                traceback.print_exc()
                sys.exit(1)

        return exiting

    async def nothing(*_, **__): ...

    def progress():
        return SimpleNamespace(step=1, total_tokens=0, total_samples=0)

    def setup_model(*_):
        done("model.build")
        return model

    main = version.startswith("0.8.1")
    digests = []

    def save(*_):
        done("model.save")
        digests.append(hashlib.sha256(model.weight.detach().clone().numpy().tobytes()).hexdigest())

    saved = SimpleNamespace(save=save, maybe_clean=lambda: None, ckpt_dir=None)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    model.config = Anything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: done("optimizer.step"))
    install(
        version,
        ["prime_rl.trainer.rl.train"],
        heavy=("transformers", "datasets", "ring_flash_attn", "torchtitan"),
        prime_rl={"monitors": SimpleNamespace(setup=nothing, log=nothing)},
        prime_rl__trainer__ckpt={
            "Progress": progress,
            "setup_ckpt_managers": lambda *_: (saved, None),
            "setup_ckpt_manager": lambda *_, **__: saved,
        },
        prime_rl__trainer__runs={"Progress": progress, "setup_multi_run_manager": lambda *_: Anything()},
        prime_rl__trainer__parallel_dims={
            "get_parallel_dims": lambda _: Config(cp_enabled=False, fsdp_gradient_divide_factor=1.0)
        },
        prime_rl__trainer__model={"setup_model": setup_model, "forward": forward},
        prime_rl__trainer__optim={"setup_optimizer": lambda *_, **__: (optimizer, None) if main else optimizer},
        prime_rl__trainer__rl__data={"DataLoader": Loader, "FakeDataLoader": Loader},
        prime_rl__trainer__rl__broadcast={"setup_weight_broadcast": lambda *_: Weights()},
        prime_rl__transports__weights={"setup_weight_broadcast": lambda *_: Weights()},
        prime_rl__trainer__rl__loss={
            "compute_loss": loss,
            "compute_importance_ratio_and_mismatch_kl": lambda *_: (Anything(),) * 3,
        },
        prime_rl__utils__utils={"clean_exit": clean_exit, "to_col_format": lambda _: {"perf/peak_memory": [0.0]}},
        prime_rl__utils__config={"cli": lambda _: settings},
    )
    settings = Config(
        output_dir="/runs/math",
        max_steps=3,
        dist_timeout_seconds=600,
        max_concurrent_runs=2 if "several runs" in more else 1,
        ckpt=SimpleNamespace(interval=2, weights_only=False, resume_step=None),
        resume=None,
        weight_broadcast=SimpleNamespace(type="nixl" if "nixl" in more else "nccl"),
        data=SimpleNamespace(fake=None),
        model=Config(lora=None, vlm=None, full_offload="full offload" in more, fsdp_cpu_offload=False),
        optim=Config(max_norm=None),
        **dict.fromkeys(("bench", "gc", "trace_path", "memory_profiler_path", "heartbeat", "metrics_server")),
        **dict.fromkeys(("enable_token_export", "enable_router_replay"), False),
    )
    importlib.import_module("prime_rl.trainer.rl.train")  # (what is made up has anything of any name)
    from rollmuxd_hooks import prime_rl as hook

    class NoGpus(Anything):
        """What the loop itself asks of torch; the rest of this process has the real one."""

        def tensor(self, values, **_):
            return SimpleNamespace(tolist=lambda: values)

    hook.theirs.torch, hook.theirs.dist = NoGpus(), Anything()
    if "alone" in more:
        hook.theirs.train(settings)
    else:
        hook.main()
    DONE.append((f"weights {digests[-1]}", "ended", None, 0.0))


# ---- stand-ins -------------------------------------------------------------------------------------------------------


def standin(framework, script="train", *arguments):
    """A user's script over a loop of our own."""
    root = STANDINS / framework
    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, MadeUp({"ray"}, set(), ray=made_up_ray()))
    sys.modules["loops"] = sys.modules[__name__]
    path = str(root / f"{script}.py")
    sys.argv = [path, *arguments]
    # As `python train.py` has it: a hook may look at the script.
    sys.modules["__main__"].__file__ = path
    runpy.run_path(path, run_name="__main__")


def slime(version, layout="colocated", driver="train"):
    """The driver of the release, with its one line changed, over the stand-ins of what it drives."""
    sys.path.insert(0, str(STANDINS / "slime"))
    real = {"slime", "slime.ray", *(f"slime.ray.{name}" for name in ("placement_group", "rollout", "actor_group"))}
    arguments = Unsaid(
        colocate=layout == "colocated", offload_train=True, offload_rollout=driver == "train", num_rollout=2,
        start_rollout_id=0, eval_interval=1, update_weights_interval=1,
    )  # fmt: skip
    every_time = {"should_run_periodic_action": lambda *_: True}
    sys.meta_path.insert(
        0,
        MadeUp(
            {"slime", "ray"},
            real,
            ray=made_up_ray(),
            slime__utils__arguments={"parse_args": lambda: arguments},
            slime__utils__misc=every_time,
        ),
    )
    sys.modules["loops"] = sys.modules[__name__]
    released = (FRAMEWORKS / f"slime-{version}" / f"{driver}.py").read_text()
    changed = released.replace("from slime.ray.placement_group import", "from rollmuxd_hooks.slime import")
    assert changed != released
    path = Path("train.py")
    path.write_text(changed)
    sys.modules["__main__"].__file__ = str(path)
    runpy.run_path(str(path), run_name="__main__")


class Unsaid(SimpleNamespace):
    """Arguments that were not given are None."""

    def __getattr__(self, name):
        return None


def run(framework, *arguments):
    """Drive one of them; what was done."""
    watched()
    with contextlib.redirect_stdout(sys.stderr), fake_daemon() if FAKE else contextlib.nullcontext() as daemon:
        DAEMON.append(daemon)
        real = {"openrlhf": openrlhf, "skyrl": skyrl, "areal": areal, "prime-rl": prime_rl, "slime-released": slime}
        try:
            (real[framework] if framework in real else functools.partial(standin, framework))(*arguments)
        finally:
            if FAKE:
                print(f"held: {TURNS[-1].current if TURNS else None}", file=sys.stderr)
                print(f"ended: {daemon.ended}", file=sys.stderr)
    return DONE


if __name__ == "__main__":
    print(json.dumps(run(*sys.argv[1:])))
