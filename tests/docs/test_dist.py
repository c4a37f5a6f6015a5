"""The verdict on a release, with the installs left out: ``make dist`` does these."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def dist():
    spec = importlib.util.spec_from_file_location("dist", REPOSITORY / "tests" / "docs" / "dist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checked(dist, tmp_path, monkeypatch, capsys):
    """Check a release in which these steps do not work, on Pythons 3.11.9 and 3.14.1."""

    def stumble_if(stumbles, what):
        if stumbles:
            raise dist.newcomer.Stumbled(f"$ {what}\nexits with 1")

    def check(*stumbles):
        seen = []

        def install(package, python, checkout, home):
            seen.append((package.name, python, home.name))
            stumble_if((package.suffix, python) in stumbles, "rollmuxd demo")

        def build(folder, to):
            to.mkdir(exist_ok=True)
            for name in ("rollmuxd-9.tar.gz", "rollmuxd-9.whl"):
                (to / name).touch()
            return to / "rollmuxd-9.tar.gz", to / "rollmuxd-9.whl"

        monkeypatch.setenv("PIP_CACHE_DIR", "")
        monkeypatch.setattr(dist, "pythons", lambda words: {"3.11.9": "p11", "3.14.1": "p14"})
        monkeypatch.setattr(dist, "read_by_twine", lambda *words: stumble_if("twine" in stumbles, "twine check"))
        monkeypatch.setattr(dist.newcomer, "build", build)
        monkeypatch.setattr(dist.newcomer, "unpack", lambda archive, where: where)
        monkeypatch.setattr(dist.newcomer, "install", install)
        monkeypatch.setattr(dist.newcomer, "run_script", lambda *words: stumble_if("script" in stumbles, "sh"))
        status = dist.main(tmp_path / "dist")
        out, err = capsys.readouterr()
        return status, json.loads(out), seen, err

    return check


def test_a_release_works_from_both_files_on_every_python(checked, tmp_path):
    status, verdict, seen, _ = checked()
    assert (status, verdict) == (
        0,
        {
            "wheel": str(tmp_path / "dist" / "rollmuxd-9.whl"),
            "sdist": str(tmp_path / "dist" / "rollmuxd-9.tar.gz"),
            "pythons": ["3.11.9", "3.14.1"],
            "demo_from_wheel": True,
            "demo_from_sdist": True,
        },
    )
    assert len(seen) == len({home for _, _, home in seen}) == 4  # a home for each


def test_a_python_on_which_one_file_does_not_work_is_not_listed_and_the_others_are_tried(checked):
    status, verdict, seen, err = checked((".gz", "p11"))
    assert status == 1
    assert (verdict["pythons"], verdict["demo_from_wheel"], verdict["demo_from_sdist"]) == (["3.14.1"], True, False)
    assert len(seen) == 4
    assert "Python 3.11.9: demo and tutorial from rollmuxd-9.tar.gz: does not work\n$ rollmuxd demo" in err


@pytest.mark.parametrize("step", ["twine", "script"])
def test_what_the_object_has_no_key_for_is_a_miss_too(checked, step):
    status, verdict, _, _ = checked(step)
    assert (status, verdict["demo_from_wheel"], verdict["demo_from_sdist"]) == (1, True, True)


def test_one_python_of_each_version_is_used_and_those_that_cannot_make_environments_are_not(dist, tmp_path):
    def python(name, says):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
        return str(tmp_path / name)

    words = [
        python("first", "echo 3.12.1"), python("second", "echo 3.12.9"), python("too-old", "echo 3.9.1"),
        python("no-venv", "exit 1"), python("new", "echo 3.14.0"), "/nowhere/python3",
    ]  # fmt: skip
    assert dist.pythons(words) == {"3.12.1": str(tmp_path / "first"), "3.14.0": str(tmp_path / "new")}


def test_the_python_that_runs_this_is_found(dist):
    assert "{}.{}.{}".format(*sys.version_info) in dist.pythons([dist.newcomer.PYTHON])
