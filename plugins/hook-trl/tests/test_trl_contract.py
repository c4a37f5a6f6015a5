"""What the hook looks at before training starts: a TRL that it does not know is refused, with what is different."""

import copy
import json
from pathlib import Path

import pytest

from rollmuxd_hook_kit import contract as kit
from rollmuxd_hook_trl import contract

RECORDED = json.loads(Path(__file__).with_name("facts-trl.json").read_text())
TRAINER = "trl/trainer/grpo_trainer.py:GRPOTrainer"
KNOWN = ["1.0.0", "1.4.0", "1.9.0", "1.12.0", "1.14.0", "1.15.0", "1.16.0"]


@pytest.mark.parametrize("version", KNOWN)
def test_a_release_that_was_looked_at_is_taken(version):
    assert kit.differences(contract.TRL, version, RECORDED[version]) == []


def test_a_release_from_before_is_refused_with_the_versions_that_are_known():
    found = kit.differences(contract.TRL, "0.26.2", RECORDED["0.26.2"])
    assert found[0] == "the hook knows TRL 1.0 to 1.16, and this is 0.26.2"
    assert "GRPOTrainer does not speak of self.vllm_generation.sync_weights" in found


@pytest.mark.parametrize("version", ["1.17.0", "2.0.0.dev0", "", "unknown"])
def test_a_release_that_nobody_has_looked_at_is_refused_though_nothing_differs(version):
    (found,) = kit.differences(contract.TRL, version, RECORDED["1.16.0"])
    assert found == f"the hook knows TRL 1.0 to 1.16, and this is {version or 'unknown'}"


@pytest.mark.parametrize("method", RECORDED["1.16.0"][TRAINER]["methods"])
def test_each_method_that_is_gone_or_asks_for_more_is_named(method):
    gone = copy.deepcopy(RECORDED["1.16.0"])
    more = copy.deepcopy(RECORDED["1.16.0"])
    del gone[TRAINER]["methods"][method]
    more[TRAINER]["methods"][method]["parameters"].insert(1, "stranger")
    assert kit.differences(contract.TRL, "1.16.0", gone) == [f"GRPOTrainer has no method {method}"]
    (found,) = kit.differences(contract.TRL, "1.16.0", more)
    assert found.startswith(f"GRPOTrainer.{method} is known as (self, ")
    assert "stranger" in found


@pytest.mark.parametrize(
    ("caller", "callee"),
    [
        ("_prepare_inputs", "_generate_and_score_completions"),
        ("_generate_and_score_completions", "_generate"),
        ("_generate_and_score_completions", "_calculate_rewards"),
        ("prediction_step", "_prepare_inputs"),
    ],
)
def test_a_method_that_no_longer_calls_the_next_one_is_named(caller, callee):
    facts = copy.deepcopy(RECORDED["1.16.0"])
    facts[TRAINER]["methods"][caller]["calls"].remove(callee)
    assert kit.differences(contract.TRL, "1.16.0", facts) == [f"GRPOTrainer.{caller} does not call {callee}"]


def test_the_asynchronous_trainer_has_known_releases_of_its_own():
    recorded = json.loads(Path(__file__).with_name("facts-asyncgrpo.json").read_text())["1.16.0"]
    assert kit.differences(contract.ASYNC, "1.16.0", recorded) == []
    begins = recorded["trl/experimental/async_grpo/async_grpo_trainer.py:_TrainBeginCallback"]
    begins["methods"]["on_train_begin"]["calls"].remove("_trainer._sync_weight")
    assert kit.differences(contract.ASYNC, "1.15.0", recorded) == [
        "the hook knows AsyncGRPO 1.16 to 1.16, and this is 1.15.0",
        "_TrainBeginCallback.on_train_begin does not call _trainer._sync_weight",
    ]


SOURCE = """
class GRPOTrainer(_BaseTrainer):
    def _generate(self, prompts: list):
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
        return self._generate_single_turn(prompts)
    def compute_loss(self, model, inputs): ...
class Another:
    def _prepare_inputs(self, generation_batch): self._generate_and_score_completions()
"""


def facts_in(source):
    return {what.key: kit.facts_of(source, what) for what in contract.TRL.classes}


def test_a_source_is_read_for_the_trainer_only_and_never_run():
    assert facts_in(SOURCE)[TRAINER] == {
        "methods": {
            "_generate": {"parameters": ["self", "prompts"], "calls": ["_generate_single_turn"]},
            "compute_loss": {"parameters": ["self", "model", "inputs"], "calls": []},
        },
        "mentions": ["self._last_loaded_step", "self.vllm_generation.sync_weights", "self.use_vllm"],
    }
    assert facts_in("raise SystemExit")[TRAINER] == {"methods": {}, "mentions": []}


def test_the_refusal_says_what_is_different_and_what_to_do():
    with pytest.raises(kit.UnknownFramework) as refused:
        kit.check(contract.TRL, "1.99.0", facts_in(SOURCE))
    said = str(refused.value)
    assert "the hook knows TRL 1.0 to 1.16, and this is 1.99.0" in said
    assert "GRPOTrainer has no method _prepare_inputs" in said
    assert said.endswith("Install a known one, or take the hook out again: from trl import GRPOTrainer")


class Trls:
    def _generate(self, prompts):
        return prompts


class Hook:
    def _generate(self, prompts):
        return super()._generate(prompts)


def test_a_class_that_takes_the_place_of_what_the_hook_needs_is_refused():
    class Own(Trls):
        def _generate(self, prompts):
            return prompts[::-1]

    class Shared(Hook, Own):
        pass

    with pytest.raises(kit.UnknownFramework, match=r"Own\._generate takes the place .*call super\(\)\._generate"):
        kit.check_class(contract.TRL, Shared, Hook, Trls)


def test_a_class_that_adds_to_it_is_taken():
    class Own(Trls):
        def _generate(self, prompts):
            return super()._generate(prompts[::-1])

        def unrelated(self):
            return None

    class Shared(Hook, Own):
        pass

    kit.check_class(contract.TRL, Shared, Hook, Trls)
