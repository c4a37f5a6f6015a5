"""What the hook looks at before training starts: a verl that it does not know is refused, with what is different."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from rollmuxd_hook_kit.contract import UnknownFramework, check, differences
from rollmuxd_hook_verl.contract import PPO_TRAINER, V1_SYNC, V1_TRAINER, VERL

RECORDED = json.loads(Path(__file__).with_name("facts-verl.json").read_text())
NEWEST = "0.9.1"


@pytest.mark.parametrize("version", ["0.7.1", "0.8.0", "0.9.0", "0.9.1"])
def test_a_release_that_was_looked_at_is_taken(version):
    assert differences(VERL, version, RECORDED[version]) == []


def test_what_was_looked_at_is_all_there():
    assert list(RECORDED[NEWEST]) == [known.key for known in VERL.classes]
    assert list(RECORDED["0.8.0"]) == [known.key for known in VERL.classes if not known.since]


def test_a_release_without_a_manager_of_engines_is_refused_with_the_versions_that_are_known():
    found = differences(VERL, "0.7.0", RECORDED["0.7.0"])
    assert found[0] == "the hook knows verl 0.7.1 to 0.9, and this is 0.7.0"
    assert "there is no verl/checkpoint_engine/base.py" in found
    assert "RayPPOTrainer.fit does not call checkpoint_manager.update_weights" in found


@pytest.mark.parametrize("version", ["0.10.0", "1.0", "", "main"])
def test_a_release_that_nobody_has_looked_at_is_refused_though_nothing_differs(version):
    (found,) = differences(VERL, version, RECORDED[NEWEST])
    assert found == f"the hook knows verl 0.7.1 to 0.9, and this is {version or 'unknown'}"


METHODS = [(key, name) for key, facts in RECORDED[NEWEST].items() for name in facts["methods"]]


@pytest.mark.parametrize(("key", "name"), METHODS, ids=[name for _, name in METHODS])
def test_each_method_that_is_gone_or_asks_for_more_is_named(key, name):
    gone, more = copy.deepcopy(RECORDED[NEWEST]), copy.deepcopy(RECORDED[NEWEST])
    del gone[key]["methods"][name]
    more[key]["methods"][name]["parameters"].insert(1, "stranger")
    kind = key.rpartition(":")[2]
    assert differences(VERL, NEWEST, gone) == [f"{kind} has no method {name}"]
    (found,) = differences(VERL, NEWEST, more)
    assert found.startswith(f"{kind}.{name} is known as (self")
    assert "stranger" in found


@pytest.mark.parametrize(
    ("key", "name", "call"),
    [
        (PPO_TRAINER.key, "fit", "checkpoint_manager.sleep_replicas"),
        (PPO_TRAINER.key, "fit", "checkpoint_manager.update_weights"),
        (PPO_TRAINER.key, "fit", "_update_actor"),
        (V1_TRAINER.key, "_step_once", "on_sample_end"),
        (V1_SYNC.key, "on_sample_end", "checkpoint_manager.sleep_replicas"),
    ],
)
def test_a_method_that_no_longer_calls_what_the_hook_waits_for_is_named(key, name, call):
    facts = copy.deepcopy(RECORDED[NEWEST])
    facts[key]["methods"][name]["calls"].remove(call)
    assert differences(VERL, NEWEST, facts) == [f"{key.rpartition(':')[2]}.{name} does not call {call}"]


def test_the_refusal_says_what_to_do():
    with pytest.raises(UnknownFramework) as refused:
        check(VERL, "0.10.0", RECORDED[NEWEST])
    assert str(refused.value).startswith("rollmuxd_hook_verl cannot tell when this verl rolls out and trains: ")
    assert str(refused.value).endswith("or take the hook out again: unset VERL_USE_EXTERNAL_MODULES")


# ---- as verl comes upon it -------------------------------------------------------------------------------------------

STRANGER = {
    "__init__.py": (
        "import importlib, os\n__version__ = '0.8.0'\nimportlib.import_module(os.environ['VERL_USE_EXTERNAL_MODULES'])"
    ),
    "trainer/__init__.py": "",
    "trainer/ppo/__init__.py": "",
    "trainer/ppo/ray_trainer.py": "class RayPPOTrainer:\n    def fit(self, epochs): ...",
    "trainer/main_ppo.py": "print('starts')\nfrom verl.trainer.ppo.ray_trainer import RayPPOTrainer\nprint('trains')",
    "worker.py": "import sys\nprint('works', 'torch' in sys.modules, 'rollmuxd_hook_verl.trainer' in sys.modules)",
}


def started(tmp_path, module):
    """A process of a verl that is none: what it has said, and how it ended."""
    for name, text in STRANGER.items():
        path = tmp_path / "verl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "VERL_USE_EXTERNAL_MODULES": "rollmuxd_hook_verl"}
    return subprocess.run(
        [sys.executable, "-m", module], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_a_stranger_is_refused_where_its_trainer_is_imported(tmp_path):
    ended = started(tmp_path, "verl.trainer.main_ppo")
    assert ended.returncode == 1
    assert ended.stdout == "starts\n"
    assert "UnknownFramework: rollmuxd_hook_verl cannot tell" in ended.stderr
    assert "RayPPOTrainer.fit is known as (self), not (self, epochs)" in ended.stderr
    assert "there is no verl/checkpoint_engine/base.py" in ended.stderr


def test_a_worker_of_a_stranger_works_on_and_loads_nothing(tmp_path):
    ended = started(tmp_path, "verl.worker")
    assert (ended.returncode, ended.stdout) == (0, "works False False\n"), ended.stderr
