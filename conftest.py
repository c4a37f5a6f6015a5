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
import sys
import tempfile
import traceback
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from rollmuxd.client.discovery import SYSTEM_SOCKET
from rollmuxd.wire import VARIABLES

for name in list(os.environ):
    # Those with two underscores are settings of the daemon.
    if name in VARIABLES or name.startswith("XDG_") or (name.startswith("ROLLMUX_") and "__" in name):
        del os.environ[name]


def an_empty_home() -> None:
    """Make one, for this process."""
    os.environ["HOME"] = tempfile.mkdtemp(prefix="rollmuxd-home-")
    atexit.unregister(shutil.rmtree)
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)
    # Each client of httpx reads all certificates of the web, which takes 17 ms of processor time. No test calls the
    # web, so they are looked for in an empty folder.
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = tempfile.mkdtemp(dir=os.environ["HOME"])


an_empty_home()

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

#: what runs tests in several processes
pytest_plugins = ("workers",)
#: how many modules there were when the garbage collector was last kept from them
frozen = {"modules": 0}


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run beside the machine's own daemon: tests that look for one would find it, and use it."""
    if Path(SYSTEM_SOCKET).exists():
        pytest.exit(f"a daemon of this machine listens at {SYSTEM_SOCKET}: stop it, then run the tests", returncode=2)
    config.pluginmanager.getplugin("workers").FIRST.append(an_empty_home)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what is collected, which lives as long as pytest.

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
