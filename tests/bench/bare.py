"""The floor of an HTTP call: the daemon's own server, uvicorn with httptools, around an app that does nothing.

Run as a process of its own; prints the port it listens on. ``/park/30`` answers after 30 seconds, all else at once.
"""

import asyncio
import importlib.util
import os
import socket
from typing import Any

import uvicorn

#: about as long as the daemon's answer to a grant
BODY = b'{"slot":"s100","status":"running","padding":"' + b"x" * 300 + b'"}'
HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(BODY)).encode()),
    (b"cache-control", b"no-store"),
]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, wait if it is told to, answer."""
    while (await receive()).get("more_body"):
        pass
    path: str = scope["path"]
    if path.startswith("/park/"):
        await asyncio.sleep(float(path.removeprefix("/park/")))
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": BODY})


def main() -> None:
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen(2048)
    print(os.getpid(), bound.getsockname()[1], flush=True)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        loop="uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=2048,
        timeout_keep_alive=75,
    )
    uvicorn.Server(config).run(sockets=[bound])


if __name__ == "__main__":
    main()
