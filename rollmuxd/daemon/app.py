"""The daemon, put together. Read it from the top: this is the order in which things are made and taken down.

    settings -> journal -> policy, drivers and backends -> core, actuator, writer -> HTTP -> one task group

What would surprise:

- Signals are ours, not uvicorn's: it would raise them once more after it has stopped. The first SIGTERM or SIGINT lets
  calls end, writes a snapshot and exits with 0. The second one exits at once, which is safe.
- The state directory's lock is released last, and then the process ends, whatever its threads still do.
- Sockets are bound here, before the daemon reports anything: a port in use is a sentence, and not uvicorn's
  ``sys.exit``.
- Jobs do not notice a stop: what they hold is in the journal, and their clients ask again until the daemon is back.
"""

import contextlib
import errno
import gc
import importlib.util
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import anyio
import anyio.to_thread
import msgspec
import structlog
import uvicorn
from anyio.abc import TaskStatus

from rollmuxd.core.effects import Effect, Kill, Launch
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import Millis
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.daemon import files, logs, tracing
from rollmuxd.daemon.clock import SystemClock
from rollmuxd.daemon.files import Ready
from rollmuxd.daemon.hosts.actuator import Actuator
from rollmuxd.daemon.hosts.channel import ChannelHub
from rollmuxd.daemon.hosts.circuits import PORTS_S, Circuits, Misconfigured, ports_of
from rollmuxd.daemon.hosts.endings import Endings
from rollmuxd.daemon.hosts.observer import fill_in, watch
from rollmuxd.daemon.hosts.plugin_calls import said
from rollmuxd.daemon.http.app import make_app
from rollmuxd.daemon.http.listener import HANDSHAKE_S, Listener, Places
from rollmuxd.daemon.http.peer import ConnectionLimits, PeerHttpToolsProtocol
from rollmuxd.daemon.journal.file import JournalError, JournalFailed
from rollmuxd.daemon.journal.store import Journal
from rollmuxd.daemon.metrics import Metrics
from rollmuxd.daemon.services import Services
from rollmuxd.daemon.settings import (
    BadSettings,
    Settings,
    split_address,
    without_hosts,
)
from rollmuxd.daemon.tls import NoTls, Tls, open_tls
from rollmuxd.daemon.usage.daily import LiveUsage
from rollmuxd.daemon.writer import Unavailable, Writer
from rollmuxd.fabric.live import Wired
from rollmuxd.policies.observe import Watch
from rollmuxd.spi import (
    Backend,
    EndsSometime,
    FabricController,
    PluginError,
    Residency,
    StartsProcesses,
    discovery,
    environment,
)

log = structlog.get_logger("rollmuxd.daemon")

#: exit statuses: for errors that you have to correct, and for those that may pass by themselves (EX_TEMPFAIL). The
#: service is started again after the second, and not after the first: see deploy/rollmuxd.service
CANNOT, NOT_NOW = 2, 75
#: each report of a replay's progress extends the service manager's time limit for the start by this
REPLAY_GOES_ON_S: Final = 60
#: the service manager may have no room for a message just now: that the daemon is ready is sent again after this
TOLD_AGAIN_S: Final = 1.0
#: for how long the journal's threads may keep the interpreter while the loop waits for it: Python's own 5 ms exceed a
#: hand-over
SWITCH_S: Final = 0.0005
#: a clock that is so many days behind the last fact is wrong, or was wrong when that was written
CLOCK_DAYS: Final = 30
#: what a disk, a quota, the machine or its network, which may come up after us, may have to give a moment later
_PASSING: Final = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    *(errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.ENETDOWN),
)


class CannotStart(Exception):
    """The daemon cannot start as things are; says the remedy."""


# ---- the whole -----------------------------------------------------------------------------------------------------


