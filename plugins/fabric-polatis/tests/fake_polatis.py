"""A Polatis switch's RESTCONF server, for tests: the data model, basic auth, and one transaction per request.

    python fake_polatis.py PORT_FILE [--ports 16] [--mirrors-s 0.02]

It writes its port to the file. The transaction is refused as a whole where a port would be in two pairs.
"""

import argparse
import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = "optical-switch:cross-connects"
PATH = f"/api/data/{KEY}"


class Switch:
    """The device: pairs of ingress and egress."""

    def __init__(self, ports: int = 16, mirrors_s: float = 0.0, password: str = "secret") -> None:
        self.ports, self.mirrors_s = ports, mirrors_s
        self.auth = "Basic " + base64.b64encode(f"admin:{password}".encode()).decode()
        self.pairs: dict[int, int] = {}
        self.lock = threading.Lock()
        self.puts = 0
        #: reads that have come; and whether they are answered
        self.reading = threading.Semaphore(0)
        self.reads = threading.Event()
        self.reads.set()

    def replace(self, pairs: dict[int, int]) -> str:
        """All pairs at once; what is wrong with them."""
        if not all(1 <= a <= self.ports < b <= 2 * self.ports for a, b in pairs.items()):
            return "no such port"
        if len(set(pairs.values())) < len(pairs):
            return "a port is in two pairs"
        with self.lock:
            time.sleep(self.mirrors_s)  # the mirrors of the device move
            self.pairs = pairs
            self.puts += 1
        return ""


def serve(switch: Switch) -> ThreadingHTTPServer:
    """A server on a free port of loopback; the caller runs and closes it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args) -> None:
            pass

        def answer(self, status: int, body: object = None) -> None:
            content = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/yang-data+json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def allowed(self) -> bool:
            if self.headers.get("Authorization") != switch.auth:
                self.answer(401)
                return False
            if self.path != PATH:
                self.answer(404)
                return False
            return True

        def do_GET(self) -> None:
            if self.allowed():
                switch.reading.release()
                switch.reads.wait()
                with switch.lock:
                    pairs = [{"ingress": a, "egress": b} for a, b in sorted(switch.pairs.items())]
                self.answer(200, {KEY: {"pair": pairs}}) if pairs else self.answer(404)

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if self.allowed():
                given = json.loads(content)[KEY].get("pair", [])
                wrong = switch.replace({pair["ingress"]: pair["egress"] for pair in given})
                if wrong:
                    self.answer(400, {"ietf-restconf:errors": {"error": [{"error-message": wrong}]}})
                else:
                    self.answer(204)

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port_file", type=Path)
    parser.add_argument("--ports", type=int, default=16)
    parser.add_argument("--mirrors-s", type=float, default=0.02)
    given = parser.parse_args()
    server = serve(Switch(given.ports, given.mirrors_s))
    beside = given.port_file.with_suffix(".new")
    beside.write_text(str(server.server_address[1]))
    beside.replace(given.port_file)
    server.serve_forever()
