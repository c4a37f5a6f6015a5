"""What the hooks look at before training starts: a release that they do not know is refused, with what is different."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from rollmuxd_hook_kit.contract import UnknownFramework, differences, facts_under, look_at, version_of
from rollmuxd_hooks.contract import CONTRACTS, OPENRLHF

HERE = Path(__file__).parent
FRAMEWORKS = Path(sys.prefix) / "frameworks"
RECORDED = {
    contract.framework: json.loads((HERE / f"facts-{contract.framework.lower()}.json").read_text())
    for contract in CONTRACTS
}
#: as .ci/run downloads them
ON_THE_INDEX = ["openrlhf==0.10.4", "openrlhf==0.11.2", "skyrl==0.2.0", "skyrl==0.3.0", "areal==1.0.4"]
BY_TAG = ["slime==0.2.4", "slime==0.3.1", "prime-rl==0.7.0", "prime-rl==0.8.0"]
RELEASES = [(contract, version) for contract in CONTRACTS for version in RECORDED[contract.framework]]
NEWEST = [(contract, next(reversed(RECORDED[contract.framework]))) for contract in CONTRACTS]


def named(value):
    return value if isinstance(value, str) else value.framework


@pytest.mark.parametrize(("contract", "version"), RELEASES, ids=named)
def test_a_release_that_was_looked_at_is_taken(contract, version):
    assert differences(contract, version, RECORDED[contract.framework][version]) == []


def test_of_each_framework_at_least_two_releases_were_looked_at():
    assert [named(contract) for contract in CONTRACTS if len(RECORDED[contract.framework]) < 2] == []


@pytest.mark.parametrize("release", ON_THE_INDEX + BY_TAG)
def test_what_is_recorded_of_a_release_is_what_is_in_it(release):
    package, version = release.split("==")
    (contract,) = (contract for contract in CONTRACTS if contract.framework.lower() == package)
    root = FRAMEWORKS / f"{package}-{version}"
    if not root.is_dir():
        pytest.skip(f'{release} is not here: make drift ARGS="--keep .venv/frameworks {release}"')
    assert facts_under(root, contract) == RECORDED[contract.framework][version]


@pytest.mark.parametrize(("contract", "version"), NEWEST, ids=named)
def test_each_method_that_is_gone_or_asks_for_more_is_named(contract, version):
    facts = RECORDED[contract.framework][version]
    for key, name in [(key, name) for key, what in facts.items() for name in what["methods"]]:
        gone, more = copy.deepcopy(facts), copy.deepcopy(facts)
        del gone[key]["methods"][name]
        more[key]["methods"][name]["parameters"].insert(0, "stranger")
        assert any(f" {name}" in difference for difference in differences(contract, version, gone))
        (said,) = differences(contract, version, more)
        assert f"{name} is known as (" in said
        assert "stranger" in said


@pytest.mark.parametrize(("contract", "version"), NEWEST, ids=named)
def test_a_call_that_is_no_longer_made_is_named(contract, version):
    facts = RECORDED[contract.framework][version]
    for what in contract.classes:
        for name, method in what.methods.items():
            for call in method.calls:
                other = copy.deepcopy(facts)
                other[what.key]["methods"][name]["calls"].remove(call)
                (said,) = differences(contract, version, other)
                assert said.endswith(f"{name} does not call {call}")


@pytest.mark.parametrize(("contract", "version"), NEWEST, ids=named)
def test_a_release_to_come_is_refused_though_nothing_differs(contract, version):
    (said,) = differences(contract, "99.0", RECORDED[contract.framework][version])
    assert said.startswith(f"the hook knows {contract.framework} ")
    assert said.endswith("and this is 99.0")


# ---- what is installed -----------------------------------------------------------------------------------------------


def under(package):
    """The contract of OpenRLHF, were it a package of this name."""
    return OPENRLHF._replace(
        classes=tuple(known._replace(path=f"{package}/{known.path.partition('/')[2]}") for known in OPENRLHF.classes)
    )


def test_without_the_framework_the_refusal_says_so():
    with pytest.raises(UnknownFramework, match="is for OpenRLHF, and there is no package noopenrlhf here") as refused:
        look_at(under("noopenrlhf"))
    assert f"install OpenRLHF 0.10 to 0.11 for {sys.executable}, or start the Python that has it" in str(refused.value)


@pytest.mark.parametrize("hook", ["openrlhf", "skyrl", "prime_rl"])
def test_a_hook_that_is_run_by_itself_ends_with_the_refusal_alone(hook, tmp_path):
    (tmp_path / hook).mkdir()
    (tmp_path / hook / "__init__.py").touch()  # a framework that is none
    ended = subprocess.run(
        [sys.executable, "-m", f"rollmuxd_hooks.{hook}"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"rollmuxd_hooks.{hook} cannot tell when this ")
    assert "or take the hook out again: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_framework_that_differs_is_refused_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "otherrlhf").mkdir()
    (tmp_path / "otherrlhf" / "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnknownFramework) as refused:
        look_at(under("otherrlhf"))
    assert "the hook knows OpenRLHF 0.10 to 0.11, and this is unknown; there is no otherrlhf/trainer" in str(
        refused.value
    )
    assert str(refused.value).endswith("or take the hook out again: python -m openrlhf.cli.train_ppo_ray")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", '[project]\nname = "some"\nversion = "0.3.1"\n'),
        ("setup.py", 'setup(\n    name="some",\n    version="0.3.1",\n)'),
    ],
)
def test_a_checkout_that_is_not_installed_says_what_it_is(tmp_path, name, text):
    assert version_of("no-such-package", tmp_path) == ""
    (tmp_path / name).write_text(text)
    assert version_of("no-such-package", tmp_path) == "0.3.1"


def test_what_is_installed_is_asked_first():
    assert version_of("pytest", HERE) == pytest.__version__


def test_the_class_behind_an_actor_of_ray_is_where_the_hook_for_openrlhf_looks():
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install ray")

    class Base:
        def __init__(self, said):
            self.said = said

    @ray.remote
    class Trainer(Base):
        def __init__(self, said):
            super().__init__(said + " twice")

    made = Trainer.__ray_metadata__.modified_class("once")
    assert made.said == "once twice"
