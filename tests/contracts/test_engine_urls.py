"""What a job says of its engines' addresses leads the daemon to a loopback and nowhere else, and the job learns what
engines there say and what nobody else does. Of all drivers that talk to engines.
"""

import contextlib
import gzip
import ssl

import anyio
import pytest
from anyio.streams.tls import TLSStream
from fake_sglang import FakeSglang
from fake_vllm import FakeVllm
from msgspec import structs
from patience import PATIENCE_S

from rollmuxd.daemon.tls import make_own
from rollmuxd.spi import ContactLost, HostConfig, NotDone, OrderKind, PluginError, StateOrder, StateSpec
from rollmuxd.spi.engines import Engine
from rollmuxd.spi.fakes import FakeChannel
from rollmuxd_backend_mock import MockBackend
from rollmuxd_sglang import SglangResidency
from rollmuxd_vllm import VllmResidency

SECRET = "INTERNAL-SECRET-ANSWER"
DRIVERS = [VllmResidency, SglangResidency]
each_driver = pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.name)


class Watched(MockBackend):
    """A backend that keeps what was connected to."""

    connected: list[tuple[str, int]]

    async def exchange(self, host, address, port, *given, **more):
        self.connected.append((address, port))
        return await super().exchange(host, address, port, *given, **more)


async def watched():
    backend = await Watched.open([HostConfig(id="box", gpus=("box/gpu3",))], {})
    backend.connected = []
    return backend


def state(driver, url):
    return StateSpec(pool="rollout", driver=driver.name, gpu_mb=17_500, options=(("url", url),))


def order(driver, url, backend=None, *, kind=OrderKind.LOAD, name="1.evil.example", host="box", warm=True):
    return StateOrder(
        order="o1", kind=kind, job="j1", run=2, owner="nlp", name=name, pool="rollout", node="box/gpu3", host=host,
        gpus=("box/gpu3",), state=state(driver, url), ranks=1, warm=warm, pid=42, started="", backend=backend,
    )  # fmt: skip


async def opened(driver, **options):
    return await driver.open(FakeChannel(), options)


async def tell(driver, told):
    """The driver's word on an order."""
    with anyio.fail_after(PATIENCE_S):
        await getattr(driver, told.kind.value)(told)


async def endless(stream):
    await stream.send(b"HTTP/1.1 200 X\r\n\r\n")
    while True:
        await stream.send(b"." * 65_536)


@contextlib.asynccontextmanager
async def listening(answer, tls=None):
    """Something that is no engine and listens on the loopback; its port, and the heads of what it was sent."""
    seen = []

    async def serve(stream):
        async with stream:
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError, ssl.SSLError):
                if tls is not None:
                    stream = await TLSStream.wrap(stream, ssl_context=tls)
                seen.append((await stream.receive()).decode())
                await (answer(stream) if callable(answer) else stream.send(answer))

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield listener.extra(anyio.abc.SocketAttribute.local_port), seen
        group.cancel_scope.cancel()


def http(status, body=SECRET, headers=""):
    return f"HTTP/1.1 {status} X\r\n{headers}content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()


# ---- where it leads --------------------------------------------------------------------------------------------------

ELSEWHERE = [
    "http://{host}:80",
    "http://127.0.0.1.evil.example:80",
    "http://10.0.0.1:80",
    "http://169.254.169.254",
    "http://0.0.0.0:80",
    "http://127.0.0.1:80/admin",
]
NO_ADDRESS = [
    "http://127.0.0.1:80/{name}",
    "http://{name}",
    "http://127.0.0.{gpu}:80",
    "http://127.0.0.1{name}:80",
    "http://127.0.0.1:80/admin/delete-all?x=",
    "http://127.0.0.1:80?",
    "http://127.0.0.1:80/#",
    "http://127.0.0.1:80/../admin",
    "http://127.0.0.1:80/a/..",
    "http://127.0.0.1:80/%2e%2e/admin",
    "http://127.0.0.1:80//admin",
    "http://127.0.0.1:80\\@evil.example",
    "http://127.0.0.1:80@evil.example",
    "http://127.0.0.1@evil.example:80",
    "http://u:p@127.0.0.1:80",
    "http://127.0.0.1:{name}",
    "http://127.0.0.1:80{name}",
    "http://127.0.0.1:{gpus}",
    "http://127.0.0.1:0",
    "http://127.0.0.1:65536",
    "http://127.0.0.1:6553{gpu}{gpu}",
    "http://127.0.0.1:",
    "http://127.0.0.1:80 ",
    "http://127.0.0.1:80\n",
    "http://127.0.0.1:80\r\nX-A: b",
    "http://127.0.0.1:80{{}}",
    "http://[127.0.0.1]:80",
    "http://[::1]evil.example",
    "http://\uff11\uff12\uff17.0.0.1:80",
    "http://127\u30020.0.1:80",
    "unix:///run/docker.sock",
    "http:127.0.0.1:80",
    "http://",
]


