"""A host is reached over one kept connection, by somebody who is known, to somebody who is known, or not at all."""

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import anyio
import asyncssh
import pytest
from networks import descendants
from patience import PATIENCE_S
from serving import serving

from rollmuxd.spi import ContactLost, HostConfig, NotDone, ProcessOrder
from rollmuxd_backend_local import asking
from rollmuxd_backend_local.agent import connection
from rollmuxd_backend_ssh import SshBackend
from rollmuxd_backend_ssh.connection import HostConnection
from rollmuxd_backend_ssh.options import SshOptions


@contextlib.asynccontextmanager
async def reached(server, keys, made_up, host="box", **options):
    """A backend for a host behind asyncssh's server, both ended afterwards."""
    await server.start()
    keys.add(host, "127.0.0.1", server.port)
    said = {
        "made_up_gpus": made_up(),
        "config": str(keys.config),
        "python": sys.executable,
        "connect_s": PATIENCE_S,
        **options,
    }
    backend = await SshBackend.open([HostConfig(id=host)], said)
    try:
        yield backend
    finally:
        await backend.close()
        await server.stop()


@pytest.mark.asyncio
async def test_one_table_is_enough_and_one_connection(own_server, keys, made_up):
    async with reached(own_server, keys, made_up) as backend, anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(backend.observe, "box")
        tasks.start_soon(backend.run, "box", ("true",))
    assert len(own_server.commands) == 1, "one process there does what is asked"


@pytest.mark.asyncio
async def test_a_connection_is_shared_by_those_that_wait_for_it(own_server, keys, made_up):
    async with reached(own_server, keys, made_up) as backend:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(backend.observe, "box")
        assert len(own_server.connections) == 1


@pytest.mark.asyncio
async def test_one_that_waits_for_the_connection_may_give_up_without_the_others(own_server, keys, made_up):
    async with reached(own_server, keys, made_up) as backend:
        first = asyncio.create_task(backend.observe("box"))
        second = asyncio.create_task(backend.observe("box"))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).boot_id


@pytest.mark.asyncio
async def test_a_host_whose_key_is_not_known_is_not_talked_to(own_server, keys, made_up):
    async with reached(own_server, keys, made_up) as backend:
        keys.known_hosts.write_text("")
        with pytest.raises(ContactLost, match=r"host key .* known_hosts.*: ssh box true"):
            await backend.observe("box")
    assert own_server.commands == []


@pytest.mark.asyncio
async def test_a_host_with_another_key_than_the_known_one_is_not_talked_to(own_server, keys, made_up):
    async with reached(own_server, keys, made_up) as backend:
        stranger = (keys.folder / "stranger.pub").read_text()
        keys.known_hosts.write_text(f"[127.0.0.1]:{own_server.port} {stranger}")
        with pytest.raises(ContactLost, match="host key"):
            await backend.observe("box")
    assert own_server.commands == []


@pytest.mark.asyncio
async def test_the_ssh_configuration_cannot_switch_the_looking_at_keys_off(own_server, keys, made_up):
    keys.config.write_text("Host *\n  UserKnownHostsFile none\n")
    async with reached(own_server, keys, made_up) as backend:
        with pytest.raises(ContactLost, match="UserKnownHostsFile none"):
            await backend.observe("box")
    assert own_server.commands == []


@pytest.mark.asyncio
async def test_a_key_that_is_not_let_in_is_said_with_what_to_try(own_server, keys, made_up):
    async with reached(own_server, keys, made_up) as backend:
        own_server._server.update(authorized_client_keys=str(keys.folder / "stranger.pub"))
        with pytest.raises(
            ContactLost, match=r"accepts none of the keys .* this must work without asking: ssh box true"
        ):
            await backend.observe("box")


