"""Real SSH servers: OpenSSH's, and asyncssh's own, each with its own keys and a client's configuration for it."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import asyncssh
import pytest

SSHD = shutil.which("sshd") or next((path for path in ("/usr/sbin/sshd",) if Path(path).exists()), None)
GPUS = [{"uuid": f"GPU-{number}", "name": "NVIDIA H20", "total_mb": 80_000} for number in range(2)]


def free_port(address="127.0.0.1"):
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


class Keys:
    """A client's key, a server's key, and the ssh configuration that brings both together."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("client", "host", "stranger"):
            key = asyncssh.generate_private_key("ssh-ed25519")
            key.write_private_key(folder / name)
            key.write_public_key(folder / f"{name}.pub")
            (folder / name).chmod(0o600)
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.touch()
        self.config = folder / "config"
        self.config.touch()

    def add(self, host, address, port, *more):
        """A host, as a user writes it down."""
        place = f"[{address}]:{port}" if port != 22 else address
        with self.known_hosts.open("a") as file:
            file.write(f"{place} {(self.folder / 'host.pub').read_text()}")
        with self.config.open("a") as file:
            lines = (
                f"Hostname {address}",
                f"Port {port}",
                f"User {os.environ.get('USER') or 'root'}",
                f"IdentityFile {self.folder / 'client'}",
                f"UserKnownHostsFile {self.known_hosts}",
                "IdentitiesOnly yes",
                *more,
            )
            file.write(f"Host {host}\n" + "".join(f"  {line}\n" for line in lines))


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path)


@pytest.fixture
def made_up(tmp_path):
    """A file of GPUs for the hosts; a function that writes others into it."""
    path = tmp_path / "gpus.json"

    def write(gpus=None, **more):
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps({"gpus": gpus if gpus is not None else GPUS, **more}))
        beside.replace(path)
        return str(path)

    write()
    return write


class OpenSshd:
    """A real sshd, of this user, that can be stopped with all its connections, and started again."""

    def __init__(self, keys, address="127.0.0.1", port=None, netns="", options=()):
        self.keys, self.address, self.netns = keys, address, netns
        self.port = port or free_port()
        self.config = keys.folder / f"sshd-{address}-{self.port}"
        authorized = keys.folder / "authorized_keys"
        authorized.write_text((keys.folder / "client.pub").read_text())
        lines = (
            f"ListenAddress {address}",
            f"Port {self.port}",
            f"HostKey {keys.folder / 'host'}",
            f"AuthorizedKeysFile {authorized}",
            "StrictModes no",
            "UsePAM no",
            "SetEnv SHLVL=1",  # or bash would read ~/.bashrc each time, whatever may be in it
            "PidFile none",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            *options,
        )
        self.config.write_text("".join(f"{line}\n" for line in lines))
        self.process = None

    def start(self):
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)
        inside = ["ip", "netns", "exec", self.netns] if self.netns else []
        argv = [*inside, SSHD, "-D", "-e", "-f", str(self.config)]
        with (self.keys.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stderr=log, start_new_session=True)
        for _ in range(500):
            assert self.process.poll() is None, (self.keys.folder / "sshd.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 0.2):
                return
            time.sleep(0.01)
        raise AssertionError("sshd does not listen")

    def stop(self):
        """With every process of every connection: as a machine that is switched off."""
        if self.process is None:
            return
        for pid in _descendants(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


def _descendants(top):
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [top]
    for one in found:
        found.extend(pid for pid, parent in parents.items() if parent == one)
    return found


@pytest.fixture
def sshd(keys):
    """A function that starts an sshd; skipped where there is none."""
    if SSHD is None:
        pytest.skip("there is no sshd here; install openssh-server")
    if os.geteuid() != 0 and not os.access("/run/sshd", os.X_OK):
        pytest.skip("sshd needs the folder /run/sshd")
    running = []

    def start(**more):
        server = OpenSshd(keys, **more)
        running.append(server)
        server.start()
        return server

    yield start
    for server in running:
        server.stop()


class OwnServer:
    """asyncssh's server, with a shell behind it; it can be slow, noisy, or gone."""

    def __init__(self, keys):
        self.keys = keys
        self.port = free_port()
        #: awaited before a command is begun
        self.before = None
        #: what the login shell says before
        self.noise = b""
        #: a function from a command to the one that is run
        self.instead = None
        #: commands as they came
        self.commands = []
        self.connections = []
        self._server = None
        self._children = []

    async def start(self):
        owner = self

        class Server(asyncssh.SSHServer):
            def connection_made(self, conn):
                owner.connections.append(conn)

            def connection_requested(self, dest_host, dest_port, orig_host, orig_port):
                return True

        self._server = await asyncssh.create_server(
            Server,
            "127.0.0.1",
            self.port,
            server_host_keys=[str(self.keys.folder / "host")],
            authorized_client_keys=str(self.keys.folder / "client.pub"),
            process_factory=self._run,
            encoding=None,
            keepalive_interval=0,
        )

    async def stop(self):
        """With every connection."""
        if self._server is not None:
            self._server.close()
            for connection in self.connections:
                connection.abort()
            await self._server.wait_closed()
            self._server = None
        self.connections.clear()
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
        self._children.clear()

    async def _run(self, process):
        self.commands.append(process.command)
        if self.before is not None:
            await self.before()
        if self.noise:
            process.stdout.write(self.noise)
        command = self.instead(process.command) if self.instead else process.command
        child = await asyncio.create_subprocess_exec(
            "sh", "-c", command, stdin=-1, stdout=-1, stderr=-1, start_new_session=True
        )
        self._children.append(child)
        feeding = asyncio.create_task(_pump(process.stdin, child.stdin, close=True))
        await asyncio.gather(_pump(child.stdout, process.stdout), _pump(child.stderr, process.stderr))
        code = await child.wait()
        feeding.cancel()
        if code < 0:
            process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
        else:
            process.exit(code)


async def _pump(source, sink, *, close=False):
    with contextlib.suppress(OSError, asyncssh.Error):
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
    if close:
        sink.close()


@pytest.fixture
def own_servers(keys):
    """A function that makes asyncssh's servers, to be started and stopped in the test."""
    return lambda: OwnServer(keys)


@pytest.fixture
def own_server(own_servers):
    """One of them."""
    return own_servers()
