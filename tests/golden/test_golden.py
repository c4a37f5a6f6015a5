"""The goldens are the same in every run, find a change, and let a sentence change where they should."""

import importlib.util
import json
import sys
from pathlib import Path

import forked
import pytest

from rollmuxd.core import facts
from rollmuxd.core.model import SlotStatus

LOST = SlotStatus.LOST

PROGRAM = Path(__file__).with_name("golden.py")
spec = importlib.util.spec_from_file_location("golden", PROGRAM)
golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden)


def run(*words):
    return forked.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True)


#: few jobs: `make golden` runs them all, and more workloads
ONLY = ("--only", "micro-train,weave-production", "--jobs", "2")


@pytest.mark.slow
def test_two_orders_of_hashes_give_the_same_and_a_changed_digest_is_named(tmp_path):
    before = tmp_path / "before.json"
    first = run(*ONLY)
    assert first.returncode == 0, first.stderr
    output = json.loads(first.stdout)
    assert list(output) == ["digests", "outcomes"]
    assert sum(key.startswith("bytes/default/weave-production/") for key in output["digests"]) == 2
    assert set(output["outcomes"]) == {"rollmux", "default"}
    figures = output["outcomes"]["rollmux"]["micro-train"]
    assert set(figures) == {"cost", "slo_kept", "mean_slowdown", "moves", "loads"}
    assert figures["cost"]["mean"] > 0

    woven = {
        "digests": {key: told for key, told in output["digests"].items() if "/weave-production/" in key},
        "outcomes": {policy: {"weave-production": of["weave-production"]} for policy, of in output["outcomes"].items()},
    }
    digests = woven["digests"] | {"bytes/rollmux/weave-production/0": "another"}
    before.write_text(json.dumps(woven | {"digests": digests}))
    differs = run("--only", "weave-production", "--jobs", "2", "--against", str(before))
    assert (differs.returncode, json.loads(differs.stdout)) == (1, woven)
    assert (
        f"golden: 1 differences from {before}, first: digests > bytes/rollmux/weave-production/0: another"
        in differs.stderr
    )


def digests_of(*some):
    heard = golden.Digests()
    for fact in some:
        heard.hear(fact)
    return heard.bytes.hexdigest(), heard.structure.hexdigest()


def test_another_sentence_changes_the_bytes_and_not_the_structure():
    bytes_1, structure_1 = digests_of(facts.SlotTakenAway(at=1, slot="s1", how=LOST, reason="its lease ran out"))
    bytes_2, structure_2 = digests_of(facts.SlotTakenAway(at=1, slot="s1", how=LOST, reason="the lease ended"))
    assert bytes_1 != bytes_2
    assert structure_1 == structure_2


def test_another_id_time_or_order_changes_both():
    lost, freed = (
        facts.SlotTakenAway(at=1, slot="s1", how=LOST, reason="gone"),
        facts.SlotOver(at=1, slot="s1"),
    )
    first = digests_of(lost, freed)
    for others in (
        (facts.SlotTakenAway(at=1, slot="s2", how=LOST, reason="gone"), freed),
        (facts.SlotTakenAway(at=2, slot="s1", how=LOST, reason="gone"), freed),
        (freed, lost),
        (lost,),
    ):
        second = digests_of(*others)
        assert second[0] != first[0]
        assert second[1] != first[1]


def test_a_sentence_within_a_list_of_structures_is_left_out_too():
    told = {"fact": "x", "parts": [{"id": "s1", "why": "a sentence"}], "reason": "another"}
    assert golden.without_prose(told) == {"fact": "x", "parts": [{"id": "s1"}]}


def test_what_is_in_one_output_only_is_a_difference():
    before, now = {"digests": {"a": "1"}}, {"digests": {"a": "1", "b": "2"}}
    assert list(golden.differences(before, now)) == ["digests > b is in one of the two only"]
    assert list(golden.differences(before, before)) == []


def test_the_proof_of_structure_does_not_compare_bytes():
    before = {"digests": {"bytes/x": "1", "structure/x": "2"}, "outcomes": {"cost": 5}}
    other_bytes = {"digests": {"bytes/x": "9", "structure/x": "2"}, "outcomes": {"cost": 5}}
    other_structure = {"digests": {"bytes/x": "9", "structure/x": "8"}, "outcomes": {"cost": 6}}
    assert golden.compared(before, other_bytes, "structure") == []
    assert golden.compared(before, other_bytes, "bytes") == ["digests > bytes/x: 1 before, 9 now"]
    assert golden.compared(before, other_structure, "structure") == [
        "digests > structure/x: 2 before, 8 now",
        "outcomes > cost: 5 before, 6 now",
    ]


def test_a_workload_that_there_is_not_is_refused_by_name():
    refused = run("--only", "micro-nothing")
    assert refused.returncode == 2
    assert "micro-nothing is none of micro-temporal, " in refused.stderr
