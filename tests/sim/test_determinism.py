"""The same seed gives the same bytes: in other processes, under another order of hashes, with and without faults."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

TESTS = Path(__file__).parents[1]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from rollmuxd.core import facts
from rollmuxd.sim import fluid
from simkit import checked, small
kind, seed, path = sys.argv[2], int(sys.argv[3]), sys.argv[4]
run, faults = (fluid.run, {}) if kind == "fluid" else (checked.run, {"faults": small.PRESETS[kind]})
with open(path, "wb") as file:
    write = lambda fact: file.write(facts.encode(fact) + bytes([10]))
    policy = small.policy_under_test("random" if kind == "fluid" else "rollmux")
    outcome = run(small.small(seed), policy, seed=seed, accounting="work", hear=write, **faults)
print(outcome.facts_digest, outcome.facts, outcome.cost)
"""


def play(kind: str, seed: int, path: Path, *, hashes: str) -> tuple[str, str]:
    """What a process of its own says, and what it wrote."""
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS), kind, str(seed), str(path)],
        env={**os.environ, "PYTHONHASHSEED": hashes}, capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return told.stdout, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", ["fluid", "none", "all"])
def test_two_processes_with_two_hash_seeds_write_the_same_bytes(kind, tmp_path):
    first, second = (play(kind, 3, tmp_path / name, hashes=name) for name in ("1", "4242"))

    assert first == second


@pytest.mark.parametrize("kind", ["fluid", "none", "all"])
def test_another_seed_writes_others(kind, tmp_path):
    assert play(kind, 3, tmp_path / "3", hashes="0")[1] != play(kind, 4, tmp_path / "4", hashes="0")[1]


def test_the_digest_is_of_the_facts_as_they_are_written(tmp_path):
    said, _ = play("none", 3, tmp_path / "facts", hashes="0")
    lines = (tmp_path / "facts").read_bytes().splitlines()

    assert said.split()[0] == hashlib.sha256(b"".join(lines)).hexdigest()
    assert int(said.split()[1]) == len(lines)
