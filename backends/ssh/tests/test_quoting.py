"""The line that starts a host's process gets through every login shell as it is; all else goes past the shell."""

import shutil
import subprocess

import pytest

from rollmuxd_backend_local import payload
from rollmuxd_backend_ssh.connection import plain

SHELLS = ["sh", "bash", "dash", "zsh", "fish", "tcsh", "busybox"]


def shell(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here")
    return [found, "sh", "-c"] if name == "busybox" else [found, "-c"]


@pytest.mark.parametrize("name", SHELLS)
def test_the_program_that_opens_payloads_gets_through(name):
    packed = payload.pack({"ask": "alive", "owner": "nobody", "launch": "l1"}, "mark:")
    line = plain(("python3", "-I", "-c", payload.OPEN, str(len(packed))))
    ran = subprocess.run([*shell(name), line], input=packed + b"more", capture_output=True)
    assert payload.unpack(ran.stdout, "mark:") == {"said": False}, ran.stderr


@pytest.mark.parametrize("word", ["it's", "a!b", "a\nb", "a\\b", "a\0b"])
def test_plain_words_are_only_those_that_all_shells_read_alike(word):
    with pytest.raises(ValueError, match="every shell"):
        plain(("echo", word))
