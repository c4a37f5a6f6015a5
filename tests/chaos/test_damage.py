"""A killed daemon's journal is damaged, a few times in the default tests (more: ROLLMUX_DAMAGES, `make -s damage`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DAMAGE = Path(__file__).with_name("damage.py")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(0)  # it has limits of its own, for each step
def test_no_damage_of_the_journal_gives_a_gpu_two_holders_or_loses_a_fact_without_a_word():
    number = os.environ.get("ROLLMUX_DAMAGES", "8")
    with subprocess.Popen(
        [sys.executable, str(DAMAGE), "--damages", number, "--seed", os.environ.get("ROLLMUX_SEED", "short")],
        stdout=subprocess.PIPE,
        text=True,
    ) as damaging:
        try:
            stdout, _ = damaging.communicate()
        finally:
            damaging.terminate()

    found = json.loads(stdout)
    assert (found["two_holders"], found["unsaid"], found["stuck"]) == ([], [], [])
    assert found["damages"] == int(number)
    # It has done harm, while there was something to harm.
    assert found["facts_missing"] > 0
    assert found["grants"] >= found["damages"]