@each_driver
@pytest.mark.parametrize(
    ("url", "said"), [*((url, "loopback only") for url in ELSEWHERE), *((url, "must be like") for url in NO_ADDRESS)]
)
@pytest.mark.asyncio
async def test_a_url_that_leads_elsewhere_is_not_registered_and_where_it_was_nothing_is_sent(driver, url, said):
    opener, backend = await opened(driver), await watched()
    with pytest.raises(ValueError, match=said):
        opener.check(state(driver, url))
    for kind in (OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD):
        with pytest.raises(NotDone, match=said):
            await tell(opener, order(driver, url, backend, kind=kind))
    assert backend.connected == []


@each_driver
@pytest.mark.asyncio
async def test_only_the_port_is_filled_in_and_it_is_a_port_when_it_is(driver):
    opener, backend = await opened(driver), await watched()
    for template in (
        "http://127.0.0.1:6{gpu}",
        "https://localhost:6{gpu}/",
        "http://[::1]:6{gpu}",
        "http://127.8.0.1:6{gpu}",
    ):
        opener.check(state(driver, template))
        (engine,) = opener.engines(order(driver, template, backend))
        assert engine.url == template.replace("{gpu}", "3")
    too_high = order(driver, "http://127.0.0.1:6553{run}{run}", backend)  # 65531 with a run of one digit
    with pytest.raises(NotDone, match=r"\(filled in: http://127.0.0.1:655322\); it must be like"):
        await tell(opener, too_high)
    assert backend.connected == []


@each_driver
@pytest.mark.asyncio
async def test_beyond_the_loopback_there_may_be_a_path_and_the_hosts_name_and_still_no_query(driver):
    named = ["http://10.0.0.1:8000", "https://gateway.example/engines/3/", "http://{host}:80{gpu}", "http://{host}:80"]
    opener = await opened(driver, urls=named)
    for url in named:
        opener.check(state(driver, url))
    (engine,) = opener.engines(order(driver, "http://{host}:80{gpu}", host="box.example"))
    assert engine.url == "http://box.example:803"
    for url in (
        "http://gateway.example/x?y=",
        "http://gateway.example/../x",
        "http://{name}",
        "http://g.example/{name}",
    ):
        with pytest.raises(ValueError, match="must be like"):
            await opened(driver, urls=[url])
    for host in ("evil.example/x?", "evil.example@h", "999.1.1.1"):
        with pytest.raises(NotDone, match="must be like"):
            opener.engines(order(driver, "http://{host}:80", host=host))


@each_driver
@pytest.mark.asyncio
async def test_an_operators_urls_are_the_only_ones_and_may_lead_beyond_the_loopback(driver):
    opener = await opened(driver, urls=["http://127.0.0.1:80{gpu}", "http://{host}:9000/engine/"])
    for url in ("http://127.0.0.1:80{gpu}", "http://127.0.0.1:80{gpu}/", "http://{host}:9000/engine"):
        opener.check(state(driver, url))
        assert len(opener.engines(order(driver, url))) == 1
    for url in ("http://127.0.0.1:803", "http://127.0.0.1:22", driver.default_url):
        with pytest.raises(ValueError, match=r"jobs may name http://127.0.0.1:80\{gpu\}, http://\{host\}:9000/engine"):
            opener.check(state(driver, url))
        with pytest.raises(NotDone, match="jobs may name"):
            opener.engines(order(driver, url))
    for url in ("http://127.0.0.1:80?", "http://{name}", 7):
        with pytest.raises(ValueError, match=r"must be"):
            await opened(driver, urls=[url])


