"""The TCP port beyond loopback: https with a certificate that clients trust as a file, and nothing in the clear."""

import asyncio
import os
import shutil
import ssl
import stat
import subprocess
from contextlib import aclosing, asynccontextmanager, suppress

import anyio
import httpx
import pytest
from patience import PATIENCE_S

from rollmuxd.client import discovery
from rollmuxd.client.aio import AsyncDaemon
from rollmuxd.client.calls import Call
from rollmuxd.client.errors import Unreachable
from rollmuxd.client.heartbeat_process import Beater
from rollmuxd.client.sync import Daemon
from rollmuxd.daemon.app import CannotStart, serve
from rollmuxd.daemon.settings import Settings
from rollmuxd.daemon.tls import NoTls, make_own, open_tls

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the own certificate is made by openssl"),
]


@pytest.fixture
def settings(tmp_path):
    def make(**tls) -> Settings:
        daemon = {"state_dir": tmp_path / "state", "listen": "127.0.0.1:0", "shutdown_s": 2}
        return Settings(daemon=daemon, tls={"mode": "on", **tls})

    return make


@asynccontextmanager
async def running(settings):
    """A daemon, until the block is left."""
    found = []
    is_ready = anyio.Event()
    async with anyio.create_task_group() as tasks:

        async def run():
            await serve(settings, on_ready=lambda ready: (found.append(ready), is_ready.set()))

        tasks.start_soon(run)
        with anyio.fail_after(PATIENCE_S):
            await is_ready.wait()
        yield found[0]
        tasks.cancel_scope.cancel()


def address(ready, **environ):
    return discovery.need(ready.url, environ={"HOME": "/nowhere", **environ})


async def asked(address):
    """What a client at that address is answered, or what it says."""

    def ask():
        with Daemon(address=address) as daemon:
            return daemon.get("/healthz")

    return await anyio.to_thread.run_sync(ask)


# ---- the own certificate ---------------------------------------------------------------------------------------------


def test_the_own_certificate_is_made_once_and_its_key_is_nobody_elses(settings, tmp_path):
    folder = tmp_path / "state" / "tls"
    open_tls(settings())
    first = (folder / "certificate.pem").read_bytes(), (folder / "key.pem").read_bytes()
    open_tls(settings())
    assert ((folder / "certificate.pem").read_bytes(), (folder / "key.pem").read_bytes()) == first
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == ["certificate.pem", "key.pem"]


