"""For all tests, of all projects: they see nothing of the person who runs them.

That person's settings, keys and daemon are found by the home directory and by variables. Here the home directory is
empty, and the variables are not set.
"""

import asyncio
import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Generator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from rollmuxd.client.discovery import SYSTEM_SOCKET
from rollmuxd.wire import VARIABLES

for name in list(os.environ):
    # Those with two underscores are settings of the daemon.
    if name in VARIABLES or name.startswith("XDG_") or (name.startswith("ROLLMUX_") and "__" in name):
        del os.environ[name]
os.environ["HOME"] = tempfile.mkdtemp(prefix="rollmuxd-home-")
atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)
# Each client of httpx reads all certificates of the web, which takes 17 ms of processor time. No test calls the web, so
# they are looked for in an empty folder.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = tempfile.mkdtemp(dir=os.environ["HOME"])

# Threads of torch and numpy wait for one another in loops. Where all cores are busy, that is most of what they do.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

# A shell has programs in the background ignore Ctrl-C, and all that they start would ignore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# To format a traceback Python parses source. An exception that the collector finds is logged, and where that happens
# while another source is parsed, Python before 3.13 raises SystemError: so no source is parsed for marks under a line.
if sys.version_info < (3, 13):
    setattr(traceback, "_extract_caret_anchors_from_line_segment", lambda segment: None)  # noqa: B010

# The collector looks for cycles after each 700 new objects, which was a thirtieth of the time of tests that simulate.
gc.set_threshold(10_000, 20, 20)

# An example may take as long as it takes: the machine may be busy.
settings.register_profile("any machine", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# httpcore imports this several times for each request. Where it is not installed, each time looks through all of
# sys.path, which was half of the processor time of a call; None says at once that it is not there.
if find_spec("sniffio") is None:
    sys.modules["sniffio"] = None  # type: ignore[assignment]

# Where nothing has set logs up, structlog draws an exception with source and variables of each call, in colours.
# That takes a second of processor time for each one that a test has logged; a daemon writes plain tracebacks.
if find_spec("structlog") is not None:
    from structlog.dev import ConsoleRenderer, plain_traceback

    ConsoleRenderer.get_active().exception_formatter = plain_traceback

# looptime asks for "the" event loop before every test, synchronous ones too, and the policy would make one, which
# nobody closes. After this it makes none.
asyncio.set_event_loop(None)

#: how many modules there were when the garbage collector was last kept from them
frozen = {"modules": 0}


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run beside the machine's own daemon: tests that look for one would find it, and use it."""
    if Path(SYSTEM_SOCKET).exists():
        pytest.exit(f"a daemon of this machine listens at {SYSTEM_SOCKET}: stop it, then run the tests", returncode=2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Have each test module compiled once, before the workers of a fresh clone begin: each would compile them all."""
    if sys.dont_write_bytecode or config.args_source != pytest.Config.ArgsSource.TESTPATHS:
        return
    folders = [folder for pattern in config.getini("testpaths") for folder in config.rootpath.glob(pattern)]
    modules = [module for folder in folders for module in folder.rglob("test_*.py")]
    fresh = [str(module) for module in modules if not (module.parent / "__pycache__").exists()]
    cores = len(os.sched_getaffinity(0))
    compile_them = (sys.executable, "-m", "pytest", "-qq", "--collect-only")
    parts = [part for first in range(cores) if (part := fresh[first::cores])]
    for process in [subprocess.Popen([*compile_them, *part], stdout=subprocess.DEVNULL) for part in parts]:
        process.wait()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what is collected, which lives as long as the worker.

    To look through seven thousand tests takes it a third of a second, a dozen times while they are collected.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """Keep it away while what a module shares is made: that imports torch and TRL, a quarter of which it would take."""
    if fixturedef.scope != "module":
        return (yield)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_logfinish() -> None:
    """Keep it from what a test has imported, too: TRL has all garbage collected in each run, a third of a second."""
    if len(sys.modules) > frozen["modules"] + 200:
        gc.collect()
        gc.freeze()
        frozen["modules"] = len(sys.modules)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker begins with its share of the slow tests.

    So none of these runs alone at the end. Each worker gets an equal run of consecutive tests, and steals from the end
    of another's. Tests of one module stay together, because they share fixtures. A share has its largest module first
    and then the smallest, which have the longest tests.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    parts: list[list[list[pytest.Item]]] = [[] for _ in range(workers)]
    for tests in sorted(modules.values(), key=len, reverse=True):
        min(parts, key=lambda part: sum(map(len, part))).insert(1, tests)
    shares = [[item for tests in part for item in tests] for part in parts]
    others = iter([item for item in items if not item.get_closest_marker("slow")])
    total = len(items)
    for left, share in zip(range(workers, 0, -1), shares, strict=True):
        mine = [*islice(others, max(0, total // left - len(share)))]
        share += mine
        total -= len(share)
    items[:] = [*(item for share in shares for item in share), *others]
