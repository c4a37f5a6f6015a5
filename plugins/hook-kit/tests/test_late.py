"""A hook that a framework loads before its own trainer gets to see the trainer once it is there."""

import importlib
import inspect
import sys

import pytest

from rollmuxd_hook_kit.late import when_imported


@pytest.fixture
def framework(tmp_path, monkeypatch):
    """A package with a module that nobody has imported."""
    (tmp_path / "someframework").mkdir()
    (tmp_path / "someframework" / "__init__.py").write_text("")
    (tmp_path / "someframework" / "trainer.py").write_text("class Trainer:\n    kind = 'plain'\n")
    (tmp_path / "someframework" / "main.py").write_text("from someframework.trainer import Trainer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("someframework")]:
        del sys.modules[name]


def hooked(module):
    module.Trainer = type("Trainer", (module.Trainer,), {"kind": "hooked"})


@pytest.mark.usefixtures("framework")
def test_whoever_imports_a_module_sees_what_was_made_of_it():
    when_imported("someframework.trainer", hooked)
    assert importlib.import_module("someframework.main").Trainer.kind == "hooked"


@pytest.mark.usefixtures("framework")
def test_a_module_that_is_there_already_is_seen_at_once():
    module = importlib.import_module("someframework.trainer")
    when_imported("someframework.trainer", hooked)
    assert module.Trainer.kind == "hooked"


@pytest.mark.usefixtures("framework")
def test_a_refusal_is_raised_where_the_module_is_imported():
    def refuse(_):
        raise ImportError("not this one")

    when_imported("someframework.trainer", refuse)
    with pytest.raises(ImportError, match="not this one"):
        importlib.import_module("someframework.main")


@pytest.mark.usefixtures("framework")
def test_the_module_keeps_its_source_and_its_loader():
    seen = []
    when_imported("someframework.trainer", seen.append)
    module = importlib.import_module("someframework.trainer")
    assert seen == [module]
    assert "class Trainer" in inspect.getsource(module)
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader
