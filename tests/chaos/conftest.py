"""The live tests' fixtures, here too (daemons and trainers: see ``tests/e2e/conftest.py``), and the oracle."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def loaded(path: Path) -> ModuleType:
    """A module of another folder of tests, which are no packages."""
    name = f"rollmuxd_tests_{path.parent.name}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


_e2e = loaded(Path(__file__).parents[1] / "e2e" / "conftest.py")
live, spares, pytest_pyfunc_call = _e2e.live, _e2e.spares, _e2e.pytest_pyfunc_call


@pytest.fixture
def oracle():
    return loaded(Path(__file__).with_name("oracle.py"))