async def serve(
    settings: Settings, *, on_ready: Callable[[Ready], None] | None = None, accept_clock: bool = False
) -> None:
    """Run a daemon until a signal stops it, or until this is cancelled.

    ``accept_clock``: start although this machine's clock is far behind the last fact.

    Raises:
        CannotStart: it could not start; says why, and what to do.
        BrokenInvariant: it has stopped because of a fault of its own; the journal has not seen it.
    """
    async with AsyncExitStack() as stack:
        with refused("", JournalError):
            journal = Journal.open(settings.daemon.state_dir)
        stack.push_async_callback(_shielded, journal.close)
        if not accept_clock:
            check_clock(journal.last_at)
        with refused(f"{settings.source}: ", NoTls):
            tls = open_tls(settings)
        environment.inherit(settings.daemon.inherit)
        sockets = stack.enter_context(listening(settings))
        hub = ChannelHub()
        drivers = await open_drivers(settings, hub, stack)
        backends = await open_backends(settings, stack)
        controllers = await open_fabrics(settings, stack)
        policy = make_policy(settings)
        config = settings.to_core_config(
            {name: driver.traits for name, driver in drivers.items()},
            [
                host.id
                for host in settings.hosts
                if isinstance(able := backends[host.backend], StartsProcesses) and able.starts_on(host.id)
            ],
        )
        clock = SystemClock()
        metrics = Metrics()
        spans = tracing.from_environment()
        if spans is not None:
            stack.push_async_callback(_shielded, partial(anyio.to_thread.run_sync, spans.close))

        today = LiveUsage(
            journal, lambda: writer.read(lambda core, now: (now, writer.last_seq)), settings.journal.keep_days
        )
        # The writer hands effects to the actuator, the actuator reports to the writer.
        actuator = Actuator(
            backends,
            drivers,
            state=lambda: writer.scheduler.state,
            post=lambda given: writer.post(given),  # noqa: PLW0108  # made below
            order_s=settings.limits.order_s,
            now=clock.now,
            environment={"ROLLMUX_URL": f"unix://{settings.daemon.socket_path.absolute()}"},
        )
        circuits = Circuits(controllers, lambda: writer.scheduler.state, journal.notes.left_alone)
        endings = Endings(
            {host.id: found for host in settings.hosts if isinstance(found := backends[host.backend], EndsSometime)},
            lambda: writer.scheduler.state,
            lambda given: writer.post(given),  # noqa: PLW0108  # made below
            settings.daemon.state_dir / "endings.json",
        )
        writer = Writer(
            lambda state: Scheduler(config, policy, state),
            journal,
            clock,
            actuator.perform if settings.daemon.mode == "share" else partial(touching_no_process, actuator.perform),
            await fill_in(settings.to_start(), backends),
            sinks=(
                logs.write_facts,
                metrics.sink,
                circuits.on_facts,
                *(() if spans is None else (spans.sink,)),
            ),
            prompt=(hub.on_facts, actuator.on_facts),
            begun=(metrics.begin, hub.begin, actuator.begin, circuits.begin),
            replaying=replaying,
            lease_ms=config.lease_ms,
        )
        services = Services(
            writer=writer,
            actuator=actuator,
            journal=journal,
            settings=settings,
            hub=hub,
            clock=clock,
            drivers=drivers,
            today=today,
            switches=circuits.switches,
        )

        with one_of_the_group_failed():
            async with anyio.create_task_group() as tasks:
                stopping = anyio.Event()
                await tasks.start(_until_signal, stopping)
                await tasks.start(actuator.run)
                async with anyio.create_task_group() as starting:
                    starting.start_soon(_leave_at, stopping, tasks.cancel_scope)
                    await tasks.start(writer.run)
                    starting.cancel_scope.cancel()
                hosts = [host.id for host in settings.hosts]
                tasks.start_soon(watch, hosts, settings.limits.observe_s, actuator.perform)
                for part in (circuits, endings, today):
                    tasks.start_soon(part.run)
                limits = connection_limits(settings)
                server = Server(make_app(services, metrics), sockets, settings.daemon.shutdown_s, limits, tls)
                await tasks.start(server.until_stopped)
                try:
                    ready = announce(settings, sockets, tls)
                except OSError:
                    # A daemon that comes back to a full disk has slots to release: its reserve is for that.
                    if not journal.spend_reserve():
                        raise
                    ready = announce(settings, sockets, tls)
                await tasks.start(tell_systemd)
                if on_ready is not None:
                    on_ready(ready)

                await stopping.wait()
                log.info("stopping", reason="told to")
                notify("STOPPING=1")
                writer.drain()
                hub.close()
                await server.stop()
                writer.stop()
                await writer.stopped.wait()
                tasks.cancel_scope.cancel()
    log.info("stopped")


def main(settings: Settings, *, accept_clock: bool = False) -> NoReturn:
    """Run a daemon in this process, and end the process with it. Uses uvloop where it is installed."""
    logs.set_up(settings.log.level, settings.log.format)
    raise_open_files()
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(5_000, 100, 50)  # a few milliseconds each; a thousand clients that wait are seldom looked at
    anyio.run(
        _until_exit,
        settings,
        accept_clock,
        backend_options={"use_uvloop": importlib.util.find_spec("uvloop") is not None},
    )
    raise AssertionError  # the process has ended


