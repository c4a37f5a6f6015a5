"""What ``make machine`` has found stays found, and is found in few steps."""

import sys
import time
from pathlib import Path
from random import Random

import pytest

from rollmuxd.core import facts, marks

sys.path.insert(0, str(Path(__file__).parent))
import machine
from patience import PATIENCE_S
from simkit.drawn import Failed

#: seed 117: both hosts of a job whose process came back are restarted, and its request waits for word of its states
STOOD_STILL = (
    "state.begin(kinds=['syncs', 'inits'], dispatch=Dispatch.SCHEDULE)",
    "state.reboot(host='h2')",
    "state.a_good_while(lingers=True, names=['D', 'B', 'A', 'C'], rounds=4)",
    "state.a_good_while(lingers=True, names=['C', 'D', 'B', 'A'], rounds=4)",
    "state.process_restarts(at_once=False, name='A')",
    "state.a_good_while(lingers=True, names=['D', 'B', 'C', 'A'], rounds=1)",
    "state.reboot(host='h1')",
    "state.reboot(host='h2')",
)


#: a job that waits for word of a look needs somebody to go on after it: the first and the last step show it
NEEDS_THE_LOOK = (
    "state.begin(kinds=['inits', 'known', 'colocated', 'syncs'], dispatch=Dispatch.READY)",
    *STOOD_STILL[4:],
    "state.a_good_while(lingers=True, names=['A', 'B', 'D', 'C'], rounds=4)",
)


def test_what_was_found_once_does_not_come_back() -> None:
    assert machine.play(list(STOOD_STILL)) == ""
    assert machine.play(list(NEEDS_THE_LOOK)) == ""


def test_a_sequence_that_fails_says_its_steps_and_they_fail_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is taken when an order has ended."""
    monkeypatch.setitem(marks.MARKS, facts.OrderEnded, ())
    with pytest.raises(Failed) as failed:
        for number in range(100):
            machine.test_machine.ClientsOperatorsAndBackends.plays(Random(f"machine {number}"), 60)
    assert failed.value.steps[0].startswith("state.begin(")
    assert machine.play(failed.value.steps) == failed.value.wrong


def test_a_sequence_that_fails_is_made_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is taken when GPUs are clean: which job was first in the way may be found without the rest."""
    monkeypatch.setitem(marks.MARKS, facts.GpusVerifiedClean, ())
    looks = [f"state.look(host={host!r})" for host in ("h1", "h2")]
    steps = [*NEEDS_THE_LOOK[:2], *looks, *NEEDS_THE_LOOK[2:]]
    wrong = machine.play(steps)
    assert wrong.startswith("AssertionError: never granted")
    found = machine.shorter(steps, wrong, time.monotonic() + PATIENCE_S)
    assert machine.play(found).startswith("AssertionError: never granted")
    assert len(found) < len(NEEDS_THE_LOOK)
