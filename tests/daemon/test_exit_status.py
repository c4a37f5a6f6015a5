"""With what a daemon ends that cannot start: a service manager tries again what may pass by itself, and only that."""

import errno
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import forked
import pytest
from patience import PATIENCE_S

from rollmuxd.daemon.app import CannotStart, may_pass
from rollmuxd.daemon.journal.file import JournalDamaged, JournalFailed, JournalRefused, error_of
from rollmuxd.daemon.journal.store import Journal

UNIT = (Path(__file__).parents[2] / "deploy" / "rollmuxd.service").read_text()


def run(folder, *, before="", text="", listen=""):
    """``rollmuxd daemon run`` on this state directory, until it has ended by itself."""
    (folder / "rollmux.toml").write_text(f'[daemon]\nstate_dir = "{folder}/state"\nlisten = "{listen}"\n{text}')
    program = (
        f"import errno, os, sqlite3\n{before}\n"
        f"import sys; sys.argv = ['rollmuxd', 'daemon', 'run', '--config', '{folder}/rollmux.toml']\n"
        "from rollmuxd.cli.main import main; main()\n"
    )
    ran = forked.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    return ran.returncode, ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_closes_stops_a_daemon_unless_it_was_started_with_nohup(tmp_path, nohup):
    (tmp_path / "rollmux.toml").write_text(f'[daemon]\nstate_dir = "{tmp_path}/state"\nlisten = ""\n')
    words = [sys.executable, "-m", "rollmuxd", "daemon", "run", "--config", str(tmp_path / "rollmux.toml")]
    # What these tests were started with may ignore the signal: whatever it starts would inherit that.
    hears = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", hears, *["nohup"][: int(nohup)], *words]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as ran:
        try:
            until = time.monotonic() + PATIENCE_S
            while not (tmp_path / "state" / "daemon.json").exists():
                assert ran.poll() is None, ran.stdout.read()
                assert time.monotonic() < until
                time.sleep(0.05)
            ran.send_signal(signal.SIGHUP)
            if nohup:
                ignored = re.search(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{ran.pid}/status").read_text(), re.MULTILINE)
                assert int(ignored[1], 16) & 1 << signal.SIGHUP - 1
                ran.send_signal(signal.SIGTERM)
            else:
                ran.send_signal(signal.SIGHUP)  # from the shell and from the kernel
            assert ran.wait(PATIENCE_S) == 0, ran.stdout.read()
            assert b"stopped" in ran.stdout.read()
        finally:
            ran.kill()


#: stands in for a disk that has no room: the file system says so to whoever writes
FULL = """
from rollmuxd.daemon.journal import file
def full(path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
file.prepare = full
"""


def test_a_disk_that_is_full_at_the_start_is_tried_again_by_the_service(tmp_path):
    status, said = run(tmp_path, before=FULL)
    assert status == 75
    assert "its disk is full; make room there" in said
    assert str(status) not in prevented()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_really_full_disk_is_tried_again_and_with_its_reserve_it_starts(tmp_path):
    place = tmp_path / "state"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m,mode=700", "small", place]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        words = [sys.executable, "-m", "rollmuxd", "daemon", "run", "--config", tmp_path / "rollmux.toml"]
        (tmp_path / "rollmux.toml").write_text(f'[daemon]\nstate_dir = "{place}"\nlisten = ""\n')

        def started():
            """Whether a daemon gets ready; it is killed then. Its exit status, if it does not."""
            with forked.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as daemon:
                until = time.monotonic() + PATIENCE_S
                while daemon.poll() is None and time.monotonic() < until and not (place / "daemon.json").exists():
                    time.sleep(0.05)
                if daemon.poll() is None:
                    daemon.kill()
                    daemon.wait()
                    (place / "daemon.json").unlink(missing_ok=True)
                    return True
                return daemon.returncode

        def fill():
            with open(place / "ballast", "ab", buffering=0) as ballast:
                for size in (1_000_000, 4_096, 1):
                    with pytest.raises(OSError, match="No space left"):
                        while True:
                            ballast.write(b"x" * size)

        assert started() is True
        fill()
        assert started() is True  # out of its reserve
        fill()
        assert started() == 75
        (place / "ballast").unlink()
        assert started() is True
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_directory_that_another_daemon_holds_is_tried_again_by_the_service(tmp_path):
    import asyncio

    async def held():
        journal = Journal.open(tmp_path / "state")
        try:
            return await asyncio.to_thread(run, tmp_path)
        finally:
            await journal.close()

    status, said = asyncio.run(held())
    assert status == 75
    assert f"pid {os.getpid()}" in said


#: stands in for a machine that boots: no resolver is up yet
UNRESOLVED = """
import socket
def unknown(*_, **__):
    raise socket.gaierror({error}, "no such name")
socket.getaddrinfo = unknown
"""
#: a port below 1024, to whoever is not root
NOT_ALLOWED = """
import socket
def denied(*_):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
socket.socket.bind = denied
"""
OPEN = "[access]\ninsecure = true\n"


@pytest.mark.parametrize("error", [socket.EAI_AGAIN, socket.EAI_NONAME])
def test_a_name_to_listen_at_that_nobody_knows_yet_is_tried_again_by_the_service(tmp_path, error):
    status, said = run(tmp_path, before=UNRESOLVED.format(error=error), text=OPEN, listen="here.example:7878")
    assert status == 75
    assert "cannot listen on here.example:7878: no such name" in said
    assert "daemon.listen" in said.rpartition(";")[2]


def test_an_address_that_the_machine_does_not_have_yet_is_tried_again_by_the_service(tmp_path):
    status, said = run(tmp_path, text=OPEN, listen="192.0.2.1:7878")  # one for documentation: nobody has it
    assert status == 75
    assert "cannot listen on 192.0.2.1:7878" in said
    assert "daemon.listen" in said.rpartition(";")[2]


def test_a_port_that_another_program_has_is_tried_again_by_the_service(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        status, said = run(tmp_path, listen=listen)
    assert status == 75
    assert f"cannot listen on {listen}: another program listens there; stop it, or set daemon.listen" in said


def test_a_socket_at_which_another_daemon_answers_is_tried_again_by_the_service(tmp_path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "taken.sock"))
        other.listen()
        status, said = run(tmp_path, text=f'socket = "{tmp_path}/taken.sock"\n')
    assert status == 75
    assert "taken.sock: another program answers there; stop it, or set daemon.socket to another" in said


def test_what_needs_somebody_is_not_tried_again(tmp_path):
    status, said = run(tmp_path, text="[limits]\nmax_job = 1\n")
    assert (status, "did you mean" in said) == (2, True)
    status, said = run(tmp_path, listen="127.0.0.1:1", before=NOT_ALLOWED)
    assert (status, "cannot listen on 127.0.0.1:1: Permission denied" in said) == (2, True)
    status, said = run(tmp_path, listen="local..host:7878", text=OPEN)
    assert (status, "cannot listen on local..host:7878: " in said) == (2, True)
    (tmp_path / "notes").touch()
    status, said = run(tmp_path, text=f'socket = "{tmp_path}/notes"\n')
    assert (status, f"{tmp_path}/notes is no socket; remove it, or set daemon.socket to another" in said) == (2, True)
    status, said = run(tmp_path, text='[[hosts]]\nid = "a"\nbackend = "nope"\nnodes = [{gpus = 0, pools = ["x"]}]\n')
    assert (status, '"nope" is not installed' in said) == (2, True)
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "journal.sqlite3").write_bytes(b"this is no database, whatever its name says" * 100)
    status, said = run(tmp_path)
    assert (status, "rollmuxd journal restore" in said) == (2, True)
    assert "2" in prevented()


