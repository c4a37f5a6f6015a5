"""The dashboard's files are served to everybody, under a policy that lets nothing else in; its data is not."""

import re

import pytest

from rollmuxd.daemon.http.routes.web import FILES

pytestmark = pytest.mark.asyncio


async def test_the_page_and_all_that_it_is_made_of_come_without_a_key(running):
    async with running() as world, world.client(None) as nobody:
        page = await nobody.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        parts = re.findall(r'(?:src|href)="(/web/[^"]+)"', page.text)
        assert len(parts) >= 4
        for part in parts:
            assert (await nobody.get(part)).status_code == 200, part
        assert (await nobody.get("/web/main.js")).headers["content-type"] == "text/javascript; charset=utf-8"
        assert (await nobody.get("/v1/me")).status_code == 401


async def test_what_is_imported_is_there():
    for name, file in FILES.items():
        if name.endswith(".js") and "/" not in name:
            for imported in re.findall(r'from "\./([^"]+)"', file.body.decode()):
                assert imported in FILES, f"{name} imports {imported}"


async def test_a_browser_is_told_to_load_nothing_from_elsewhere_and_to_run_no_script_within_the_page(running):
    async with running() as world, world.client(None) as nobody:
        for path in ("/", "/web/main.js", "/web/style.css"):
            headers = (await nobody.get(path)).headers
            policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'"
            assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
            assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
        page = (await nobody.get("/")).text
        assert not re.search(r"<script(?![^>]*\bsrc=)", page)
        assert not re.search(r"\son\w+=|\sstyle=|https?://", page)


async def test_nothing_else_of_the_machine_is_served(running):
    async with running() as world, world.client(None) as nobody:
        for path in (
            "/web/../daemon/access/keys.py",
            "/web/..%2fkeys.py",
            "/web//etc/passwd",
            "/web/",
            "/web/nothing.js",
        ):
            answer = await nobody.get(path)
            assert answer.status_code == 404, path
            assert answer.headers["content-type"] == "application/problem+json"


async def test_who_asks_is_told_who_they_are_and_how_far_the_facts_go(running):
    async with running() as world, world.client("viewer") as viewer, world.client("root") as root:
        me = (await viewer.get("/v1/me")).json()
        assert (me["owner"], me["user"], me["role"], me["mode"]) == ("team", "vera", "viewer", "share")
        assert world.secrets["viewer"].startswith(f"rmx_{me['key']}_")
        assert (me["first"], me["last"]) == (1, world.writer.durable_seq)
        assert (await root.get("/v1/me")).json()["role"] == "admin"
    async with running() as world, world.on_socket(0) as root:
        me = (await root.get("/v1/me")).json()
        assert (me["role"], me["key"]) == ("admin", "")


