"""Hosts for tests and for the demo: OpenSSH servers of one's own, each in a network namespace with its own address.

    python tests/shared/ssh_servers.py FOLDER HOST...

starts one for each host, and prints ``{"config": ..., "where": {...}}`` in one line when all of them listen. It serves
until it is ended, or the process that started it is gone. Namespaces need root and ``ip`` (iproute2); without, hosts
listen on ports of this machine. Needs ``sshd``; not its host keys, nor its configuration.
"""

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import asyncssh
from networks import Namespace, descendants, free_port, namespaces_can_be_made

#: where it is, which is not on everybody's path
SSHD: Final = shutil.which("sshd") or next((path for path in ("/usr/sbin/sshd",) if Path(path).exists()), None)
_LISTENS_S: Final = 120.0
_LOOK_S: Final = 0.5


class Keys:
    """A client's key, a server's key, and the ssh configuration that brings both together, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("client", "host", "stranger"):
            key = asyncssh.generate_private_key("ssh-ed25519")
            key.write_private_key(folder / name)
            key.write_public_key(folder / f"{name}.pub")
            (folder / name).chmod(0o600)
        self.known_hosts = folder / "known_hosts"
        self.config = folder / "config"
        self.known_hosts.touch()
        self.config.touch()

    def add(self, host: str, address: str, port: int, *more: str) -> None:
        """Write a host down, as a user does."""
        place = f"[{address}]:{port}" if port != 22 else address
        with self.known_hosts.open("a") as file:
            file.write(f"{place} {(self.folder / 'host.pub').read_text()}")
        lines = (
            f"Hostname {address}",
            f"Port {port}",
            f"User {getpass.getuser()}",
            f"IdentityFile {self.folder / 'client'}",
            f"UserKnownHostsFile {self.known_hosts}",
            "IdentitiesOnly yes",
            *more,
        )
        with self.config.open("a") as file:
            file.write(f"Host {host}\n" + "".join(f"  {line}\n" for line in lines))


class OpenSshd:
    """A real sshd, of this user, that can be stopped with all its connections, and started again."""

    def __init__(
        self,
        keys: Keys,
        address: str = "127.0.0.1",
        port: int = 0,
        namespace: Namespace | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._log = keys.folder / "sshd.log"
        self._namespace = namespace
        self.address = address if namespace is None else namespace.address
        self.port = port or (2222 if namespace is not None else free_port(address))
        self._config = keys.folder / f"sshd-{self.address}-{self.port}"
        authorized = keys.folder / "authorized_keys"
        authorized.write_text((keys.folder / "client.pub").read_text())
        lines = (
            f"ListenAddress {self.address}",
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
        self._config.write_text("".join(f"{line}\n" for line in lines))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it listens. Raises RuntimeError, with what it said."""
        if SSHD is None:
            raise RuntimeError("there is no sshd here; install openssh-server")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(parents=True, exist_ok=True)
        argv: tuple[str, ...] = (SSHD, "-D", "-e", "-f", str(self._config))
        if self._namespace is not None:
            argv = self._namespace.inside(*argv)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        give_up = time.monotonic() + _LISTENS_S
        while self.process.poll() is None and time.monotonic() < give_up:
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 0.2):
                return
            time.sleep(0.01)
        self.stop()
        raise RuntimeError(f"sshd does not listen: {self._log.read_text()[-1000:]}")

    def stop(self) -> None:
        """With every process of every connection: as a machine that is switched off."""
        if self.process is not None:
            for pid in descendants([self.process.pid]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def serving(folder: Path, hosts: Sequence[str]) -> Iterator[dict[str, str]]:
    """Servers for these hosts, in namespaces where these can be made; where each of them is."""
    keys = Keys(folder)
    apart = namespaces_can_be_made()
    where = {}
    with contextlib.ExitStack() as stack:
        for number, host in enumerate(hosts):
            namespace = None
            if apart:
                namespace = Namespace(number)
                stack.callback(namespace.remove)
                namespace.make()
            server = OpenSshd(keys, namespace=namespace)
            stack.callback(server.stop)
            server.start()
            keys.add(host, server.address, server.port)
            where[host] = f"{server.address} port {server.port}{' in a network namespace' if apart else ''}"
        yield where


def main(folder: str, *hosts: str) -> None:
    """Serve until SIGTERM, or the end of the process that started this."""
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        with serving(Path(folder), hosts) as where:
            sys.stdout.write(json.dumps({"config": str(Path(folder) / "config"), "where": where}) + "\n")
            sys.stdout.flush()
            while os.getppid() == parent:
                time.sleep(_LOOK_S)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