async def _until_exit(settings: Settings, accept_clock: bool) -> NoReturn:
    """Run a daemon, then exit at once.

    The state directory's lock is free by then. Python would still wait for every thread, and one of them may compute an
    answer for minutes: the process would live on without its lock.
    """
    status = 0
    try:
        await serve(settings, accept_clock=accept_clock)
    except (CannotStart, BadSettings) as error:
        status = NOT_NOW if may_pass(error) else CANNOT
        with contextlib.suppress(OSError):  # stderr may be a file on the disk that is full
            print(f"rollmuxd: {error}", file=sys.stderr)  # noqa: T201  # for the terminal
    except BrokenInvariant:
        status = 70  # EX_SOFTWARE; the log has it in full
    except Exception:  # Python's own end, without its wait
        sys.excepthook(*sys.exc_info())
        status = 1
    with contextlib.suppress(OSError):  # a closed pipe, or a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def may_pass(error: BaseException | None) -> bool:
    """Whether what keeps a daemon from starting may pass by itself: then the start is to be tried again."""
    while error is not None:
        # A wrong name looks like a name server that is down.
        if isinstance(error, JournalFailed | Unavailable | socket.gaierror) or _is_passing(error):
            return True
        error = error.__cause__
    return False


def _is_passing(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _PASSING


def raise_open_files() -> None:
    """Allow this process as many open files as it may have: each waiting client is one, and 1,024 is usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems give a hard limit that cannot be reached
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ---- what it is made of ----------------------------------------------------------------------------------------------


@contextmanager
def refused(where: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise CannotStart where one of these errors comes from within; it says where, and what the error says."""
    try:
        yield
    except kinds as error:
        raise CannotStart(f"{where}{error}") from error


def check_clock(last_at: Millis) -> None:
    """Raise CannotStart where this machine's clock is far behind the last fact: the daemon's time never goes back."""
    behind = (last_at - time.time() * 1000) / 86_400_000
    if behind > CLOCK_DAYS:
        last = time.strftime("%Y-%m-%d", time.gmtime(last_at / 1000))
        raise CannotStart(
            f"this machine's clock is {behind:.0f} days behind the last fact in the journal, of {last}: set the clock; "
            f"if it is right, restore a backup that was made before the wrong time, or give --accept-clock to "
            f"continue from {last}"
        )


async def open_drivers(settings: Settings, hub: ChannelHub, stack: AsyncExitStack) -> Mapping[str, Residency]:
    """All residency drivers that are installed: any job may name any of them. One that is broken hides none."""
    drivers: dict[str, Residency] = {}
    for name in discovery.names("residency"):
        try:
            with refused(f"{settings.source}: residency.{name}: ", ValueError):
                kind: type[Residency] = discovery.find("residency", name)
                driver = await kind.open(hub, settings.residency.get(name, {}))
        except PluginError as error:
            log.warning("driver_left_out", driver=name, reason=str(error))
            continue
        stack.push_async_callback(_shielded, driver.close)
        drivers[name] = driver
    if unknown := sorted(set(settings.residency) - set(drivers)):
        raise CannotStart(
            f'{settings.source}: residency.{unknown[0]}: residency driver "{unknown[0]}" is not installed '
            f"(installed: {', '.join(drivers) or 'none'})"
        )
    return drivers


async def open_backends(settings: Settings, stack: AsyncExitStack) -> Mapping[str, Backend]:
    """The backends that hosts name. Raises CannotStart where one is missing or refuses its options."""
    backends: dict[str, Backend] = {}
    for name in dict.fromkeys(host.backend for host in settings.hosts):
        options = settings.backends.get(name, {})
        where = f"{settings.source}: [backends.{name}] or [hosts.options]: "
        with refused(f"{settings.source}: hosts: ", PluginError), refused(where, ValueError):
            kind: type[Backend] = discovery.find("backend", name)
            if getattr(kind, "keeps_files", False):
                folder = settings.daemon.state_dir.absolute() / "backends" / name
                with refused("daemon.state_dir: ", OSError):
                    for one in (folder.parent, folder):
                        one.mkdir(mode=0o700, exist_ok=True)
                options = {"state_dir": str(folder), **options}
            backend = await kind.open(settings.host_configs(name), options)
        stack.push_async_callback(_shielded, backend.close)
        backends[name] = backend
    return backends


async def open_fabrics(settings: Settings, stack: AsyncExitStack) -> dict[str, tuple[str, FabricController, Wired]]:
    """Optical switches by name. One that is away is asked for its ports later, and holds up no start for long.

    Raises CannotStart where a driver is missing or refuses its options, or a cable ends at a port that cannot be used.
    """
    found: dict[str, tuple[str, FabricController, Wired]] = {}
    for number, switch in enumerate(settings.fabric):
        with refused(f"{settings.source}: fabric[{number}] ({switch.name}): ", PluginError, ValueError):
            kind: type[FabricController] = discovery.find("fabric", switch.driver)
            controller = await kind.open(switch.options)
        stack.push_async_callback(_shielded, controller.close)
        try:
            await ports_of(f"fabric[{number}]", controller, switch.ports, PORTS_S)
        except Misconfigured as error:
            raise CannotStart(f"{settings.source}: {error}") from error
        except Exception as error:
            log.warning("fabric_away", fabric=switch.name, reason=said(error))
        found[switch.name] = (switch.driver, controller, switch.ports)
    return found


def make_policy(settings: Settings) -> Any:
    """The policy that the settings name, with its options. Raises CannotStart."""
    if settings.daemon.mode == "observe":
        return Watch()
    name = settings.daemon.policy
    where = f"{settings.source}: policy.{name}: "
    with refused(f"{settings.source}: daemon.policy: ", PluginError), refused(where, TypeError, ValueError):
        return discovery.find("policy", name)(**settings.policy_options())


def touching_no_process(perform: Callable[[Sequence[Effect]], None], effects: Sequence[Effect]) -> None:
    """Perform all but what starts or ends processes: a daemon that only watches does neither."""
    for effect in effects:
        if isinstance(effect, Kill | Launch):
            log.info("not_done", job=effect.job, effect=type(effect).__name__, reason="mode observe")
    perform([effect for effect in effects if not isinstance(effect, Kill | Launch)])


@contextmanager
def one_of_the_group_failed() -> Iterator[None]:
    """Say the one thing that went wrong: a task group wraps it, and what else then fell over, into a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        for condition in (BrokenInvariant, JournalError, Unavailable, _is_passing):
            found: BaseException | None = group.subgroup(condition)
            while isinstance(found, BaseExceptionGroup):
                found = found.exceptions[0]
            if isinstance(found, BrokenInvariant):
                raise found from None
            if found is not None:
                raise CannotStart(str(found)) from found
        raise


async def _shielded(close: Callable[[], Any]) -> None:
    """Close something although this is being cancelled, but not for ever."""
    with anyio.move_on_after(10, shield=True):
        await close()


# ---- where it listens ------------------------------------------------------------------------------------------------


@contextmanager
def listening(settings: Settings) -> Iterator[Sequence[socket.socket]]:
    """Sockets that are bound, TCP and Unix. Raises CannotStart.

    The Unix socket's file outlives a daemon that was ready: its jobs hold what they held. A client that found no file
    there would run beside them on their GPUs. With the file, it waits for the next daemon.
    """
    with contextlib.ExitStack() as stack:
        sockets = []
        if settings.daemon.listen:
            sockets.append(stack.enter_context(_tcp(settings.daemon.listen)))
        path, found = settings.daemon.socket_path, settings.daemon.state_dir / "daemon.json"
        first = not os.path.exists(path)  # noqa: PTH110  (Path.exists raises where it may not look)
        sockets.append(stack.enter_context(_unix(path, int(settings.daemon.socket_mode, 8))))
        bound = path.stat()
        former = settings.daemon.state_dir / "rollmux.sock"
        if former.exists() and not former.samefile(path):  # of before daemon.socket was set: clients would wait there
            former.unlink()
        try:
            yield sockets
        finally:
            # Where the state directory was moved meanwhile, these may be another daemon's by now.
            never_ready = first and not found.exists()
            if never_ready or settings.daemon.mode == "observe":  # no job holds anything by it
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(path.stat(), bound):
                        path.unlink()
            mine = files.find(settings.daemon.state_dir)
            if mine is not None and mine.pid == os.getpid():
                found.unlink(missing_ok=True)


def _tcp(listen: str) -> socket.socket:
    host, port = split_address(listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except UnicodeError as error:
        raise CannotStart(f"daemon.listen: cannot listen on {listen}: {host} can be no name: {error}") from error
    except OSError as error:
        why = error.strerror
        if isinstance(error, socket.gaierror):
            why = f"{why}; if the network is up, set daemon.listen to an address instead of this name"
        elif error.errno in (errno.EADDRNOTAVAIL, errno.ENETDOWN):
            why = f"{why}; if the network is up, set daemon.listen to an address that this machine has (ip address)"
        elif error.errno == errno.EADDRINUSE:
            why = "another program listens there; stop it, or set daemon.listen to another port"
        raise CannotStart(f"daemon.listen: cannot listen on {listen}: {why}") from error
    bound.setblocking(False)
    return bound


def _unix(path: Path, mode: int) -> socket.socket:
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # the socket's own mode decides about access
        # The state directory is held: a socket there that does not answer was left by the daemon before.
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise CannotStart(f"daemon.socket: {path} is no socket; remove it, or set daemon.socket to another")
            if _answers(path):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        bound = _bound(path, mode)
    except OSError as error:
        why, remedy = error.strerror, ""
        if error.errno == errno.EADDRINUSE:
            why, remedy = "another program answers there", "; stop it, or set daemon.socket to another"
        elif error.errno in (errno.EACCES, errno.EPERM):
            remedy = f"; give the daemon's user its directory: install -d -o {os.geteuid()} -m 0755 {path.parent}"
        raise CannotStart(f"daemon.socket: cannot listen on {path}: {why}{remedy}") from error
    bound.setblocking(False)
    return bound


def _bound(path: Path, mode: int) -> socket.socket:
    """A socket that is bound there, in the place of one that no process uses.

    It is bound beside it and moved: a job that began while no file is there would run alone, on GPUs that others hold.
    """
    beside = path.with_name(f"{path.name}.new")
    beside.unlink(missing_ok=True)  # of a start that was killed
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)  # no process may connect before the mode is right
    try:
        bound.bind(str(beside))
        beside.chmod(mode)
        beside.replace(path)
    except BaseException:
        bound.close()
        beside.unlink(missing_ok=True)
        raise
    finally:
        os.umask(umask)
    return bound


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its queue is full: a program that is suspended has its socket still
            return True
        except OSError:
            return False
    return True


def announce(settings: Settings, sockets: Sequence[socket.socket], tls: Tls | None = None) -> Ready:
    """Say where the daemon is to be found, and by which certificate: in ``daemon.json``, and in the log."""
    url = None
    for bound in sockets:
        if bound.family != socket.AF_UNIX:
            host, port = bound.getsockname()[:2]
            scheme = "http" if tls is None else "https"
            url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    secured = {} if tls is None else {"certificate": str(tls.certificate)}
    ready = Ready(os.getpid(), files.started(os.getpid()) or "", url, str(settings.daemon.socket_path), **secured)
    files.write(settings.daemon.state_dir / "daemon.json", msgspec.json.encode(ready) + b"\n")
    if not settings.hosts:
        log.warning("no_hosts", reason=without_hosts(settings), remedy="every job will be refused; add [[hosts]]")
    log.info("ready", url=ready.url, socket=ready.socket, pid=ready.pid, hosts=len(settings.hosts), **secured)
    return ready


# ---- the HTTP server -------------------------------------------------------------------------------------------------


#: open files that are not connections: the journal, backends, what they start
OTHER_FILES: Final = 256


def connection_limits(settings: Settings) -> ConnectionLimits:
    """What a connection may cost. At most as many as there are files: without a free file nothing works.

    Of what the port leaves, half is for users of this machine, half for operators, the journal and backends.
    """
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most, local = settings.limits.max_connections, ConnectionLimits().max_local
    if open_files != resource.RLIM_INFINITY:
        if open_files - OTHER_FILES < most:
            most = max(open_files // 2, open_files - OTHER_FILES)
        local = min(local, (open_files - most) // 2)
    return ConnectionLimits(max_connections=most, max_local=local, read_s=settings.limits.read_s)


class Server(uvicorn.Server):
    """uvicorn, embedded: on sockets that are ours, and stopped when we say so."""

    def __init__(
        self,
        app: Any,
        sockets: Sequence[socket.socket],
        shutdown_s: float,
        limits: ConnectionLimits,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # no code asks where a call is from
                backlog=2048,
                # Idle connections of clients stay open between heartbeats.
                timeout_keep_alive=75,
                # Without it, one parked long poll would block the end for ever.
                timeout_graceful_shutdown=max(1, round(shutdown_s)),
            )
        )
        self._sockets, self._limits, self._tls = list(sockets), limits, tls
        #: called when it takes connections
        self._listens: Callable[[], None] = lambda: None
        self._stopped = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        listeners: list[Any] = self.servers
        of_all = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        make = partial(PeerHttpToolsProtocol, limits=self._limits, **of_all)
        everywhere, local = Places(self._limits.max_connections), Places(self._limits.max_local)
        for bound in self._sockets:
            # An operator is to come in whatever happens at the port, and needs no TLS to get to the same machine.
            places, tls = (everywhere, self._tls) if bound.family != socket.AF_UNIX else (local, None)
            context = None if tls is None else tls.context
            listener = Listener(bound, make, places, context, min(HANDSHAKE_S, self._limits.read_s))
            listener.open(self.config.backlog)
            listeners.append(listener)
        self._listens()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: they are ours."""
        yield

    async def until_stopped(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until :meth:`stop`. Started when it takes connections."""
        served, self._listens = False, task_status.started
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._hang_up_slow)
                await self.serve(sockets=self._sockets)
                served = True
                tasks.cancel_scope.cancel()
        finally:
            if not served and self.started:
                # uvicorn's connections are tasks of the loop, not of our group: cancelling that does not end them.
                self.config.timeout_graceful_shutdown = 1
                with anyio.move_on_after(5, shield=True):
                    await self.shutdown(sockets=self._sockets)
            self._stopped.set()

    async def _hang_up_slow(self) -> None:
        """A microsecond for each connection, several times within ``read_s``."""
        while True:
            await anyio.sleep(self._limits.read_s / 4)
            connections: list[Any] = list(self.server_state.connections)
            for connection in connections:
                connection.hang_up_if_slow(anyio.current_time())

    async def stop(self) -> None:
        """Take no further connections; let calls end, in the time that they have."""
        self.should_exit = True
        await self._stopped.wait()


# ---- signals, systemd ------------------------------------------------------------------------------------------------


async def _until_signal(stopping: anyio.Event, *, task_status: TaskStatus[None]) -> None:
    """Set the event at the first signal; leave at the second, without ceremony: the journal is whole at any instant."""
    heard = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # it is where nohup started us
        heard.append(signal.SIGHUP)
    try:
        with anyio.open_signal_receiver(*heard) as signals:
            task_status.started()
            async for received in signals:
                if received == signal.SIGUSR1:  # by Slurm's --signal, some time before the end, which is known
                    log.info("signal_ignored", signal=received.name)
                    continue
                if stopping.is_set() and received == signal.SIGHUP:
                    continue  # a terminal that closes may send two
                if stopping.is_set():
                    log.warning("stopped_at_once", signal=received.name)
                    os._exit(128 + received)
                log.info("signal", signal=received.name)
                stopping.set()
    except (ValueError, RuntimeError):
        # Not in the main thread (a test): there it is stopped by cancelling it.
        task_status.started()


async def _leave_at(stopping: anyio.Event, everything: anyio.CancelScope) -> None:
    """End a daemon that replays its journal at the first signal: nothing has begun that would need an end."""
    await stopping.wait()
    log.info("stopping", reason="told to, before it was ready")
    notify("STOPPING=1")
    everything.cancel()


def replaying(done: int, of: int) -> None:
    """Say how far a long replay is: in the log, and to the service manager, which would else take it for stuck."""
    log.info("replaying", facts=done, of=of)
    notify(f"EXTEND_TIMEOUT_USEC={REPLAY_GOES_ON_S * 1_000_000}\nSTATUS={done:,} of {of:,} facts are replayed")


def notify(what: str) -> bool:
    """Tell systemd, if it has started us (see ``man sd_notify``). False: it could not be told just now."""
    if where := os.environ.get("NOTIFY_SOCKET"):
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
                to.setblocking(False)
                to.connect("\0" + where[1:] if where.startswith("@") else where)
                to.sendall(what.encode())
        except (ConnectionRefusedError, FileNotFoundError):
            return True  # no service manager listens, and none misses it
        except OSError:
            return False
    return True


async def tell_systemd(*, task_status: TaskStatus[None]) -> None:
    """Let systemd know that the daemon is ready; and then that its loop lives.

    Three times in the time that systemd has set: one message may be lost.
    """
    heard = notify("READY=1")
    task_status.started()
    while not heard:
        await anyio.sleep(TOLD_AGAIN_S)
        heard = notify("READY=1")
    wanted_us = int(os.environ.get("WATCHDOG_USEC") or 0)
    if not wanted_us or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        notify("WATCHDOG=1")
        await anyio.sleep(wanted_us / 3_000_000)
