"""Each example runs to its end without a daemon, since that is how a reader tries it first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (["hello.py"], "step 9: centre (3.00, -1.00)"),
        (["async_hello.py"], "hello-b step 9"),
        (["tail.py", "--step-s", "0"], "step 2: 6885 tokens"),
        (["rl/sort_digits.py", "--iterations", "2", "--scale", "0.01", "--name", "mine"], "mine   1  reward"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_example_runs_to_its_end_without_a_daemon(program, says, tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX", "XDG_"))}
    nowhere = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, EXAMPLES / program[0], *program[1:]]
    done = subprocess.run(command, env=kept | nowhere, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