@pytest.mark.asyncio
async def test_options_go_over_the_ssh_configuration(own_server, keys, made_up):
    await own_server.start()
    (keys.folder / "mine").write_text(f"[127.0.0.1]:{own_server.port} {(keys.folder / 'host.pub').read_text()}")
    keys.config.write_text("Host *\n  Port 1\n  User nobody\n")
    said = {
        "address": "127.0.0.1",
        "port": own_server.port,
        "user": "ann",
        "keys": [str(keys.folder / "client")],
        "known_hosts": str(keys.folder / "mine"),
        "config": str(keys.config),
        "made_up_gpus": made_up(),
        "python": sys.executable,
        "connect_s": PATIENCE_S,
    }
    backend = await SshBackend.open([HostConfig(id="box", options=said)], {})
    assert len((await backend.observe("box")).gpus) == 2
    assert own_server.connections[0].get_extra_info("username") == "ann"
    await backend.close()
    await own_server.stop()


@pytest.mark.asyncio
async def test_hosts_are_jumped_over(own_server, keys, made_up, tmp_path):
    """The host itself listens where only the jump host reaches it; here, both are this machine."""
    async with reached(own_server, keys, made_up, host="gate"):
        keys.add("inner", "127.0.0.1", own_server.port, "ProxyJump gate")
        said = {
            "made_up_gpus": made_up(),
            "config": str(keys.config),
            "python": sys.executable,
            "connect_s": PATIENCE_S,
        }
        backend = await SshBackend.open([HostConfig(id="inner")], said)
        assert len((await backend.observe("inner")).gpus) == 2
        assert len(own_server.connections) == 2, "the gate's, and through it the host's"
        await backend.close()


@pytest.mark.asyncio
async def test_a_doctor_hears_of_the_connection_and_then_of_the_host(own_server, keys, made_up):
    async with reached(own_server, keys, made_up) as backend:
        findings = {finding.what: finding for finding in await backend.check("box")}
        assert findings["connection"].level == "good"
        assert {"driver", "box/gpu0", "RAM", "clock", "python"} <= set(findings)
        keys.known_hosts.write_text("")
        backend._lines["box", ""]._drop("the test wants it")
        (finding,) = await backend.check("box")
        assert (finding.what, finding.level, "host key" in finding.said) == ("connection", "bad", True)


# ---- what hosts do ---------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_a_login_shell_says_by_itself_is_no_answer(own_server, keys, made_up):
    own_server.noise = b"Welcome to box!\n** 3 updates can be applied **\n"
    async with reached(own_server, keys, made_up) as backend:
        assert len((await backend.observe("box")).gpus) == 2
        assert (await backend.run("box", ("echo", "hello"))).stdout == b"hello\n"


@pytest.mark.asyncio
@pytest.mark.parametrize("said", [b"", b"garbage", b'{"said": {}}', b"This account is currently not available.\n"])
async def test_an_answer_that_cannot_be_understood_is_contact_lost(own_server, keys, made_up, said):
    own_server.noise, own_server.instead = said, lambda command: "exit 1"
    async with reached(own_server, keys, made_up) as backend:
        for call in (backend.observe, backend.inventory):
            with pytest.raises(ContactLost, match="box"):
                await call("box")
        with pytest.raises(ContactLost):
            await backend.run("box", ("true",))


@pytest.mark.asyncio
async def test_a_host_without_python_is_told_from_one_that_is_away(own_server, keys, made_up):
    async with reached(own_server, keys, made_up, python="python3.999") as backend:
        why = r"the host cannot be reached by ssh: there is no python3\.999 there; install Python 3\.8 or newer"
        with pytest.raises(ContactLost, match=why):
            await backend.observe("box")


@pytest.mark.asyncio
async def test_a_host_whose_server_forwards_nothing_is_talked_to_all_the_same(sshd, keys, made_up):
    keys.add("box", "127.0.0.1", sshd(options=("AllowTcpForwarding no", "MaxSessions 1")).port)
    said = {"config": str(keys.config), "made_up_gpus": made_up(), "connect_s": PATIENCE_S}
    backend = await SshBackend.open([HostConfig(id="box")], said)

    async def echo(reader, writer):
        writer.write(await reader.readexactly(1))

    async with serving(echo) as (host, port):
        assert await backend.exchange("box", host, port, b"x", most=10) == b"x"
    with pytest.raises(NotDone, match=r"box: nothing can be reached at 127.0.0.1 port 1 "):
        await backend.exchange("box", "127.0.0.1", 1, b"x", most=10)
    await backend.close()


