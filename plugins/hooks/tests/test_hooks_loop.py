"""A framework's loop as a job: where methods begin and end, what the job is called and needs, what it is refused."""

import inspect
from types import SimpleNamespace

import pytest

from rollmuxd.testing import fake_daemon
from rollmuxd_hook_kit.turns import around
from rollmuxd_hooks.loop import Loop, Shape, get


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch, tmp_path):
    for name in ("URL", "SOCKET", "API_KEY", "REQUIRED", "JOB", "RUN_KEY", "HOOK"):
        monkeypatch.delenv(f"ROLLMUX_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def daemon():
    with fake_daemon() as fake:
        yield fake


class Trainer:
    def __init__(self, seen):
        self.seen = seen

    def step(self, batch, *, scale=1):
        """One step."""
        self.seen.append("step")
        if batch is None:
            raise ValueError("no batch")
        return batch * scale

    async def generate(self, prompts):
        self.seen.append("generate")
        return prompts[::-1]


def test_a_method_has_its_bracket_and_is_otherwise_the_same():
    seen = []
    trainer = Trainer(seen)
    around(trainer, "step", before=lambda: seen.append("before"), after=lambda: seen.append("after"))
    assert trainer.step(2, scale=3) == 6
    assert seen == ["before", "step", "after"]
    assert trainer.step.__doc__ == "One step."


def test_a_coroutine_has_its_bracket_around_all_of_it():
    seen = []
    trainer = Trainer(seen)
    around(trainer, "generate", before=lambda: seen.append("before"), after=lambda: seen.append("after"))
    assert inspect.iscoroutinefunction(trainer.generate)
    with pytest.raises(StopIteration) as ended:
        trainer.generate("ab").send(None)
    assert ended.value.value == "ba"
    assert seen == ["before", "generate", "after"]


def test_a_method_that_raises_has_no_end_but_its_error():
    seen = []
    trainer = Trainer(seen)
    around(trainer, "step", after=lambda: seen.append("after"))
    with pytest.raises(ValueError, match="no batch"):
        trainer.step(None)
    assert seen == ["step"]


def test_state_that_could_not_be_loaded_elsewhere_is_not_movable_warm_and_may_be_relaunched(daemon):
    with pytest.raises(ValueError, match="load their state where it was, and cannot on other GPUs"):
        Loop({"movable": "warm"}, name="run", shape=Shape.ONE_POOL)
    Loop({"movable": "relaunch"}, name="run", shape=Shape.ONE_POOL)
    assert daemon.calls == []


@pytest.mark.parametrize("shape", [Shape.TRAIN_ONLY, Shape.ASYNCHRONOUS])
def test_a_gateway_is_refused_where_no_rollout_would_join_it(daemon, shape):
    with pytest.raises(ValueError, match="this run has no phase rollout that joins it, only train; leave it out"):
        Loop({"gateway": "http://127.0.0.1:1"}, name="run", shape=shape)
    Loop({"gateway": "http://127.0.0.1:1"}, name="run", shape=Shape.TWO_POOLS)
    assert daemon.calls == []


@pytest.mark.parametrize(
    ("shape", "phases"),
    [
        (Shape.ONE_POOL, {"rollout": ["train"], "train": ["train"]}),
        (Shape.TWO_POOLS, {"rollout": ["rollout"], "train": ["train"], "sync": ["rollout", "train"]}),
        (Shape.TRAIN_ONLY, {"train": ["train"]}),
    ],
)
def test_each_shape_asks_for_the_pools_of_its_phases(daemon, shape, phases):
    loop = Loop(None, name="some run: 1", shape=shape)
    loop.begin()
    loop.end()
    (registered,) = daemon.registered
    assert registered.name == "some-run--1"
    assert {phase.name: list(phase.pools) for phase in registered.phases} == phases
    assert daemon.ended == {"some-run--1": "finished"}


def test_on_one_pool_weights_go_with_the_rollout_and_an_evaluation_needs_nothing_more(daemon):
    loop = Loop(dict(side=dict(eval=dict(seconds=60))), name="one", shape=Shape.ONE_POOL)
    loop.begin()
    loop.sync()
    with loop.evaluating():
        assert loop.turns.current == "rollout"
    loop.rollout()
    loop.rest()
    with loop.evaluating():
        assert loop.turns.current == "eval"
    loop.end()
    assert daemon.phases == ["init", "rollout", "eval"]


def test_with_two_pools_saving_has_the_trainers_gpus_unless_it_is_declared(daemon):
    for name, side in (("plain", None), ("declared", dict(save=dict(seconds=60)))):
        loop = Loop(dict(side=side), name=name, shape=Shape.TWO_POOLS)
        loop.begin()
        loop.rollout()
        with loop.saving():
            assert loop.turns.current == {"plain": "train", "declared": "save"}[name]
        loop.end()
    (save,) = [phase for phase in daemon.registered[1].side if phase.name == "save"]
    assert list(save.pools) == ["train"]


class Between:
    """A mover that writes down which phase was held at each step."""

    expected_s = 3.0

    def __init__(self):
        self.seen, self.loop = [], None

    def publish(self, fence):
        assert fence, "an older slot must not publish"
        self.seen.append(f"publish in {self.loop.turns.current}")

    def wait(self):
        self.seen.append(f"wait in {self.loop.turns.current}")

    def load(self):
        self.seen.append(f"load in {self.loop.turns.current}")
        return {"moved": 1}


def test_weights_may_travel_while_no_gpu_is_held(daemon):
    mover = Between()
    mover.loop = loop = Loop(dict(weights=mover), name="own", shape=Shape.TWO_POOLS)
    loop.begin()
    for _ in range(2):
        loop.sync()  # (frameworks prepare their engines first, and then send)
        assert loop.send(lambda: pytest.fail("the framework's own way holds both pools")) == {"moved": 1}
        loop.rollout()
        loop.train()
    with loop.evaluating():
        assert loop.turns.current == "eval"
    loop.end()
    moved = [f"wait in {None}", "load in rollout"]
    assert mover.seen == ["publish in init", *moved, "publish in train", *moved]
    assert daemon.phases == ["init", "rollout", "train", "rollout", "train", "eval"]
    (registered,) = daemon.registered
    assert {phase.name: (list(phase.pools), phase.gap_s) for phase in registered.phases} == {
        "rollout": (["rollout"], 3.0),
        "train": (["train"], 0),
    }


def test_a_mover_may_be_named_in_the_file_and_is_refused_where_no_weights_travel(daemon, monkeypatch, tmp_path):
    (tmp_path / "my_mover.py").write_text(
        "from types import SimpleNamespace\ndef make():\n    return SimpleNamespace(expected_s=2.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "job.toml").write_text('weights = "my_mover:make"\n')
    monkeypatch.setenv("ROLLMUX_HOOK", str(tmp_path / "job.toml"))
    Loop(None, name="own", shape=Shape.TWO_POOLS).begin()
    assert [phase.gap_s for phase in daemon.registered[0].phases] == [2.0, 0]
    with pytest.raises(ValueError, match="no weights travel between shared pools here"):
        Loop(None, name="own", shape=Shape.ONE_POOL)
    with pytest.raises(ValueError, match=r"weights='my_mover:nothing': .* it is 'module:name' of a function"):
        Loop(dict(weights="my_mover:nothing"), name="own", shape=Shape.TWO_POOLS)


def test_what_is_said_in_code_goes_before_the_file(daemon, monkeypatch, tmp_path):
    (tmp_path / "job.toml").write_text('name = "file"\nslo = 2.0\n[roles.trainer]\ncommand = "x"\n')
    monkeypatch.setenv("ROLLMUX_HOOK", str(tmp_path / "job.toml"))
    Loop(dict(name="code"), name="own", shape=Shape.ONE_POOL).begin()
    (registered,) = daemon.registered
    assert (registered.name, registered.slo) == ("code", 2.0)


def test_a_run_that_was_started_for_a_job_is_called_like_it(daemon, monkeypatch):
    monkeypatch.setenv("ROLLMUX_JOB", "started")
    Loop(None, name="own", shape=Shape.ONE_POOL).begin()
    assert daemon.registered[0].name == "started"


def test_engines_on_the_trainers_gpus_get_no_pool_of_their_own():
    with pytest.raises(ValueError, match=r"give train= only, for all it shares"):
        Loop(dict(rollout=dict(nodes=1)), name="own", shape=Shape.ONE_POOL)


def test_what_would_stay_is_refused_unless_it_may(daemon):
    with pytest.raises(ValueError, match=r"^engines stay; for a daemon that only watches .* say resident=True"):
        Loop(None, name="own", shape=Shape.TWO_POOLS, stays="engines stay")
    Loop(dict(resident=True), name="own", shape=Shape.TWO_POOLS, stays="engines stay").begin()
    assert daemon.registered[0].states == {}


def test_what_the_framework_has_parked_is_told_as_parked(daemon):
    loop = Loop(None, name="own", shape=Shape.ONE_POOL)
    moved = []
    loop.parked_by(lambda: moved.append("parked"), load=lambda: moved.append("loaded"), pool="train")
    loop.begin()
    loop.train()
    loop.rest()
    assert daemon.result_of(daemon.order("park", "train")).ok
    assert daemon.result_of(daemon.order("load", "train")).ok
    assert moved == ["parked", "loaded"]
    loop.end()


def test_a_config_is_asked_by_keys_or_attributes():
    args = SimpleNamespace(logger={"wandb": None})
    assert get(args, "logger", "wandb", "name", default="own") == "own"
    assert get({"actor": args}, "actor", "logger") == {"wandb": None}
