"""What reaching hosts by SSH costs: python backends/ssh/tests/measure.py. Prints one JSON object.

In each round the command itself is run (the same program, on this machine) and then the backend's call, so that both
meet the same load. ``beyond_ms`` is the difference of the medians.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "shared"))
sys.path.insert(0, str(Path(__file__).parent))

from ssh_servers import SSHD, Keys, OpenSshd

from conftest import GPUS, OwnServer
from rollmuxd.spi import HostConfig
from rollmuxd_backend_local import payload
from rollmuxd_backend_ssh import SshBackend

ROUNDS = 60


async def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = Keys(folder)
        (folder / "gpus.json").write_text(json.dumps({"gpus": GPUS * 4}))
        options = {"config": str(keys.config), "made_up_gpus": str(folder / "gpus.json"), "python": sys.executable}
        found = {"asyncssh": await of_asyncssh(keys, options)}
        if SSHD is not None:
            found["openssh"] = await of_openssh(keys, options)
        found["twenty_hosts"] = await twenty(folder, options)
    print(json.dumps(found, indent=2))


async def of_openssh(keys, options):
    server = OpenSshd(keys)
    server.start()
    keys.add("open", "127.0.0.1", server.port)
    try:
        return await calls("open", options)
    finally:
        server.stop()


async def of_asyncssh(keys, options):
    server = OwnServer(keys)
    await server.start()
    keys.add("own", "127.0.0.1", server.port)
    try:
        return await calls("own", options)
    finally:
        await server.stop()


async def calls(host, options):
    """Medians, in ms: the command itself, the bare exec of the same line over the connection, the backend's call."""
    backend = await SshBackend.open([HostConfig(id=host)], options)
    await backend._line(host).connection()
    connection = backend._line(host)._connection
    took = {name: [] for name in ("true", "true_over_ssh", "run_true", "look", "look_over_ssh", "observe", "exchange")}

    async def timed(name, call):
        began = time.perf_counter()
        await call()
        took[name].append((time.perf_counter() - began) * 1000)

    packed = payload.pack({"ask": "look", "made_up": options["made_up_gpus"]}, "mark:")
    look = (options["python"], "-I", "-S", "-c", payload.OPEN)
    line = " ".join(f"'{word}'" for word in look)
    port = int(options_port(options, host))
    for _ in range(ROUNDS):
        await timed("true", lambda: local(("true",), b""))
        await timed("true_over_ssh", lambda: connection.run("exec true"))
        await timed("run_true", lambda: backend.run(host, ("true",)))
        await timed("look", lambda: local(look, packed))
        await timed("look_over_ssh", lambda: connection.run(f"exec {line}", input=packed, encoding=None))
        await timed("observe", lambda: backend.observe(host))
        # Its own sshd listens there.
        await timed("exchange", lambda: backend.exchange(host, "127.0.0.1", port, b"", most=1))
    await backend.close()
    medians = {name: statistics.median(times) for name, times in took.items()}
    return {
        "ms": {name: round(value, 2) for name, value in medians.items()},
        "run_beyond_the_command_over_ssh_ms": round(medians["run_true"] - medians["true_over_ssh"], 2),
        "observe_beyond_the_command_over_ssh_ms": round(medians["observe"] - medians["look_over_ssh"], 2),
        "run_beyond_the_command_itself_ms": round(medians["run_true"] - medians["true"], 2),
        "observe_beyond_the_command_itself_ms": round(medians["observe"] - medians["look"], 2),
    }


def options_port(options, host):
    lines = Path(options["config"]).read_text().split(f"Host {host}\n")[1].splitlines()
    return next(line.split()[1] for line in lines if line.split()[:1] == ["Port"])


async def local(argv, stdin):
    await asyncio.to_thread(subprocess.run, argv, input=stdin, capture_output=True)


async def twenty(folder, options):
    """Twenty hosts that take 1 s each to be reached, but for one that takes 2 s."""
    servers, hosts = [], []
    keys = Keys(folder)
    for number in range(20):
        server = OwnServer(keys)

        async def before(seconds=2.0 if number == 7 else 1.0):
            await asyncio.sleep(seconds)

        server.before = before
        await server.start()
        keys.add(f"box{number}", "127.0.0.1", server.port)
        servers.append(server)
        hosts.append(f"box{number}")
    backend = await SshBackend.open([HostConfig(id=host) for host in hosts], options)
    began = time.perf_counter()
    await asyncio.gather(*(backend.run(host, ("true",)) for host in hosts), return_exceptions=True)
    took = time.perf_counter() - began
    await backend.close()
    for server in servers:
        await server.stop()
    return {"slowest_s": 2.0, "all_twenty_s": round(took, 2)}


if __name__ == "__main__":
    asyncio.run(main())
