"""The daemon's member of a Ray cluster: a process of its own.

    python -m rollmuxd_backend_ray.cluster_member SOCKET ADDRESS

joins the cluster, says ``ready`` and serves :mod:`~rollmuxd_backend_local.agent.frames` on a Unix socket, until its
standard input ends. Ray ends its own process when the cluster's head stays away, takes signals, threads and standard
outputs for itself, and blocks. None of that is for the daemon's process.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollmuxd_backend_local import payload
from rollmuxd_backend_local.agent import frames, onnode
from rollmuxd_backend_local.agent.connection import looked_at
from rollmuxd_backend_local.agent.reached import Said
from rollmuxd_backend_ray.connection import FOLDER
from rollmuxd_backend_ray.nodes import NotThere, pick

#: seconds between two looks whether this is a member still, and what one of them may take
_LOOK_S: Final = 5.0
_LOOKED_S: Final = 10.0
_SAID: Final = 300
#: what an actor may take to start, however long a caller waits for it
_MADE_S: Final = 60.0
#: what Ray has told its own worker is nothing to commands
_RAYS_OWN: Final = "RAY_"
#: the end of a call may take so long to be told to a node
_END_S: Final = 10.0


class Nodes:
    """An actor on each node that was asked for, made when it is needed and made again when it has died."""

    def __init__(self) -> None:
        # Sent as it is: the nodes have nothing of ours installed.
        ray.cloudpickle.register_pickle_by_value(onnode)
        # It takes no CPU of the cluster: a full node answers as well. Nothing is sent twice.
        self._kind = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=1_000)(onnode.OnNode)
        self._actors: dict[frames.Node, asyncio.Task[Any]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        #: something is not as it should be: perhaps with the cluster
        self._doubt = asyncio.Event()

    async def while_a_member(self) -> None:
        """Return when the cluster is another one: its head has begun again, or this machine's node is none of it.

        Ray itself would wait for the old one for ever.
        """
        own = ray.get_runtime_context().get_node_id()
        with contextlib.suppress(Exception):  # the cluster does not answer
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._doubt.wait(), _LOOK_S)
                self._doubt.clear()
                nodes = await asyncio.wait_for(asyncio.to_thread(ray.nodes), _LOOKED_S)
                if not any(node["NodeID"] == own and node["Alive"] for node in nodes):
                    return

    def end(self, node: frames.Node, call: str) -> None:
        """Have the node's actor end a call, without waiting for that, whether or not there is one."""
        task = asyncio.create_task(self._end(node, call))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _end(self, node: frames.Node, call: str) -> None:
        if node not in self._actors:
            return  # with it has gone whatever this is about
        with contextlib.suppress(NotThere, TimeoutError):
            await asyncio.wait_for(self.call(node, _END_S, "end", call), _END_S)

    async def look(self, node: frames.Node) -> Mapping[str, Any]:
        """The node as the cluster has it now. Raises NotThere."""
        return pick(node, await asyncio.to_thread(ray.nodes))

    async def call(self, node: frames.Node, reach_s: float, method: str, *arguments: Any) -> Any:
        """Call a method of the node's actor. Raises NotThere."""
        making = self._actors.get(node)
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._actors[node] = asyncio.create_task(self._make(node))
            making.add_done_callback(looked_at)
        try:
            # Shared by all that wait for it; none of them takes it along.
            actor = await asyncio.wait_for(asyncio.shield(making), reach_s)
        except TimeoutError:
            raise NotThere(f"no actor has started on the node within {reach_s:g} s") from None
        try:
            return await getattr(actor, method).remote(*arguments)
        except ActorUnavailableError as error:
            self._doubt.set()
            raise NotThere(f"its actor cannot be reached ({_first_line(error)})") from error
        except RayError as error:
            if isinstance(error, ActorDiedError) and self._actors.get(node) is making:
                del self._actors[node]
            raise NotThere(f"its actor has died ({_first_line(error)})") from error

    async def _make(self, node: frames.Node) -> Any:
        seen = await self.look(node)
        pinned = NodeAffinitySchedulingStrategy(seen["NodeID"], soft=False)
        make = self._kind.options(scheduling_strategy=pinned).remote
        actor = await asyncio.to_thread(make, payload.questions(), _RAYS_OWN)
        try:
            await asyncio.wait_for(actor.hello.remote(), _MADE_S)
        except TimeoutError:
            ray.kill(actor)
            raise NotThere(f"no actor has started on the node within {_MADE_S:g} s") from None
        except RayError as error:
            raise NotThere(f"no actor could be started on the node ({_first_line(error)})") from error
        return actor


class Service:
    """What one connection of the daemon's asks for."""

    def __init__(self, nodes: Nodes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._nodes, self._reader, self._writer = nodes, reader, writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        #: so that no two connections' calls have one name
        self._name = secrets.token_hex(6)

    async def serve(self) -> None:
        """Until it is closed; then everything that was under way is ended."""
        try:
            while True:
                said = await frames.read(self._reader)
                if isinstance(said, frames.Ask):
                    task = self._tasks[said.number] = asyncio.create_task(self._answer(said))
                    task.add_done_callback(partial(self._tasks.pop, said.number))
                elif isinstance(said, frames.Forget) and said.number in self._tasks:
                    self._tasks[said.number].cancel()
        except (EOFError, ValueError):
            pass
        finally:
            left = list(self._tasks.values())
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            self._writer.close()

    async def _answer(self, ask: frames.Ask) -> None:
        try:
            said: Said = await asyncio.wait_for(self._do(ask), ask.limit_s or None)
        except TimeoutError:
            said = frames.Failed("lost", f"the node did not answer within {ask.limit_s:g} s")
        except NotThere as error:
            said = frames.Failed("lost", str(error))
        except Exception as error:
            said = frames.Failed("lost", f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            frames.write(self._writer, frames.Answer(ask.number, said))
            await self._writer.drain()

    async def _do(self, ask: frames.Ask) -> Said:
        if isinstance(ask.wish, frames.Look):
            return frames.Data(msgspec.json.encode(await self._nodes.look(ask.node)))
        call, told = f"{self._name}-{ask.number}", msgspec.to_builtins(ask.wish)
        try:
            said = await self._nodes.call(ask.node, ask.reach_s, "do", call, told, ask.reach_s)
        except asyncio.CancelledError:
            self._nodes.end(ask.node, call)
            raise
        return msgspec.convert(said, Said)  # type: ignore[no-any-return]  # a union


async def serve(socket: str) -> None:
    """Serve on a Unix socket until standard input ends, or this is no member of the cluster any more."""
    nodes = Nodes()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Service(nodes, reader, writer).serve()

    await asyncio.start_unix_server(connected, socket)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    over = asyncio.Event()
    stdin = sys.stdin.fileno()
    asyncio.get_running_loop().add_reader(stdin, lambda: over.set() if not os.read(stdin, 1024) else None)
    await asyncio.wait(
        [asyncio.create_task(over.wait()), asyncio.create_task(nodes.while_a_member())],
        return_when=asyncio.FIRST_COMPLETED,
    )
    if Path(socket).parent.name.startswith(FOLDER):  # a daemon that was killed has not removed it
        shutil.rmtree(Path(socket).parent, ignore_errors=True)
    # Nothing is waited for: the actors go with this process, and what their commands have started in turn stays.
    os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Join the cluster and serve. Ends with a line that says why, where that cannot be."""
    socket, address = arguments
    try:
        ray.init(address=address, namespace="rollmuxd", log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        sys.exit(_first_line(error))
    asyncio.run(serve(socket))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:_SAID] if lines else type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
