"""Arguments get through every login shell as they are, and what is not ours in its output is left aside."""

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmuxd_backend_local import payload
from rollmuxd_backend_ssh import quoting

SHELLS = ["sh", "bash", "dash", "zsh", "fish", "tcsh", "busybox"]
ODD = (
    "",
    " a  b ",
    "$HOME",
    "`id`",
    "it's",
    '"',
    "\\",
    "\\\\'",
    "*",
    "~",
    "!x",
    "a\nb",
    "\n",
    "-n",
    "é",
    "{1,2}",
    "%s\\0",
)

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def shell(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here")
    return [found, "sh", "-c"] if name == "busybox" else [found, "-c"]


def printed(output, mark):
    head, _, rest = output.partition(b"\n")
    assert head.startswith(mark.encode())
    assert head.split()[1].isdigit()
    return rest.decode().split("\0")[:-1]


@pytest.mark.parametrize("name", SHELLS)
def test_odd_arguments_get_through(name):
    mark = quoting.mark()
    line = quoting.command(("printf", "%s\\0", *ODD), {"ROLLMUX_ODD": "it's $HOME\n!"}, mark)
    ran = subprocess.run([*shell(name), line], capture_output=True)
    assert printed(ran.stdout, mark) == list(ODD), ran.stderr


@settings(max_examples=60, deadline=None)
@given(st.lists(texts, max_size=5), texts)
def test_any_arguments_get_through(arguments, value):
    mark = quoting.mark()
    line = quoting.command(("sh", "-c", 'printf "%s\\0" "$@" "$V"', "sh", *arguments), {"V": value}, mark)
    ran = subprocess.run(["sh", "-c", line], capture_output=True)
    assert printed(ran.stdout, mark) == [*arguments, value]


@pytest.mark.parametrize("name", SHELLS)
def test_the_program_that_opens_payloads_gets_through(name):
    line = quoting.plain(("python3", "-I", "-c", payload.OPEN))
    packed = payload.pack({"ask": "alive", "owner": "nobody", "launch": "l1"}, "mark:")
    ran = subprocess.run([*shell(name), line], input=packed, capture_output=True)
    assert payload.unpack(ran.stdout, "mark:") == {"said": False}, ran.stderr


@pytest.mark.parametrize("argv", [(), ("a\0b",)])
def test_what_no_shell_could_be_told_is_refused(argv):
    with pytest.raises(ValueError, match="NUL"):
        quoting.command(argv, {}, "m")


def test_a_variable_needs_a_name():
    with pytest.raises(ValueError, match=r"'A;id' is no name of a variable"):
        quoting.command(("true",), {"A;id": "1"}, "m")


@pytest.mark.parametrize("word", ["it's", "a!b", "a\nb", "a\\b"])
def test_plain_words_are_only_those_that_all_shells_read_alike(word):
    with pytest.raises(ValueError, match="every shell"):
        quoting.plain(("echo", word))