@pytest.mark.asyncio
async def test_a_command_in_flight_when_the_line_breaks_is_contact_lost(own_server, keys, made_up):
    async with reached(own_server, keys, made_up) as backend:
        running = asyncio.create_task(backend.run("box", ("sh", "-c", "while kill -0 $PPID; do sleep 0.1; done")))
        while not own_server._children:
            await asyncio.sleep(0.01)
        await own_server.stop()
        with pytest.raises(ContactLost):
            await running


@pytest.mark.asyncio
async def test_a_line_that_broke_is_not_told_as_the_end_of_the_process(own_server, keys, made_up):
    async with reached(own_server, keys, made_up) as backend, anyio.create_task_group() as tasks:
        await backend.observe("box")

        async def waits():
            with pytest.raises(ContactLost, match="the connection to the process on box broke: "):
                await backend.run("box", ("sh", "-c", "while kill -0 $PPID; do sleep 0.1; done"))

        tasks.start_soon(waits)
        while not backend._lines["box", ""]._waiting:
            await asyncio.sleep(0.01)
        own_server.connections[0].abort()


@pytest.mark.asyncio
async def test_a_line_that_breaks_while_much_is_on_its_way_leaves_no_error_unread(own_server, keys, made_up):
    unread = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context["message"]))
    async with reached(own_server, keys, made_up) as backend:
        await backend.observe("box")
        running = asyncio.create_task(backend.run("box", ("cat",), stdin=os.urandom(12 * 2**20)))
        while not backend._lines["box", ""]._waiting:
            await asyncio.sleep(0)
        own_server.connections[0].abort()
        with pytest.raises(ContactLost):
            await running
    del running
    gc.collect()
    assert unread == []


@pytest.mark.asyncio
async def test_why_a_login_is_refused_is_told_where_it_is_said_on_stdout(own_server, keys, made_up):
    own_server.instead = lambda command: "echo This account is currently not available.; exit 1"
    async with reached(own_server, keys, made_up) as backend:
        with pytest.raises(ContactLost, match=r"exit code 1 and said: This account is currently not available\."):
            await backend.observe("box")


@pytest.mark.asyncio
async def test_a_host_whose_login_says_much_is_reached(own_server, keys, made_up):
    own_server.noise = (b"x" * 70 + b"\n") * 1_000
    async with reached(own_server, keys, made_up) as backend:
        assert len((await backend.observe("box")).gpus) == 2


@pytest.mark.asyncio
async def test_a_server_that_lets_no_command_begin_is_told_with_its_setting(sshd, keys, made_up):
    keys.add("box", "127.0.0.1", sshd(options=("MaxSessions 0",)).port)
    said = {"config": str(keys.config), "made_up_gpus": made_up(), "connect_s": PATIENCE_S}
    backend = await SshBackend.open([HostConfig(id="box")], said)
    with pytest.raises(ContactLost, match=r"no command can be started there .* see MaxSessions of its sshd"):
        await backend.observe("box")
    await backend.close()


@pytest.mark.asyncio
async def test_a_command_that_cannot_be_sent_was_not_begun_and_harms_no_other(own_server, keys, made_up):
    async with reached(own_server, keys, made_up) as backend:
        with pytest.raises(NotDone, match=r"box: this cannot be sent: .* are the most"):
            await backend.run("box", ("wc", "-c"), stdin=bytes(50 * 2**20))
        with pytest.raises(NotDone, match=r"box: this cannot be sent: .* surrogates"):
            await backend.run("box", ("printf", "\udcff"), stdin=b"x" * 1_000)
        assert (await backend.run("box", ("wc", "-c"), stdin=b"x" * 1_000)).stdout.split() == [b"1000"]
        assert len(own_server.connections) == 1