def test_the_own_certificate_is_for_the_names_that_are_configured_and_the_machines_own(settings):
    tls = open_tls(settings(names=["gpu.example.org", "10.1.2.3"]))
    words = ["openssl", "x509", "-in", str(tls.certificate), "-noout", "-text"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for name in ("DNS:gpu.example.org", "IP Address:10.1.2.3", "DNS:localhost", "IP Address:127.0.0.1"):
        assert name in printed


def test_without_openssl_it_is_said_what_to_do(settings, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(NoTls, match="install it, or set"):
        open_tls(settings())


# ---- clients ---------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_clients_come_in_by_the_certificates_file_and_not_otherwise(settings):
    async with running(settings()) as ready:
        assert ready.url.startswith("https://127.0.0.1:")
        by_file = address(ready, ROLLMUX_CA_FILE=ready.certificate)
        assert (await asked(by_file))["status"] == "ok"
        async with aclosing(AsyncDaemon(by_file)) as daemon:
            assert (await daemon.call(Call("GET", "/healthz", dict)))["status"] == "ok"
        with pytest.raises(Unreachable, match="set ROLLMUX_CA_FILE to its certificate"):
            await asked(address(ready))


@pytest.mark.asyncio
async def test_a_name_that_the_certificate_lacks_is_no_question_of_trust(settings, tmp_path):
    make_own(tmp_path / "c.pem", tmp_path / "k.pem", ["gpu.example.org"])
    async with running(settings(certificate=tmp_path / "c.pem", key=tmp_path / "k.pem")) as ready:
        with pytest.raises(Unreachable, match="a name of its certificate into ROLLMUX_URL"):
            await asked(address(ready, ROLLMUX_CA_FILE=str(ready.certificate)))


@pytest.mark.asyncio
async def test_clients_that_run_take_a_new_certificate_when_it_is_in_their_file(settings, tmp_path):
    """Their heartbeats did, so a job held its GPUs and never had another phase."""
    trusted = tmp_path / "trusted.pem"
    make_own(trusted, tmp_path / "k.pem", ["localhost"])
    async with running(settings()) as ready:
        theirs = address(ready, ROLLMUX_CA_FILE=str(trusted))
        async with aclosing(AsyncDaemon(theirs)) as later:
            with Daemon(address=theirs) as daemon:
                call = Call("GET", "/healthz", dict)
                with pytest.raises(Unreachable):
                    await anyio.to_thread.run_sync(daemon.get, "/healthz")
                with pytest.raises(Unreachable):
                    await later.call(call)
                shutil.copyfile(ready.certificate, trusted)
                for _ in range(2):  # the call that is refused reads the file
                    with suppress(Unreachable):
                        first = await anyio.to_thread.run_sync(daemon.get, "/healthz")
                    with suppress(Unreachable):
                        second = await later.call(call)
                assert (first["status"], second["status"]) == ("ok", "ok")


@pytest.mark.asyncio
async def test_a_call_without_tls_is_told_to_speak_https(settings):
    async with running(settings()) as ready:
        said = rf"https, not http, write {ready.url}$"
        plain = ready.url.replace("https://", "http://")
        with pytest.raises(Unreachable, match=said):
            await asked(discovery.need(plain, environ={"HOME": "/nowhere"}))
        async with aclosing(AsyncDaemon(discovery.need(plain, environ={"HOME": "/nowhere"}))) as daemon:
            with pytest.raises(Unreachable, match=said):
                await daemon.call(Call("GET", "/healthz", dict))


@pytest.mark.asyncio
async def test_a_client_sends_no_key_to_a_server_with_another_certificate(settings, tmp_path):
    make_own(tmp_path / "c.pem", tmp_path / "k.pem", ["localhost", "127.0.0.1"])
    got = []

    async def greedy(reader, writer):
        got.append(await reader.read(1000))
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "c.pem", tmp_path / "k.pem")
    async with running(settings()) as ready:
        impostor = await asyncio.start_server(greedy, "127.0.0.1", 0, ssl=context)
        port = impostor.sockets[0].getsockname()[1]
        environ = {"HOME": "/nowhere", "ROLLMUX_API_KEY": "rmx_secret", "ROLLMUX_CA_FILE": ready.certificate}
        with pytest.raises(Unreachable):
            await asked(discovery.need(f"https://127.0.0.1:{port}", environ=environ))
        impostor.close()
        await impostor.wait_closed()
    assert b"rmx_secret" not in b"".join(got)


@pytest.mark.asyncio
async def test_heartbeats_trust_the_same_certificate_and_tell_nobody_else_the_key(settings):
    async with running(settings()) as ready:

        def beat(**trust):
            beater = Beater(0, 1, os.getppid())
            beater._now = {"base_url": ready.url, "api_key": "rmx_00000000_x", **trust}
            return beater._post("e1")

        assert await anyio.to_thread.run_sync(lambda: beat(ca_file=ready.certificate)) == 401  # it was heard
        with pytest.raises(ssl.SSLCertVerificationError):
            await anyio.to_thread.run_sync(beat)


@pytest.mark.asyncio
async def test_in_the_clear_nothing_is_answered_and_the_unix_socket_needs_no_tls(settings):
    async with running(settings()) as ready:
        port = int(ready.url.rpartition(":")[2])
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient() as client:
                await client.get(f"http://127.0.0.1:{port}/healthz")
        transport = httpx.AsyncHTTPTransport(uds=ready.socket)
        async with httpx.AsyncClient(transport=transport, base_url="http://rollmuxd") as client:
            assert (await client.get("/v1/keys")).status_code == 200


def test_versions_of_tls_that_can_be_broken_are_not_spoken(settings):
    assert open_tls(settings()).context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.asyncio
async def test_a_certificate_of_ones_own_is_used_where_it_is_named(settings, tmp_path):
    make_own(tmp_path / "c.pem", tmp_path / "k.pem", ["127.0.0.1"])
    async with running(settings(certificate=tmp_path / "c.pem", key=tmp_path / "k.pem")) as ready:
        assert ready.certificate == str(tmp_path / "c.pem")
        assert (await asked(address(ready, ROLLMUX_CA_FILE=str(tmp_path / "c.pem"))))["status"] == "ok"
        assert not (tmp_path / "state" / "tls").exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("spoilt", ["missing", "rubbish", "another's key", "with a password"])
async def test_files_that_are_no_certificate_are_said_to_be_none_with_file_and_remedy(settings, tmp_path, spoilt):
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    make_own(certificate, key, ["localhost"])
    match spoilt:
        case "missing":
            key.unlink()
        case "rubbish":
            certificate.write_text("rubbish")
        case "another's key":
            make_own(tmp_path / "other.pem", key, ["localhost"])
        case _:
            words = ["openssl", "ec", "-aes256", "-in", str(key), "-out", str(key), "-passout", "pass:secret"]
            subprocess.run(words, check=True, capture_output=True)
    with pytest.raises(CannotStart) as caught:
        await serve(settings(certificate=certificate, key=key))
    assert str(certificate) in str(caught.value)
    assert "PEM files that the daemon's user can read" in str(caught.value)
