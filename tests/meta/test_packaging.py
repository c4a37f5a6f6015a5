"""There is one distribution: its wheel has every package of this repository, its source archive every file."""

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
#: every package of ours, by its path
PACKAGES = ["rollmuxd"] + sorted(
    str(found.parent.relative_to(REPOSITORY))
    for folder in ("backends", "plugins")
    for found in (REPOSITORY / folder).glob("*/rollmuxd_*/__init__.py")
)
NAMES = [Path(path).name for path in PACKAGES]


def test_every_package_is_in_the_wheel_and_is_checked():
    tool = PROJECT["tool"]
    assert tool["hatch"]["build"]["targets"]["wheel"]["packages"] == PACKAGES
    assert tool["mypy"]["files"] == [*PACKAGES, "tests/simkit"]
    assert sorted(tool["coverage"]["run"]["source_pkgs"]) == sorted(NAMES)
    assert sorted(tool["importlinter"]["root_packages"]) == sorted(NAMES)


def test_no_package_of_ours_has_a_project_of_its_own():
    assert [*REPOSITORY.glob("backends/*/pyproject.toml"), *REPOSITORY.glob("plugins/*/pyproject.toml")] == []


def test_the_command_line_comes_with_a_click_that_it_runs_on():
    # 8.4 is the first whose types may be said (`ParamType[int]`), and that names a group's nearest command.
    extras = PROJECT["project"]["optional-dependencies"]

    assert "click>=8.4" in extras["daemon"]


def test_the_base_install_is_the_client_and_all_extras_but_ray_are_in_all():
    extras = PROJECT["project"]["optional-dependencies"]
    assert [re.match(r"\w+", one)[0] for one in PROJECT["project"]["dependencies"]] == ["httpx", "msgspec"]
    (everything,) = extras["all"]
    for_users = sorted(set(extras) - {"all", "dev", "ray", "web"})
    assert everything == f"rollmuxd[{','.join(for_users)}]"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling is not installed: make setup")
    dist = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "hatchling", "build", "--directory", dist]
    ran = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return dist


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("*.whl")
    return found


def files_of_git(*where):
    ran = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *where],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    if ran.returncode:
        pytest.skip("this is not a checkout of git")
    return {line for line in ran.stdout.splitlines() if (REPOSITORY / line).exists()}


def test_the_source_archive_has_every_file_that_git_has(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert names - {"PKG-INFO"} == files_of_git()


def test_the_wheel_has_every_file_of_every_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = set()
    for path in PACKAGES:
        folder = Path(path).parent
        expected |= {str(Path(name).relative_to(folder)) for name in files_of_git(path)}
    assert names == expected


def test_what_an_index_shows_of_the_wheel_can_be_followed(wheel):
    (metadata,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")]
    told = email.message_from_bytes(zipfile.ZipFile(wheel).read(metadata))
    assert {line.partition(",")[0] for line in told.get_all("Project-URL")} >= {"Homepage", "Documentation", "Issues"}
    assert "Programming Language :: Python :: 3.14" in told.get_all("Classifier")
    shown = re.sub(r"^```.*?^```", "", told.get_payload(), flags=re.MULTILINE | re.DOTALL)
    assert [link for link in re.findall(r"\]\(([^)]+)\)", shown) if not link.startswith("https://")] == []


@pytest.mark.slow
@pytest.mark.e2e
def test_the_demo_runs_from_the_wheel(wheel, tmp_path):
    pytest.importorskip("numpy", reason="numpy is not installed: make setup")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX", "PYTHON"))}
    env = {**kept, "HOME": str(tmp_path), "PYTHONPATH": str(installed)}
    python = [sys.executable, "-P"]

    where = subprocess.run([*python, "-c", "import rollmuxd; print(rollmuxd.__file__)"], cwd=tmp_path, env=env,
                           capture_output=True, text=True)  # fmt: skip
    assert where.stdout.startswith(str(installed)), where.stderr

    words = [*python, "-m", "rollmuxd", "demo", "--json", "--iterations", "2", "--scale", "0.02", "--no-sequential"]
    ran = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["violations"] == []
