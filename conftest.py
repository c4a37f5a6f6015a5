"""For all tests, of all projects: they see nothing of the person who runs them.

That person's settings, keys and daemon are found by the home directory and by variables. Here the home directory is
empty, and the variables are not set.
"""

import asyncio
import atexit
import os
import shutil
import tempfile
from itertools import islice

import pytest
from hypothesis import HealthCheck, settings

from rollmuxd.client.discovery import VARIABLES

for name in list(os.environ):
    # Those with two underscores are settings of the daemon.
    if name in VARIABLES or name.startswith("XDG_") or (name.startswith("ROLLMUX_") and "__" in name):
        del os.environ[name]
os.environ["HOME"] = tempfile.mkdtemp(prefix="rollmuxd-home-")
atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

# An example may take as long as it takes: the machine may be busy.
settings.register_profile("any machine", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# looptime asks for "the" event loop before every test, synchronous ones too, and the policy would make one, which
# nobody closes. After this it makes none.
asyncio.set_event_loop(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker begins with its share of the slow tests, so that none of these runs alone at the end.

    Each worker gets an equal run of consecutive tests, and steals from the end of another's. Tests of one module stay
    together, because they share fixtures.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for tests in sorted(modules.values(), key=len, reverse=True):
        min(shares, key=len).extend(tests)
    others = iter([item for item in items if not item.get_closest_marker("slow")])
    total = len(items)
    for left, share in zip(range(workers, 0, -1), shares, strict=True):
        share.extend(islice(others, max(0, total // left - len(share))))
        total -= len(share)
    items[:] = [*(item for share in shares for item in share), *others]
