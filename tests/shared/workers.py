"""Tests in several processes: ``-n 8`` forks eight workers when the tests are collected, so one process collects them.

A worker gets a run of consecutive tests, because these share fixtures, and the slow ones of its share come first. When
it has no test left it takes half of what another worker has left. When a worker dies, the test that it ran has failed.
A new worker runs the rest.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final

import pytest

#: what each worker does first
FIRST: Final[list[Callable[[], object]]] = []
#: how many tests a worker knows: the one that it runs, the next one, and one more, so that it never waits for us
AHEAD: Final = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    how = "the number of processes that run tests; 0: the tests run in this one"
    parser.getgroup("general")._addoption("-n", dest="workers", metavar="NUMBER", type=int, default=0, help=how)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    number = min(option.workers, len(session.items))
    if number < 1 or option.usepdb or option.collectonly or session.testsfailed:
        return None  # pytest's own loop
    temporary = session.config._tmp_path_factory  # type: ignore[attr-defined]
    temporary.getbasetemp()
    line = Run(session).to_its_end(number)
    return True if line is None else _work(session, line)


class Worker:
    """A worker, as seen by the process that has collected."""

    def __init__(self, pid: int, share: Sequence[int]) -> None:
        self.pid = pid
        #: the tests that it will get, and those that it knows
        self.share, self.known = deque(share), deque[int | None]()
        self.has_failures = False


class Run:
    """What all workers do together. A test is its index."""

    def __init__(self, session: pytest.Session) -> None:
        self.session = session
        self.workers: dict[Connection, Worker] = {}
        self.accidents: list[str] = []

    def to_its_end(self, number: int) -> Connection | None:
        """Run all tests. In each worker this returns its line to us; here it returns None."""
        try:
            return self._to_its_end(number)
        except BaseException:
            for line, worker in self.workers.items():
                line.close()  # its test is its last one
                os.waitpid(worker.pid, 0)
            raise

    def _to_its_end(self, number: int) -> Connection | None:
        for share in shares(self.session.items, number):
            if line := self._fork(share):
                return line
        while self.workers:
            for ready in wait(list(self.workers)):
                assert isinstance(ready, Connection)
                try:
                    told = ready.recv()
                except (EOFError, OSError):
                    if line := self._fork(self._ended(ready)):
                        return line
                else:
                    self._tell(self.workers[ready], told)
                    self.workers[ready].known.popleft()
                    self._give(ready)
        if self.accidents:
            raise RuntimeError("; ".join(self.accidents))
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)
        if self.session.shouldstop:
            raise self.session.Interrupted(self.session.shouldstop)
        return None

    def _fork(self, share: Sequence[int]) -> Connection | None:
        """Begin a worker for these tests, if there are any; its line to us, in the worker."""
        if not share:
            return None
        self.session.config.get_terminal_writer().flush()
        ours, its = Pipe()
        if (pid := os.fork()) == 0:
            for line in (ours, *self.workers):
                line.close()
            return its
        its.close()
        self.workers[ours] = Worker(pid, share)
        for _ in range(AHEAD):
            self._give(ours)
        return None

    def _give(self, line: Connection) -> None:
        """Let a worker know one test more; None is its last."""
        worker = self.workers[line]
        if worker.known and worker.known[-1] is None:
            return
        if self._stops():
            worker.share.clear()
        elif not worker.share:
            most = max(self.workers.values(), key=lambda other: len(other.share)).share
            worker.share.extendleft([most.pop() for _ in range((len(most) + 1) // 2)])
        worker.known.append(worker.share.popleft() if worker.share else None)
        with contextlib.suppress(OSError):  # it has died, which its line will tell
            line.send(worker.known[-1])

    def _tell(self, worker: Worker, told: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Tell pytest here what was told to pytest in a worker."""
        config = self.session.config
        for name, values in told:
            if data := values.pop("data", None):
                values["report"] = config.hook.pytest_report_from_serializable(config=config, data=data)
                worker.has_failures |= values["report"].failed
            getattr(config.hook, name)(**values)

    def _ended(self, line: Connection) -> list[int]:
        """Account for the end of a worker; the tests that it has left."""
        worker = self.workers.pop(line)
        line.close()
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        at, *left = [test for test in worker.known if test is not None] or [None]
        if at is None:
            if status != (pytest.ExitCode.TESTS_FAILED if worker.has_failures else pytest.ExitCode.OK):
                self.accidents.append(f"a worker had status {status} after its last test")
            return []
        item = self.session.items[at]
        why = f"the process that ran this test ended with status {status}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        self.session.config.hook.pytest_runtest_logreport(report=report)
        return [] if self._stops() else [*left, *worker.share]

    def _stops(self) -> bool:
        """Whether the run stops early: ``-x``."""
        return bool(self.session.shouldfail or self.session.shouldstop)


def shares(items: Sequence[pytest.Item], number: int) -> list[list[int]]:
    """Divide tests in equal shares. Each has its part of the slow tests first, so none of these runs alone at the end.

    Tests of one module stay together. A share has its largest slow module first and then the smallest, which have the
    longest tests.
    """
    modules: dict[str, list[int]] = {}
    others = []
    for index, item in enumerate(items):
        if item.get_closest_marker("slow"):
            modules.setdefault(item.nodeid.partition("::")[0], []).append(index)
        else:
            others.append(index)
    parts: list[list[list[int]]] = [[] for _ in range(number)]
    for tests in sorted(modules.values(), key=len, reverse=True):
        min(parts, key=lambda part: sum(map(len, part))).insert(1, tests)
    divided = [[test for tests in part for test in tests] for part in parts]
    rest, total = iter(others), len(items)
    for left, share in zip(range(number, 0, -1), divided, strict=True):
        share += islice(rest, max(0, total // left - len(share)))
        total -= len(share)
    divided[-1] += rest
    return divided


class Told:
    """What a worker has to tell of a test: reports and warnings, by the names of pytest's hooks."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.told: list[tuple[str, dict[str, Any]]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.told.append(("pytest_runtest_logreport", {"data": data}))

    def pytest_warning_recorded(self, warning_message: object, when: str, nodeid: str, location: object) -> None:
        values = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self.told.append(("pytest_warning_recorded", values))


class Silent:
    """In place of what writes to the terminal; a test that takes too long writes its stacks."""

    def __init__(self, writer: object) -> None:
        self._tw = writer


def _work(session: pytest.Session, line: Connection) -> bool:
    """Run tests in a worker: those that the line names, until it says that there are no more."""
    config, plugins = session.config, session.config.pluginmanager
    config.workerinput = {}  # type: ignore[attr-defined]  # plugins of pytest write their files where this is not
    silent, told = Silent(config.get_terminal_writer()), Told(config)
    plugins.unregister(name="terminalreporter")
    plugins.register(silent, "terminalreporter")
    plugins.register(told)
    if capture := plugins.getplugin("capturemanager"):  # into files of its own
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    temporary = config._tmp_path_factory  # type: ignore[attr-defined]
    temporary._basetemp = temporary.mktemp("worker")
    for function in FIRST:
        function()
    session.testsfailed = 0  # before it began
    following = _named(line)
    while (test := following) is not None:
        following = _named(line)
        nextitem = None if following is None else session.items[following]
        config.hook.pytest_runtest_protocol(item=session.items[test], nextitem=nextitem)
        with contextlib.suppress(BrokenPipeError):
            line.send(told.told)
        told.told.clear()
    return True


def _named(line: Connection) -> int | None:
    """The next test; None: there is no other, or the process that has collected has ended."""
    try:
        test: int | None = line.recv()
    except (EOFError, ConnectionResetError):
        return None
    return test
