"""The audit of dependencies says what is known, and fails nothing where nobody can be asked."""

import importlib.util
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("rollmuxd_tests_meta_audit", Path(__file__).with_name("audit.py"))
audit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)


@contextmanager
def database(answer):
    """Something that answers as osv.dev does."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
            body = json.dumps({"results": [answer(query["package"]["name"]) for query in asked]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_known_hole_fails_the_check_and_says_where_to_read(capsys):
    with database(lambda name: {"vulns": [{"id": "GHSA-1"}]} if name == "httpx" else {}) as url:
        assert audit.main(url) == 1
    said = capsys.readouterr().out
    assert "httpx" in said
    assert "https://osv.dev/GHSA-1" in said


def test_without_holes_all_packages_are_counted(capsys):
    with database(lambda name: {}) as url:
        assert audit.main(url) == 0
    assert f"any of {len(audit.pinned(audit.CONSTRAINTS.read_text()))} packages" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://nowhere.invalid"])
def test_without_a_network_it_is_skipped_and_says_so(url, capsys):
    assert audit.main(url) == 0
    assert "skipped: no network" in capsys.readouterr().out


def test_a_hole_that_does_not_concern_us_is_passed_over(monkeypatch):
    monkeypatch.setitem(audit.ACCEPTED, "GHSA-1", "we do not use that part")
    with database(lambda name: {"vulns": [{"id": "GHSA-1"}]}) as url:
        assert audit.main(url) == 0
