"""Where ``make drift`` looks for releases of a framework that is on no package index."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollmuxd_hook_kit.contract import Class, Contract, Method, differences

if shutil.which("git") is None:
    pytest.skip("git is not installed", allow_module_level=True)

LOOP = Class(path="some/loop.py", name="", methods={"run": Method(("config",))})


@pytest.fixture(scope="module")
def drift():
    spec = importlib.util.spec_from_file_location("drift", Path(__file__).with_name("drift.py"))
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture
def repository(tmp_path):
    """Releases as tags: 0.9.0 has another loop than 0.10.0; and one that is none."""
    root = tmp_path / "repository"

    def git(*words):
        who = ("-c", "user.name=some", "-c", "user.email=some@example.org", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)

    (root / "some").mkdir(parents=True)
    git("init", "-q")
    for version, text in (("0.9.0", "def run(): ..."), ("0.10.0", "def run(config): ...")):
        (root / "some" / "loop.py").write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", version)
        git("tag", f"v{version}")
    git("tag", "v9-nightly")
    return root.as_uri()


def contract(address):
    return Contract("Some", "", "rollmuxd_hooks.some", ((0, 9), (1, 0)), (LOOP,), "unset SOME", repository=address)


def test_the_newest_tag_of_a_release_is_the_newest_by_its_numbers(drift, repository):
    some = contract(repository)
    version, facts = drift.of_release(some, None)
    assert version == "0.10.0"
    assert differences(some, version, facts) == []


def test_a_release_that_is_asked_for_is_read_and_kept(drift, repository, tmp_path):
    some = contract(repository)
    version, facts = drift.of_release(some, "0.9.0", tmp_path / "kept")
    assert differences(some, version, facts) == ["some/loop.py.run is known as (config), not ()"]
    assert (tmp_path / "kept" / "some-0.9.0" / "some" / "loop.py").read_text() == "def run(): ..."


def test_what_cannot_be_had_is_said(drift, tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        drift.of_release(contract((tmp_path / "nowhere").as_uri()), None)