@each_driver
@pytest.mark.asyncio
async def test_over_tls_an_engine_whose_certificate_is_trusted_is_asked_and_another_one_is_not_taken_for_gone(
    driver, tmp_path, monkeypatch
):
    files = tmp_path / "c.pem", tmp_path / "k.pem"
    make_own(*files, ["127.0.0.1"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*files)
    async with listening(http(500), tls) as (port, seen):
        url, backend = f"https://127.0.0.1:{port}", await watched()
        opener = await opened(driver, urls=[url], headers={"Authorization": "Bearer ENGINE-SECRET"})
        for kind in (OrderKind.LOAD, OrderKind.DISCARD):
            with pytest.raises(ContactLost, match="certificate verify failed"):
                await tell(opener, order(driver, url, backend, kind=kind, warm=False))
            assert not (await opener.probe(order(driver, url, backend, kind=kind))).known
        assert seen == []
        trusted = tmp_path / "bundle.pem"  # systems head each certificate with its authority's name
        trusted.write_bytes("# Főtanúsítvány\n".encode() + b"# F\xf6\n" + files[0].read_bytes())
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        with pytest.raises(NotDone, match=f"was answered 500: {SECRET}"):
            await tell(opener, order(driver, url, backend, kind=OrderKind.PARK))
        assert "Bearer ENGINE-SECRET" in seen[0]


# ---- what it is told, and what is told of it -------------------------------------------------------------------------


@each_driver
@pytest.mark.asyncio
async def test_an_operators_headers_go_to_urls_that_the_operator_has_named(driver):
    with pytest.raises(ValueError, match=r"say urls = \["):
        await opened(driver, headers={"Authorization": "Bearer ENGINE-SECRET"})
    async with listening(http(500)) as (port, seen):
        url, backend = f"http://127.0.0.1:{port}", await watched()
        opener = await opened(driver, headers={"Authorization": "Bearer ENGINE-SECRET"}, urls=[url])
        with pytest.raises(NotDone, match=f"was answered 500: {SECRET}"):  # its own word, where the operator vouches
            await tell(opener, order(driver, url, backend, kind=OrderKind.PARK))
        assert "Bearer ENGINE-SECRET" in seen[0]
        opener = await opened(driver, headers={"Authorization": "Bearer ENGINE-SECRET\n"}, urls=[url])
        with pytest.raises(PluginError, match="the headers that are configured") as raised:
            await tell(opener, order(driver, url, backend, kind=OrderKind.PARK))
        assert "ENGINE-SECRET" not in str(raised.value)


#: an engine's own words, in a form that may unpack to more than there is memory
PACKED = gzip.compress(f'{{"is_sleeping": false, "enable_memory_saver": true, "x": "{SECRET}"}}'.encode())
JSON = "content-type: application/json\r\n"
STRANGERS = {
    "a page": http(200),
    "json": http(200, f'{{"value": "{SECRET}"}}', JSON),
    "a list": http(200, f'["{SECRET}"]', JSON),
    "a string": http(200, f'"{SECRET}"', JSON),
    "is_sleeping of another kind": http(200, f'{{"is_sleeping": "{SECRET}"}}', JSON),
    "an error": http(500),
    "a fastapi error": http(422, f'{{"detail": "{SECRET}"}}', JSON),
    "packed": f"HTTP/1.1 200 X\r\ncontent-encoding: gzip\r\ncontent-length: {len(PACKED)}\r\n\r\n".encode() + PACKED,
    "missing": http(404),
    "moved": http(302, headers=f"location: http://127.0.0.1:1/{SECRET}\r\n"),
    "no http": f"SSH-2.0-{SECRET}\r\n".encode(),
    "half": f"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n{SECRET}".encode(),
    "a wrong header": f"HTTP/1.1 200 OK\r\n{SECRET} {SECRET}\r\n\r\n".encode(),
    "a wrong length": f"HTTP/1.1 200 OK\r\ncontent-length: {SECRET}\r\n\r\n".encode(),
    "a wrong encoding": http(200, headers="content-encoding: gzip\r\n"),
}


@each_driver
@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.asyncio
async def test_nothing_is_told_of_what_something_else_than_an_engine_says(driver, stranger):
    async with listening(STRANGERS[stranger]) as (port, seen):
        url, opener, backend = f"http://127.0.0.1:{port}", await opened(driver), await watched()
        for kind in (OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD):
            told = order(driver, url, backend, kind=kind)
            state_of = told.state.__class__(pool="rollout", driver=driver.name, gpu_mb=17_500,
                                            options=(("url", url), ("end_wait_s", 0.2)))  # fmt: skip
            told = StateOrder(**{name: getattr(told, name) for name in told.__struct_fields__} | {"state": state_of})
            with pytest.raises(PluginError) as raised:
                await tell(opener, told)
            assert SECRET not in str(raised.value)
            assert SECRET not in (await opener.probe(told)).error
        asked = {head.partition(" HTTP/")[0] for head in seen}
        assert asked, "it was asked what it is"
        assert asked <= {"GET /is_sleeping", "GET /server_info", "GET /health", "GET /model_info"}, "and told nothing"


@each_driver
@pytest.mark.asyncio
async def test_what_an_engine_itself_says_went_wrong_is_told(driver):
    fake, call = {"vllm": (FakeVllm, "POST /sleep"), "sglang": (FakeSglang, "POST /pause_generation")}[driver.name]
    async with fake() as engine:
        engine.always[call] = "error"
        park = order(driver, engine.url, await watched(), kind=OrderKind.PARK)
        with pytest.raises(NotDone, match=rf"{call} of {engine.url} on box was answered 500: .*InternalServerError"):
            await tell(await opened(driver), park)


@pytest.mark.asyncio
async def test_a_call_that_is_sent_elsewhere_is_not_done():
    """What is in front of an engine (a proxy that wants https) answers so, and the engine has not moved."""
    async with listening(http(307, headers="location: https://127.0.0.1:1/sleep\r\n")) as (port, _):
        url = f"http://127.0.0.1:{port}"
        engine = Engine(url, order(VllmResidency, url, await watched()), {}, vouched=True)
        with pytest.raises(NotDone, match=f"POST /sleep of {url} on box was answered 307"):
            await engine.call("POST", "/sleep")
        assert not await engine.answers("/health")


@each_driver
@pytest.mark.asyncio
async def test_an_answer_without_an_end_is_not_taken_in(driver):
    async with listening(endless) as (port, _):
        park = order(driver, f"http://127.0.0.1:{port}", await watched(), kind=OrderKind.PARK)
        with pytest.raises(ContactLost, match="more than 1 MB"):
            await tell(await opened(driver), park)


# ---- several engines on a node ---------------------------------------------------------------------------------------

FOUR = ("box/gpu0", "box/gpu1", "box/gpu2", "box/gpu3")


def part_of_a_node(driver, kind, gpus, each=2):
    several = structs.replace(state(driver, "http://127.0.0.1:80{gpu}0"), engine_gpus=each)
    return structs.replace(order(driver, "", kind=kind), gpus=gpus, node_gpus=FOUR, state=several)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [VllmResidency, SglangResidency])
