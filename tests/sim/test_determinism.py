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
from rollmuxd.sim.fluid import Fluid
from simkit import checked, small
for name in sys.argv[3:]:
    kind, seed = name.split("-")
    made, faults = (Fluid, ()) if kind == "fluid" else (checked.make, (small.PRESETS[kind],))
    with open(f"{sys.argv[2]}/{name}", "wb") as file:
        write = lambda fact: file.write(facts.encode(fact) + bytes([10]))
        policy = small.policy_under_test({"fluid": "random", "none": "rollmux", "all": "default"}[kind])
        outcome = made(*faults, small.small(int(seed)), policy, int(seed), "work", write).run()
    print(name, outcome.facts_digest, outcome.facts, outcome.cost)
"""
#: seed 3 of each kind
THIRD = ("fluid-3", "none-3", "all-3")
FOURTH = ("fluid-4", "none-4", "all-4")


def play(folder: Path, *runs: str, hashes: str) -> tuple[dict[str, list[str]], dict[str, bytes]]:
    """What a process of its own says of each run, and what it wrote."""
    folder.mkdir()
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS), str(folder), *runs],
        env={**os.environ, "PYTHONHASHSEED": hashes}, capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    said = {name: rest for name, *rest in map(str.split, told.stdout.splitlines())}
    return said, {name: (folder / name).read_bytes() for name in runs}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Two seeds of each kind."""
    return play(tmp_path_factory.mktemp("played") / "runs", *THIRD, *FOURTH, hashes="1")


def test_two_processes_with_two_hash_seeds_write_the_same_bytes(played, tmp_path):
    said, wrote = play(tmp_path / "runs", *THIRD, hashes="4242")

    for name in THIRD:
        assert (name, said[name], wrote[name]) == (name, played[0][name], played[1][name])


def test_another_seed_writes_others(played):
    for third, fourth in zip(THIRD, FOURTH, strict=True):
        assert played[1][third] != played[1][fourth]


def test_the_digest_is_of_the_facts_as_they_are_written(played):
    said, wrote = played
    for name in said:
        lines = wrote[name].splitlines()
        assert said[name][0] == hashlib.sha256(b"".join(lines)).hexdigest()
        assert int(said[name][1]) == len(lines)