def caused(error, by):
    try:
        raise error from by
    except Exception as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (JournalFailed("a commit failed"), True),
        (caused(JournalRefused("full"), OSError(errno.ENOSPC, "full")), True),
        (caused(JournalRefused("quota"), OSError(errno.EDQUOT, "quota")), True),
        (caused(JournalRefused("read-only"), OSError(errno.EROFS, "read-only")), True),
        (caused(JournalRefused("denied"), PermissionError(errno.EACCES, "denied")), False),
        (OSError(errno.ENETDOWN, "the network is down"), True),
        (JournalRefused("of a newer format"), False),
        (JournalDamaged(Path("/x"), "fact 3 is damaged"), False),
    ],
)
def test_which_refusals_may_pass(error, passes):
    assert may_pass(caused(CannotStart(str(error)), error)) is passes


def test_a_journal_that_somebody_holds_open_may_pass(tmp_path):
    with closing(sqlite3.connect(tmp_path / "x", isolation_level=None, timeout=0)) as one:
        one.execute("CREATE TABLE a (b)")
        one.execute("BEGIN EXCLUSIVE")
        other = sqlite3.connect(tmp_path / "x", isolation_level=None, timeout=0)
        with closing(other), pytest.raises(sqlite3.OperationalError) as raised:
            other.execute("INSERT INTO a VALUES (1)")
    assert isinstance(error_of(raised.value, tmp_path / "x"), JournalFailed)


def prevented():
    (line,) = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT, re.MULTILINE)
    return line.split()


def test_the_service_is_tried_again_for_as_long_as_it_takes():
    assert "Restart=always" in UNIT.splitlines()
    assert "StartLimitIntervalSec=0" in UNIT.splitlines()  # else systemd gives up after a few starts