#: what is said of who asks, and whether that is heard where no key is needed
ASKERS = {
    "the page itself, at a forwarded socket": ({"host": "localhost:8080", "sec-fetch-site": "same-origin"}, True),
    "a bookmark": ({"host": "127.0.0.1:8080", "sec-fetch-site": "none"}, True),
    "IPv6": ({"host": "[::1]:8080", "sec-fetch-site": "same-origin"}, True),
    "our own client, at the socket": ({"host": "rollmuxd"}, True),
    "the page itself, at an address": ({"host": "192.0.2.7:7878"}, True),
    # Of plain http, other than of localhost, a browser says no more than which page a button is on.
    "the page's button, at an address": ({"host": "192.0.2.7:7878", "origin": "http://192.0.2.7:7878"}, True),
    "the page's button, behind TLS": ({"host": "192.0.2.7", "origin": "https://192.0.2.7"}, True),
    "the page's button, in an old browser": ({"host": "LOCALHOST:8080", "origin": "http://localhost:8080"}, True),
    "the whole name": ({"host": "localhost.:8080", "origin": "http://localhost.:8080"}, True),
    "a button of another port's page": ({"host": "192.0.2.7:7878", "origin": "http://192.0.2.7:7879"}, False),
    "a button of another machine's page": ({"host": "192.0.2.7:7878", "origin": "http://192.0.2.70:7878"}, False),
    "a button of a page that is nowhere": ({"host": "192.0.2.7:7878", "origin": "null"}, False),
    "a button of such a name's page": ({"host": "evil.example:8080", "origin": "http://evil.example:8080"}, False),
    "a button of which the browser says more": (
        {"host": "192.0.2.7:7878", "origin": "http://192.0.2.7:7878", "sec-fetch-site": "cross-site"},
        False,
    ),
    "another site's page": ({"host": "localhost:8080", "sec-fetch-site": "cross-site"}, False),
    "another port's page": ({"host": "localhost:8080", "sec-fetch-site": "same-site"}, False),
    "an old browser, for another site": ({"host": "localhost:8080", "origin": "https://evil.example"}, False),
    "a name that was made to lead here": ({"host": "evil.example:8080", "sec-fetch-site": "same-origin"}, False),
    # So says a browser: of plain http, other than of localhost, it does not tell who asks.
    "such a name, in the clear": ({"host": "evil.example:8080"}, False),
    "such a name that begins like ours": ({"host": "localhost.evil.example:8080"}, False),
    "such a name that looks like an address": ({"host": "127.0.0.1.evil.example"}, False),
    "ours, and then such a name": ({"host": "localhost:80.evil.example"}, False),
    "no name": ({"host": ""}, False),
}


@pytest.mark.parametrize("asker", ASKERS)
async def test_another_sites_page_cannot_use_a_socket_that_needs_no_key(running, asker):
    headers, heard = ASKERS[asker]
    async with running() as world, world.client() as alice, world.on_socket(0) as root:
        job = await world.job(alice)
        answer = await root.post(f"/v1/jobs/{job.id}/pause", headers=headers)
        assert answer.status_code == (200 if heard else 403)
        assert (world.state.jobs[job.id].status == "paused") is heard


async def test_a_name_that_was_made_to_lead_here_reads_nothing_where_no_key_is_needed(running):
    """A page of evil.example, whose name now leads to this machine, is the same site as this to a browser."""
    async with running(access={"require_keys": False}) as world, world.client(None) as tcp, world.on_socket(0) as unix:
        for asked in (tcp, unix):
            for path in ("/v1/me", "/v1/facts", "/metrics"):
                refused = await asked.get(path, headers={"host": "evil.example:8878"})
                assert refused.status_code == 403, path
            assert "'evil.example'" in refused.json()["detail"]
            assert "http://localhost" in refused.json()["detail"]
            assert "tls.names" in refused.json()["detail"]
            assert (await asked.get("/v1/me", headers={"host": "localhost:8878"})).json()["role"] == "admin"


async def test_without_keys_it_is_heard_by_the_names_that_it_was_given_too(running, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Box")
    no_keys = {
        "daemon": {"listen": "Gpu.example.org:7878"},
        "access": {"require_keys": False, "insecure": True},
        "tls": {"names": ["pool.example.org", "*.gpus.example.org"]},
    }
    heard = ("gpu.example.org", "pool.example.org:443", "POOL.example.org", "box:7878", "n7.gpus.example.org")
    async with running(**no_keys) as world, world.client(None) as client:
        for host in heard:
            assert (await client.get("/v1/me", headers={"host": host})).status_code == 200, host
        for host in ("example.org", "evil.example", "gpus.example.org", "a.b.gpus.example.org", "xbox"):
            assert (await client.get("/v1/me", headers={"host": host})).status_code == 403, host


async def test_with_a_key_it_does_not_matter_where_a_call_comes_from(running):
    async with running() as world, world.client("viewer") as viewer:
        for headers in ({"host": "rollmux.example", "sec-fetch-site": "same-origin"}, {"host": "rollmux.example"}):
            assert (await viewer.get("/v1/me", headers=headers)).status_code == 200
