"""What all tests here share."""

import anyio
import anyio.lowlevel
import pytest
from patience import PATIENCE_S

from rollmuxd_backend_local import asking


@pytest.fixture(autouse=True, scope="session")
def anyio_is_there():
    """Its back-end is imported, and rewritten by pytest, at its first use: now, and not in the middle of a test.

    A garbage collection in there has made what pytest-asyncio leaves of an earlier loop an error of that import.
    """
    anyio.run(anyio.lowlevel.checkpoint)


@pytest.fixture(autouse=True)
def time_to_look(monkeypatch):
    """A look is a program on the host, which takes its time where the host is busy."""
    monkeypatch.setattr(asking, "LOOK_S", PATIENCE_S)
