"""An engine on a host's loopback is talked to over the backend, and what cannot be known is never taken for a no."""

import contextlib

import pytest
from bad_plugins import SilentBackend
from faulty_mock import FaultyMock as MockBackend
from serving import serving

from rollmuxd.spi import ContactLost, HostConfig, NotDone, http

HOST = HostConfig(id="box", gpus=("box/gpu0",))


@contextlib.asynccontextmanager
async def engine(answer):
    """A server that reads a request's head and body and hands it to ``answer``; its base URL, and what it was asked."""
    seen = []

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.split()[1] for line in head.lower().splitlines() if line.startswith("content-length")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        seen.append((head, body))
        await answer(reader, writer)

    async with serving(serve) as (host, port):
        yield f"http://{host}:{port}", seen


async def ok(reader, writer):
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n{"up": true}')
    await writer.drain()


async def hang_up(reader, writer):
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
    await writer.drain()


async def silence(reader, writer):
    await reader.read()  # until the other end hangs up


async def mock():
    return await MockBackend.open([HOST], {})


@pytest.mark.asyncio
async def test_a_request_goes_to_the_engine_and_its_answer_comes_back():
    backend = await mock()
    async with engine(ok) as (url, seen):
        more = {"params": {"level": 1}, "json": {"tags": ["weights"]}}
        answer = await http.request(backend, "box", "POST", f"{url}/sleep", **more)
    ((head, body),) = seen

    assert answer.status_code == 200
    assert head.startswith("POST /sleep?level=1 HTTP/1.1\r\n")
    assert body == b'{"tags":["weights"]}'


@pytest.mark.asyncio
async def test_where_nobody_listens_is_not_there_and_nothing_was_sent():
    backend = await mock()
    async with engine(ok) as (url, _):
        pass
    with pytest.raises(http.NotThere):
        await http.request(backend, "box", "POST", url)


@pytest.mark.asyncio
async def test_a_host_that_is_away_is_contact_lost():
    backend = await mock()
    backend.faults.add("lose")
    with pytest.raises(ContactLost):
        await http.request(backend, "box", "POST", "http://127.0.0.1:1/sleep")


@pytest.mark.asyncio
async def test_an_engine_that_dies_in_its_answer_has_broken_off_and_not_answered():
    backend = await mock()
    async with engine(hang_up) as (url, _):
        with pytest.raises(http.BrokeOff):
            await http.request(backend, "box", "GET", url)


@pytest.mark.asyncio
async def test_time_limits_are_kept_for_the_answer_and_for_the_connection():
    backend = await mock()
    async with engine(silence) as (url, _):
        with pytest.raises(TimeoutError):
            await http.request(backend, "box", "GET", url, limit_s=0.05)
    with pytest.raises(TimeoutError):
        await http.request(SilentBackend(backend), "box", "GET", "http://127.0.0.1:1", limit_s=0.05)


@pytest.mark.asyncio
async def test_a_backend_that_exchanges_no_bytes_says_so():
    class Blind:
        pass

    with pytest.raises(NotDone, match="Blind exchanges no bytes"):
        await http.request(Blind(), "box", "GET", "http://127.0.0.1:1")


#: heads that take their parser a time that grows with the square of their blanks, and a chunk's
BLANKS = {
    "in a header": b"HTTP/1.1 200 OK\r\nx:" + b" " * 60_000 + b"\0\r\n\r\n",
    "in a header, with tabs": b"HTTP/1.1 200 OK\r\nx:" + b"\t " * 30_000 + b"\0\r\n\r\n",
    "in a header of many lines": b"HTTP/1.1 200 OK\r\nx:" + b"\r\n " * 20_000 + b"\0\r\n\r\n",
    "in a chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;" + b" " * 60_000 + b"\n\r\nx\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("where", BLANKS)
@pytest.mark.asyncio
async def test_an_answer_with_thousands_of_blanks_in_a_row_is_refused_before_it_is_parsed(where):
    async def answer(reader, writer):
        writer.write(BLANKS[where])
        await writer.drain()

    backend = await mock()
    async with engine(answer) as (url, _):
        with pytest.raises(http.BrokeOff, match="256 blanks in a row"):
            await http.request(backend, "box", "GET", url)


@pytest.mark.asyncio
async def test_an_answer_that_is_indented_is_read():
    body = b"[\r\n" + b" " * 200 + b"1\n" + b" " * 200 + b"]"

    async def answer(reader, writer):
        for at in range(0, len(body), 100):
            head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) if at == 0 else b""
            writer.write(head + body[at : at + 100])
            await writer.drain()

    backend = await mock()
    async with engine(answer) as (url, _):
        assert (await http.request(backend, "box", "GET", url)).json() == [1]