async def test_a_load_on_a_part_is_for_the_engines_of_these_gpus_and_a_park_for_all(kind):
    """The engine whose GPUs another job's tail still holds sleeps on."""
    driver = await opened(kind)

    def urls(kind, gpus):
        return [(engine.url[-4:], engine.order.gpus) for engine in driver.engines(part_of_a_node(driver, kind, gpus))]

    first, second = ("8000", FOUR[:2]), ("8020", FOUR[2:])
    assert urls(OrderKind.LOAD, FOUR[2:]) == [second]
    assert urls(OrderKind.LOAD, FOUR[1:]) == [second], "half of the other engine's GPUs are not its own"
    assert urls(OrderKind.LOAD, FOUR) == urls(OrderKind.PARK, FOUR) == [first, second]
    assert urls(OrderKind.PARK, FOUR[2:]) == urls(OrderKind.DISCARD, FOUR[2:]) == [first, second]


@pytest.mark.asyncio
async def test_a_load_onto_gpus_on_which_no_whole_engine_is_is_not_done():
    driver = await opened(VllmResidency)

    with pytest.raises(NotDone, match="none of the engines of 2 GPUs on box/gpu3 lies within box/gpu1, box/gpu2"):
        driver.engines(part_of_a_node(driver, OrderKind.LOAD, FOUR[1:3]))


@pytest.mark.asyncio
async def test_several_engines_at_one_address_are_refused():
    driver = await opened(VllmResidency)

    with pytest.raises(ValueError, match=r"each 2 GPUs have an engine of their own .*say \{gpu\} in its port"):
        driver.check(structs.replace(state(driver, "http://127.0.0.1:8000"), engine_gpus=2))
    driver.check(structs.replace(state(driver, "http://127.0.0.1:80{gpu}"), engine_gpus=2))