@pytest.mark.asyncio
async def test_a_command_has_the_variables_of_the_login(own_server, keys, made_up, monkeypatch):
    """Also those that Ray or Slurm set for themselves elsewhere."""
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    async with reached(own_server, keys, made_up) as backend:
        said = await backend.run("box", ("sh", "-c", "echo $RAY_ADDRESS $CUDA_VISIBLE_DEVICES"))
    assert said.stdout == b"head:6379 3\n"


_A_DAEMON = """
import asyncio, sys
from rollmuxd.spi import HostConfig
from rollmuxd_backend_ssh import SshBackend

async def main():
    backend = await SshBackend.open([HostConfig(id="box")], {"config": sys.argv[1], "connect_s": 600})
    script = 'touch "$0/begun"; until [ -e "$0/go" ]; do sleep 0.02; done; touch "$0/done"'
    await backend.run("box", ("sh", "-c", script, sys.argv[2]), timeout_s=600)

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_a_command_continues_when_its_daemon_has_been_killed(sshd, keys, tmp_path):
    """Half of a move may hang for ever."""
    keys.add("box", "127.0.0.1", sshd().port)
    daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", _A_DAEMON, str(keys.config), str(tmp_path))
    with anyio.fail_after(PATIENCE_S):
        while not (tmp_path / "begun").exists():
            await anyio.sleep(0.01)
        daemon.kill()
        await daemon.wait()
        await anyio.sleep(0.3)  # by then its connection most likely has ended; ended later, it is the same
        (tmp_path / "go").touch()
        while not (tmp_path / "done").exists():
            await anyio.sleep(0.01)


@pytest.mark.asyncio
async def test_a_host_that_has_gone_silent_is_left_all_the_same(sshd, keys, made_up):
    """A daemon that stops does not wait for it."""
    server = sshd()
    keys.add("box", "127.0.0.1", server.port)
    said = {"config": str(keys.config), "made_up_gpus": made_up(), "connect_s": PATIENCE_S, "alive_s": 600}
    backend = await SshBackend.open([HostConfig(id="box")], said)
    await backend.observe("box")
    stopped = descendants([server.process.pid])
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        with anyio.fail_after(PATIENCE_S):
            await backend.close()
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.asyncio
async def test_an_exchange_whose_line_breaks_is_contact_lost_and_not_at_its_end(own_server, keys, made_up):
    begun = asyncio.Event()

    async def swallow(reader, writer):
        await reader.readexactly(1)
        begun.set()
        await reader.read()

    async with serving(swallow) as (host, port), reached(own_server, keys, made_up) as backend:
        exchanging = asyncio.create_task(backend.exchange("box", host, port, b"x", most=10))
        await begun.wait()
        await own_server.stop()
        with pytest.raises(ContactLost):
            await exchanging


@pytest.mark.asyncio
async def test_ten_hosts_are_asked_at_the_same_time(own_servers, keys, made_up):
    """None is answered before all ten have been asked."""
    servers = [own_servers() for _ in range(10)]
    asked, all_asked = [], asyncio.Event()

    async def before():
        asked.append(1)
        if len(asked) == len(servers):
            all_asked.set()
        await all_asked.wait()

    for number, server in enumerate(servers):
        server.before = before
        await server.start()
        keys.add(f"box{number}", "127.0.0.1", server.port)
    said = {"made_up_gpus": made_up(), "config": str(keys.config), "python": sys.executable, "connect_s": PATIENCE_S}
    backend = await SshBackend.open([HostConfig(id=f"box{number}") for number in range(10)], said)
    async with anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(backend.ask, f"box{number}", {"ask": "look", "made_up": made_up()}, PATIENCE_S)
    assert len(asked) == 10
    await backend.close()
    for server in servers:
        await server.stop()


@pytest.mark.asyncio
async def test_a_look_that_hangs_costs_its_time_and_no_other_look(own_server, keys, made_up, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "hangs")
    async with reached(own_server, keys, made_up) as backend:
        await backend.observe("box")  # to connect takes its time, too
        with pytest.raises(ContactLost, match=r"box: .* took longer than 0\.3 s, and was ended"):
            await backend.ask("box", {"ask": "look", "made_up": str(tmp_path / "hangs")}, 0.3)
        assert len((await backend.observe("box")).gpus) == 2
        assert len(own_server.connections) == 1


@pytest.mark.asyncio
async def test_a_host_that_hangs_costs_a_look_its_time_and_at_last_its_connection(
    own_server, keys, made_up, monkeypatch
):
    """What hangs in a driver there may hang for ever; on another connection it does not matter."""
    monkeypatch.setattr(connection, "_WAY_S", 0.1)
    async with reached(own_server, keys, made_up) as backend:
        await backend.observe("box")
        monkeypatch.setattr(asking, "LOOK_S", 0.3)
        os.kill(own_server._children[0].pid, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(ContactLost, match=r"the process on box did not answer within 0\.3 s"):
                await backend.observe("box")
        monkeypatch.setattr(asking, "LOOK_S", PATIENCE_S)
        assert len((await backend.observe("box")).gpus) == 2
        assert len(own_server.connections) == 2


@pytest.mark.asyncio
async def test_each_owners_processes_are_started_as_the_user_that_is_named_for_it(own_server, keys, made_up):
    options = {"starts_processes": True, "users": {"team-a": "ann", "team-b": "bob"}, "logs": ""}
    async with reached(own_server, keys, made_up, **options) as backend:
        orders = [process_of("team-a", 1), process_of("team-b", 2)]
        for order in orders:
            await backend.start("box", order)
        names = [connection.get_extra_info("username") for connection in own_server.connections]
        assert names == ["ann", "bob"]
        with pytest.raises(NotDone, match=r"options.users names no login for owner 'team-c'"):
            await backend.start("box", process_of("team-c", 3))
        for order in orders:
            assert await backend.alive("box", order.launch)
            assert await backend.stop("box", order.launch)
            assert not await backend.alive("box", order.launch)


@pytest.mark.asyncio
async def test_an_owners_lost_process_is_ended_by_the_user_that_is_named_for_it(own_server, keys, made_up):
    """Who may then end no more than that user may."""
    options = {"starts_processes": True, "owns_sessions": True, "users": {"team-a": "ann", "team-b": "bob"}, "logs": ""}
    async with reached(own_server, keys, made_up, **options) as backend:
        order = process_of("team-b", 2)
        process = await backend.start("box", order)
        its = process.pid, process.started
        assert not await backend.kill("box", *its, "j1", "team-a")
        assert await backend.alive("box", order.launch)
        assert await backend.kill("box", *its, "j2", "team-b")
        names = [connection.get_extra_info("username") for connection in own_server.connections]
        assert names == ["bob", "ann"]


@pytest.mark.asyncio
async def test_what_one_owners_process_said_is_read_while_another_owners_login_is_refused(own_server, keys, made_up):
    logins = {"team-a": "ann", "team-b": "bob"}
    options = {"starts_processes": True, "users": logins, "logs": str(keys.folder)}
    async with reached(own_server, keys, made_up, **options) as backend:
        (keys.folder / "l1.log").write_text("step 1\n")
        own_server.refused = ("bob",)
        assert (await backend.output("box", "l1", 0, 100)).data == b"step 1\n"
        with pytest.raises(ContactLost, match="it accepts none of the keys"):
            await backend.alive("box", "l1")


def process_of(owner, number):
    return ProcessOrder(
        launch=f"l{number}",
        number=number,
        job=f"j{number}",
        run=1,
        owner=owner,
        user="u",
        name="a",
        argv=("sleep", "600"),
        cwd="",
        env={},
    )


@pytest.mark.asyncio
async def test_an_agent_is_asked_for_keys(own_server, keys, made_up, tmp_path, monkeypatch):
    agent, add = shutil.which("ssh-agent"), shutil.which("ssh-add")
    if agent is None or add is None:
        pytest.skip("there is no ssh-agent here; install openssh-client")
    running = subprocess.Popen([agent, "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        while not (tmp_path / "agent").exists():
            await asyncio.sleep(0.01)
        subprocess.run([add, str(keys.folder / "client")], check=True, capture_output=True)
        async with reached(own_server, keys, made_up) as backend:
            lines = keys.config.read_text().splitlines()
            keys.config.write_text("\n".join(line for line in lines if "Identit" not in line) + "\n")
            assert len((await backend.observe("box")).gpus) == 2
    finally:
        running.terminate()
        running.wait()


@pytest.mark.asyncio
async def test_a_command_cancelled_at_any_moment_leaves_nothing_running(sshd, keys, tmp_path):
    """Also where it had not yet said which process it is, and the server carries out no signals (as for root)."""
    keys.add("box", "127.0.0.1", sshd().port)
    backend = await SshBackend.open([HostConfig(id="box")], {"config": str(keys.config), "connect_s": PATIENCE_S})
    await backend.run("box", ("true",))
    for moment in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08):
        with anyio.move_on_after(moment):
            await backend.run("box", ("sh", "-c", "sleep 600; true", str(tmp_path)))
    left = ["?"]
    with anyio.fail_after(PATIENCE_S):
        while left:
            await asyncio.sleep(0.02)
            left = []
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):  # it has just ended
                    line = path.read_bytes()
                    left += [line] if b"sleep 600; true" in line and bytes(tmp_path) in line else []
    await backend.close()


# ---- again, and not too often ----------------------------------------------------------------------------------------


class Host:
    """Stands in for asyncssh.connect: away until told otherwise."""

    def __init__(self):
        self.tries = []
        self.away = True

    async def connect(self, *arguments, **more):
        self.tries.append(asyncio.get_running_loop().time())
        if self.away:
            raise OSError("no route to host")
        return Connection()


class Silent:
    """A stream of such a process."""

    async def readexactly(self, size):
        await asyncio.Event().wait()

    def is_closing(self):
        return True


class Connection:
    """Its process has nothing to say."""

    async def create_process(self, line, **more):
        return SimpleNamespace(stdin=Silent(), stdout=Silent())

    def close(self):
        pass

    async def wait_closed(self):
        pass


@pytest.fixture
def host(monkeypatch):
    host = Host()
    monkeypatch.setattr(asyncssh, "connect", host.connect)
    monkeypatch.setattr(HostConnection, "_greet", lambda self, opened: asyncio.sleep(0))
    return host


def line():
    return HostConnection("box", SshOptions(config="/dev/null"), now=lambda: asyncio.get_running_loop().time())


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_host_that_is_away_is_tried_less_and_less_often(host):
    reaching = line()
    while asyncio.get_running_loop().time() < 300:
        with contextlib.suppress(ContactLost):
            await reaching.connection()
        await asyncio.sleep(0.2)
    waits = [later - earlier for earlier, later in zip(host.tries, host.tries[1:], strict=False)]
    assert len(host.tries) < 20, "it was hammered"
    assert max(waits) < 35, "it would not be noticed when it comes back"
    assert waits == sorted(waits[:5]) + waits[5:]


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_between_tries_a_call_is_told_why_in_the_same_words_and_does_not_wait_long(host):
    reaching = line()
    for _ in range(6):
        with contextlib.suppress(ContactLost):
            await reaching.connection()
    before = asyncio.get_running_loop().time()
    tries = len(host.tries)
    for _ in range(3):
        with pytest.raises(ContactLost, match=r"the host cannot be reached by ssh: no route to host$"):
            await reaching.connection()
    assert asyncio.get_running_loop().time() - before < 8
    assert len(host.tries) <= tries + 1


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_host_that_is_back_is_forgiven(host):
    reaching = line()
    for _ in range(3):
        with contextlib.suppress(ContactLost):
            await reaching.connection()
    host.away = False
    assert await reaching.connection()
    host.away = True
    reaching._drop("it is away")
    with contextlib.suppress(ContactLost):
        await reaching.connection()
    assert reaching._failed == 1
    await reaching.close()
