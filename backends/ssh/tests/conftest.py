"""Real SSH servers: OpenSSH's, and asyncssh's own, each with its own keys and a client's configuration for it."""

import asyncio
import contextlib
import json
import os
import signal

import asyncssh
import pytest
from networks import free_port
from ssh_servers import SSHD, Keys, OpenSshd

from rollmuxd_backend_local import asking

GPUS = [{"uuid": f"GPU-{number}", "name": "NVIDIA H20", "total_mb": 80_000} for number in range(2)]


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
        #: users that it lets in by no key
        self.refused = ()
        self._server = None
        self._children = []

    async def start(self):
        owner = self

        class Server(asyncssh.SSHServer):
            def connection_made(self, conn):
                owner.connections.append(conn)

            def begin_auth(self, username):
                if username in owner.refused:
                    owner.connections[-1].set_authorized_keys(asyncssh.import_authorized_keys(""))
                return True

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


@pytest.fixture(autouse=True)
def time_to_look(monkeypatch):
    """A look is a program on the host, which takes its time where the host is busy."""
    monkeypatch.setattr(asking, "LOOK_S", 600.0)
