"""A plugin is found by its name once it is installed, and one bad plugin hides no other."""

import sys
import textwrap

import pytest
from command_line import typed

from rollmuxd.spi import NotInstalled
from rollmuxd.spi.discovery import BrokenPlugin, added, find, names

GOOD = """
class Good:
    traits = None
    async def open(self): ...
    async def inventory(self): ...
    async def observe(self): ...
    async def kill(self): ...
    async def close(self): ...
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution: its entry points, and its module's source."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(project, points, module="", source="", extra=""):
        info = tmp_path / f"{project.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        extras = f"Provides-Extra: {extra}\n" if extra else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.2\n{extras}")
        (info / "entry_points.txt").write_text(textwrap.dedent(points))
        if module:
            (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
            monkeypatch.delitem(sys.modules, module, raising=False)

    yield put
    for name in [name for name in sys.modules if name.startswith("stranger_")]:
        del sys.modules[name]


def test_our_own_are_found_like_anybodys():
    from rollmuxd_backend_mock import MockBackend, MockResidency
    from rollmuxd_channel import ChannelResidency

    assert find("backend", "mock") is MockBackend
    assert find("residency", "mock") is MockResidency
    assert find("residency", "channel") is ChannelResidency


@pytest.mark.parametrize("name", ["channel", "command", "cuda-checkpoint", "sglang", "vllm"])
def test_ours_can_be_used(name):
    assert isinstance(find("residency", name), type)


def test_a_strangers_is_found_by_its_name(install):
    install("stranger", "[rollmuxd.backends]\nstranger = stranger_good:Good\n", "stranger_good", GOOD)
    assert "stranger" in names("backend")
    assert find("backend", "stranger").__name__ == "Good"


def test_what_several_packages_add_to_a_list_is_one_dict(install):
    install(
        "stranger", "[rollmuxd.sim_policies]\nmore = stranger_more:POLICIES\n", "stranger_more", "POLICIES = {'x': 1}"
    )
    assert {"gavel", "x"} <= set(added("rollmuxd.sim_policies"))
    assert added("rollmuxd.nothing") == {}


def test_a_strangers_command_is_listed_with_its_line_and_runs_and_takes_no_name_of_ours(install):
    source = """
    import click
    @click.command(short_help="Say hello.")
    def hello():
        click.echo("hello")
    """
    points = "[rollmuxd.commands]\nhello = stranger_hello:hello\njob = stranger_hello:hello\n"
    install("stranger", points, "stranger_hello", source)
    assert "hello      Say hello." in typed("--help").out
    assert typed("hello").out == "hello\n"
    assert "Jobs: list, show" in typed("job --help").out


def test_what_is_not_installed_is_answered_with_what_is_and_how_to_get_it(install):
    install("stranger", "[rollmuxd.backends]\nray = stranger_good:Good\n", "stranger_good", GOOD)
    with pytest.raises(NotInstalled) as missing:
        find("backend", "ry")
    there = ", ".join(names("backend"))
    assert str(missing.value) == f'backend "ry" is not installed (installed: {there}); did you mean "ray"?'


def test_a_name_near_to_nothing_gets_no_guess():
    with pytest.raises(NotInstalled) as missing:
        find("residency", "tape")
    assert str(missing.value).startswith('residency driver "tape" is not installed (installed: ')
    assert str(missing.value).endswith("; install the project that has it, or name another")
    with pytest.raises(NotInstalled, match="install the project that has it") as missing:
        find("policy", "tape")
    assert "pip install" not in str(missing.value)  # by a name that anybody may own


@pytest.mark.parametrize(
    ("value", "source", "why"),
    [
        ("stranger_bad:Good", "import no_such.module", "stranger_bad:Good needs no_such, which is not installed"),
        ("stranger_bad:Good", "1 / 0", "ZeroDivisionError"),
        ("stranger_bad:Good", "def broken(:", "SyntaxError"),
        ("stranger_bad:Better", GOOD, "AttributeError"),
        ("stranger_bad:Good", "Good = 7", "is 7, and an entry point must name a class"),
        ("stranger_bad:Good", "class Good: open = close = None", "lacks inventory, observe, kill"),
    ],
)
def test_one_that_cannot_be_used_is_reported_with_its_error_and_hides_no_other(install, value, source, why):
    install("stranger", f"[rollmuxd.backends]\nbad = {value}\n", "stranger_bad", source)
    assert {"bad", "mock"} <= set(names("backend"))
    assert find("backend", "mock") is not None
    with pytest.raises(BrokenPlugin) as broken:
        find("backend", "bad")
    assert str(broken.value).startswith('backend "bad" (stranger 1.2) cannot be used: stranger_bad:')
    assert why in str(broken.value)


def test_a_missing_dependency_is_told_with_the_extra_that_brings_it(install):
    point = "[rollmuxd.backends]\nlab = stranger_lab:Good\n"
    install("stranger", point, "stranger_lab", "import no_such.module", extra="lab")
    with pytest.raises(BrokenPlugin) as broken:
        find("backend", "lab")
    assert str(broken.value) == (
        'backend "lab" (stranger 1.2) cannot be used: stranger_lab:Good needs no_such, which comes with stranger[lab]'
    )


def test_a_policy_of_an_older_protocol_is_refused_when_it_is_looked_for_and_not_when_it_is_first_asked(install):
    older = "class Older:\n    place = why_not = judge = regroup = period_ms = None\n"
    install("stranger", "[rollmuxd.policies]\nolder = stranger_older:Older\n", "stranger_older", older)
    with pytest.raises(BrokenPlugin, match="stranger_older:Older lacks replan"):
        find("policy", "older")


def test_a_name_that_two_packages_claim_is_given_to_neither(install):
    install("stranger-one", "[rollmuxd.backends]\ntwin = stranger_one:Good\n", "stranger_one", GOOD)
    install("stranger-two", "[rollmuxd.backends]\ntwin = stranger_two:Good\n", "stranger_two", GOOD)
    with pytest.raises(BrokenPlugin, match="two packages claim this name") as broken:
        find("backend", "twin")
    assert "stranger-one 1.2" in str(broken.value)
    assert "stranger-two 1.2" in str(broken.value)


def test_nothing_is_imported_for_a_list_of_names(install):
    install("stranger", "[rollmuxd.backends]\nlate = stranger_late:Good\n", "stranger_late", "1 / 0")
    assert "late" in names("backend")
    assert "stranger_late" not in sys.modules
