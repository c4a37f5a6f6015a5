"""``forward.py SOCKET``: a port that leads to a Unix socket, as ``ssh -L PORT:SOCKET`` makes one. Prints the port."""

import contextlib
import socket
import socketserver
import sys
import threading


class Both(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(sys.argv[1])
            back = threading.Thread(target=pump, args=(there, self.request), daemon=True)
            back.start()
            pump(self.request, there)
            back.join(5)


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Hand on what comes, until nothing more does."""
    with contextlib.suppress(OSError):
        while read := source.recv(65_536):
            sink.sendall(read)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), Both) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
