"""What a backend and a residency driver must do, as tests: subclass, say how yours is made, run pytest.

    class TestMine(BackendContract):
        host = "box"
        async def make(self):
            return await MyBackend.open([HostConfig(id="box", gpus=("box/gpu0", "box/gpu1"))], {})

The tests' names are the sentences of the contract. Those about things that only you can bring about (a host that goes
away, a process that is yours to end) are skipped until you say how, by overriding the method that the reason names.

Needs pytest with pytest-asyncio, and anyio. Not imported by :mod:`rollmuxd.spi`, which stays free of them.
"""

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, ClassVar

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from msgspec import Struct

from rollmuxd.core.model import Fence, GpuId, HostId, OrderKind, StateSpec
from rollmuxd.spi.backend import (
    Backend,
    KeepsOutput,
    OpensConnections,
    ProcessOrder,
    Ran,
    RunsCommands,
    Sight,
    StartsProcesses,
)
from rollmuxd.spi.errors import ContactLost, NotDone, PluginError
from rollmuxd.spi.residency import Residency, StateOrder

#: Sends back whatever each connection brings; its port is written into a file.
_ECHO = """
import os, socket, sys, threading
def serve(line):
    while data := line.recv(65536):
        line.sendall(data)
    line.close()
listener = socket.create_server(("127.0.0.1", 0))
with open(sys.argv[1], "w") as mark:
    mark.write("%d\\n" % listener.getsockname()[1])
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""

#: A call is cancelled after so many turns of the loop, one test of it each ...
_TURNS = range(12)
#: ... and after so many seconds, for calls that wait for something outside.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


class BackendContract:
    """What every backend must do. Override ``host`` and :meth:`make`; and what else you can bring about."""

    #: a host that the backend is made for, and that is there
    host: ClassVar[HostId] = "host1"
    #: seconds after which a call on a healthy host, or a cancelled one, counts as hung
    patience_s: ClassVar[float] = 20.0

    # ---- what you give ------------------------------------------------------------------------------------------

    async def make(self) -> Backend:
        """An opened backend for at least ``host``."""
        raise NotImplementedError("say how the backend is made: async def make(self)")

    async def make_unreachable(self) -> Backend:
        """A backend opened for ``host`` that was away before, and still is."""
        pytest.skip("make_unreachable is not given")

    async def take_away(self, backend: Backend) -> None:
        """Make ``host`` unreachable."""
        pytest.skip("take_away is not given")

    async def bring_back(self, backend: Backend) -> None:
        """Make ``host`` reachable again."""
        pytest.skip("bring_back is not given")

    async def occupy(self, backend: Backend) -> tuple[GpuId, int]:
        """Put some memory to use on a GPU of ``host``; which GPU, and how many MB at least."""
        pytest.skip("occupy is not given")

    async def start_process(self, backend: Backend) -> tuple[int, str]:
        """Start a process on ``host`` that is the backend's to end; its pid and start time."""
        pytest.skip("start_process is not given")

    async def is_running(self, backend: Backend, pid: int) -> bool:
        """Whether that process still runs."""
        pytest.skip("is_running is not given")

    async def make_again(self) -> Backend:
        """The backend as a daemon finds it that was restarted after :meth:`make`."""
        pytest.skip("make_again is not given")

    async def open_with(self, options: Mapping[str, Any]) -> Backend:
        """A backend for ``host`` with these in ``[hosts.options]``, besides what it needs."""
        pytest.skip("open_with is not given")

    # ---- the contract -------------------------------------------------------------------------------------------

    @pytest.mark.asyncio
    async def test_it_sees_every_gpu_of_the_host_exactly_once(self) -> None:
        backend = await self.make()
        await self._see(backend)
        await backend.close()

    @pytest.mark.asyncio
    async def test_used_memory_is_never_negative_nor_more_than_the_gpu_has(self) -> None:
        backend = await self.make()
        memory = {info.gpu: info.memory_mb for info in (await backend.inventory(self.host)).gpus}
        for seen in (await backend.observe(self.host)).gpus:
            assert 0 <= seen.used_mb <= memory[seen.gpu], f"{seen} on a GPU of {memory[seen.gpu]} MB"
        await backend.close()

    @pytest.mark.asyncio
    async def test_asked_twice_it_has_the_same_gpus_and_the_same_boot_id(self) -> None:
        backend = await self.make()
        first, second = await self._see(backend), await self._see(backend)
        assert first.boot_id == second.boot_id, "the boot id changed, and the machine was not restarted"
        assert [gpu.gpu for gpu in first.gpus] == [gpu.gpu for gpu in second.gpus]
        assert await backend.inventory(self.host) == await backend.inventory(self.host)
        await backend.close()

    @pytest.mark.asyncio
    async def test_it_may_be_called_concurrently(self) -> None:
        backend = await self.make()
        sights: list[Sight] = []

        async def look() -> None:
            sights.append(await self._see(backend))

        with anyio.fail_after(self.patience_s):
            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(look)
        assert len({sight.boot_id for sight in sights}) == 1
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_call_cancelled_at_any_await_ends_and_leaves_it_usable(self) -> None:
        backend = await self.make()
        for moment in _moments():
            with anyio.fail_after(self.patience_s):
                finished = await _cancelled(lambda: backend.observe(self.host), moment)
                await self._see(backend)
            if finished:
                break
        await backend.close()

    @pytest.mark.asyncio
    async def test_it_looks_each_time_and_never_gives_a_cached_answer(self) -> None:
        backend = await self.make()
        before = {seen.gpu: seen.used_mb for seen in (await self._see(backend)).gpus}
        gpu, mb = await self.occupy(backend)
        after = {seen.gpu: seen.used_mb for seen in (await self._see(backend)).gpus}
        assert after[gpu] >= before[gpu] + mb, (
            f"{gpu} had {before[gpu]} MB, {mb} came, and it is seen with {after[gpu]}"
        )
        await backend.close()

    @pytest.mark.asyncio
    async def test_opening_it_needs_no_host_to_be_there(self) -> None:
        backend = await self.make_unreachable()
        await self._is_lost(backend, self.host)
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_host_that_is_away_is_contact_lost_and_never_an_empty_answer(self) -> None:
        backend = await self.make()
        await self._see(backend)
        await self.take_away(backend)
        await self._is_lost(backend, self.host)
        await self._is_lost(backend, self.host)
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_host_that_comes_back_is_seen_again(self) -> None:
        backend = await self.make()
        await self.take_away(backend)
        await self._is_lost(backend, self.host)
        await self.bring_back(backend)
        await self._see(backend)
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_host_it_was_not_opened_for_is_contact_lost(self) -> None:
        backend = await self.make()
        await self._is_lost(backend, "no-such-host-anywhere")
        await backend.close()

    @pytest.mark.asyncio
    async def test_it_never_ends_a_process_whose_start_time_is_another(self) -> None:
        backend = await self.make()
        # This process: if it is ended after all, that will be noticed.
        assert not await backend.kill(self.host, os.getpid(), "started at another time")
        assert not await backend.kill(self.host, os.getpid(), "")
        await backend.close()

    @pytest.mark.asyncio
    async def test_it_never_ends_a_process_group_or_init(self) -> None:
        backend = await self.make()
        for pid in (0, 1):
            assert not await backend.kill(self.host, pid, "")
        await backend.close()

    @pytest.mark.asyncio
    async def test_it_ends_its_own_process_with_the_right_start_time_only(self) -> None:
        backend = await self.make()
        pid, started = await self.start_process(backend)
        assert not await backend.kill(self.host, pid, f"{started}0")
        assert await self.is_running(backend, pid), "a process was ended that could have been another's"
        assert await backend.kill(self.host, pid, started)
        with anyio.fail_after(self.patience_s):
            while await self.is_running(backend, pid):  # noqa: ASYNC110  # a process's end has no event for everybody
                await anyio.sleep(0.005)
        await backend.close()

    # ---- of those that start jobs' processes ----

    @pytest.mark.asyncio
    async def test_a_launch_told_twice_is_one_process(self) -> None:
        backend, starter = await self._starter()
        order = _process(("sleep", "600"))
        first = await starter.start(self.host, order)
        assert await starter.start(self.host, order) == first
        assert await starter.alive(self.host, order.launch)
        assert await starter.stop(self.host, order.launch)
        assert not await starter.alive(self.host, order.launch)
        assert not await starter.stop(self.host, order.launch), "there was nothing left to be ended"
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_stop_ends_what_the_process_started_in_turn_and_what_ignores_it(self) -> None:
        backend, starter = await self._starter()
        order = _process(("sh", "-c", "trap '' TERM; sleep 600 & sleep 600 & wait; wait; sleep 600"))
        await starter.start(self.host, order)
        await anyio.sleep(0.2)  # until its children are there
        with anyio.fail_after(self.patience_s):
            assert await starter.stop(self.host, order.launch)
        assert not await starter.alive(self.host, order.launch)
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_process_that_ends_by_itself_is_not_alive(self) -> None:
        backend, starter = await self._starter()
        order = _process(("true",))
        await starter.start(self.host, order)
        with anyio.fail_after(self.patience_s):
            while await starter.alive(self.host, order.launch):  # noqa: ASYNC110  # its end has no event for everybody
                await anyio.sleep(0.01)
        await backend.close()

    @pytest.mark.asyncio
    async def test_what_a_process_prints_can_be_read_in_pieces_and_after_its_end(self) -> None:
        backend, starter = await self._starter()
        if not isinstance(backend, KeepsOutput):
            pytest.skip(f"{type(backend).__name__} keeps no output")
        order = _process(("sh", "-c", "printf 123456; printf 789 >&2"))
        await starter.start(self.host, order)
        printed, at = b"", 0
        with anyio.fail_after(self.patience_s):
            while len(printed) < 9:
                piece = await backend.output(self.host, order.launch, at, 4)
                assert len(piece.data) <= 4
                assert piece.next == at + len(piece.data)
                printed, at = printed + piece.data, piece.next
                await anyio.sleep(0.01)
        assert printed == b"123456789"
        assert (await backend.output(self.host, order.launch, at, 4)).data == b""
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_program_that_is_not_there_is_not_started_and_says_so(self) -> None:
        backend, starter = await self._starter()
        order = _process(("/no/such/program",))
        with pytest.raises(NotDone, match="/no/such/program"):
            await starter.start(self.host, order)
        assert not await starter.alive(self.host, order.launch)
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_jobs_next_launch_ends_what_is_left_of_the_one_before_and_nobody_elses(self) -> None:
        backend, starter = await self._starter()
        one, other, next_ = _process(("sleep", "600")), _process(("sleep", "600"), job="j2"), _process(("sleep", "600"))
        for order in (one, other, next_):
            await starter.start(self.host, order)
        alive = [await starter.alive(self.host, order.launch) for order in (one, other, next_)]
        for order in (other, next_):
            await starter.stop(self.host, order.launch)
        assert alive == [False, True, True]
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_launch_that_comes_late_does_not_take_the_place_of_a_later_one(self) -> None:
        backend, starter = await self._starter()
        late, there = _process(("sleep", "600")), _process(("sleep", "600"))
        await starter.start(self.host, there)
        with pytest.raises(NotDone, match="late"):
            await starter.start(self.host, late)
        assert await starter.alive(self.host, there.launch)
        assert not await starter.alive(self.host, late.launch)
        await starter.stop(self.host, there.launch)
        await backend.close()

    @pytest.mark.asyncio
    async def test_after_a_restart_it_knows_its_processes_again(self) -> None:
        backend, starter = await self._starter()
        order = _process(("sleep", "600"))
        first = await starter.start(self.host, order)
        await backend.close()
        again = await self.make_again()
        assert isinstance(again, StartsProcesses)
        assert await again.start(self.host, order) == first
        assert await again.stop(self.host, order.launch)
        await again.close()

    async def _starter(self) -> tuple[Backend, StartsProcesses]:
        backend = await self.make()
        if not isinstance(backend, StartsProcesses) or not backend.starts_on(self.host):
            pytest.skip("the backend starts no processes on this host")
        return backend, backend

    # ---- of those that run commands ----

    @pytest.mark.asyncio
    async def test_a_command_gets_its_input_and_gives_both_outputs_and_its_exit_code(self) -> None:
        backend, runner = await self._runner()
        script = "cat; echo oops >&2; exit 3"
        ran = await runner.run(self.host, ("sh", "-c", script), stdin=b"\x00in\xff\n" * 20_000)
        assert (ran.exit_code, ran.stdout, ran.stderr) == (3, b"\x00in\xff\n" * 20_000, b"oops\n")
        assert (await runner.run(self.host, ("cat",))).stdout == b"", "without stdin there is nothing to be read"
        ran = await runner.run(self.host, ("sh", "-c", "kill -9 $$"))
        assert ran.exit_code == -9, f"a command that a signal ended, and its exit code is {ran.exit_code}"
        await backend.close()

    @pytest.mark.asyncio
    async def test_no_shell_reads_the_arguments_nor_the_environment_of_a_command(self) -> None:
        backend, runner = await self._runner()
        odd = (
            "",
            " a  b ",
            "$HOME",
            "`id`",
            "it's",
            '"',
            "\\",
            "*",
            "~",
            "!x",
            "a\nb",
            "-n",
            "é",
            "#",
            ";",
            "&&",
            "{1,2}",
        )
        ran = await runner.run(self.host, ("printf", "%s\\0", *odd))
        assert ran.stdout.decode().split("\0")[:-1] == list(odd)
        ran = await runner.run(self.host, ("env",), env={"ROLLMUX_A": "$HOME 'x' `id`", "ROLLMUX_B": ""})
        assert {"ROLLMUX_A=$HOME 'x' `id`", "ROLLMUX_B="} < set(ran.stdout.decode().splitlines())
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_command_whose_program_is_not_there_is_not_done_and_says_so(self) -> None:
        backend, runner = await self._runner()
        for program in ("/no/such/program", "no-such-program-anywhere"):
            with pytest.raises(NotDone, match=program):
                await runner.run(self.host, (program, "x"))
        with pytest.raises(NotDone):
            await runner.run(self.host, ())
        # The same exit code, of a program that is there.
        assert (await runner.run(self.host, ("sh", "-c", "exit 127"))).exit_code == 127
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_command_over_its_time_is_ended_with_what_it_started_and_is_contact_lost(self) -> None:
        backend, runner = await self._runner()
        mark = (await runner.run(self.host, ("mktemp",))).stdout.decode().strip()
        began = anyio.current_time()
        with pytest.raises(ContactLost):
            await runner.run(self.host, self._lasting(mark), timeout_s=0.5)
        assert anyio.current_time() - began < self.patience_s
        await self._is_ended(runner, mark)
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_command_that_is_cancelled_is_ended_with_what_it_started(self) -> None:
        backend, runner = await self._runner()
        mark = (await runner.run(self.host, ("mktemp",))).stdout.decode().strip()
        with anyio.fail_after(self.patience_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: runner.run(self.host, self._lasting(mark), timeout_s=600))
                await self._until(lambda: runner.run(self.host, ("cat", f"{mark}.there")), lambda ran: ran.stdout)
                tasks.cancel_scope.cancel()
        await self._is_ended(runner, mark)
        await backend.close()

    @pytest.mark.asyncio
    async def test_many_commands_run_at_the_same_time(self) -> None:
        backend, runner = await self._runner()
        said: dict[int, bytes] = {}

        async def say(number: int) -> None:
            said[number] = (await runner.run(self.host, ("sh", "-c", f"sleep 0.2; echo {number}"))).stdout

        with anyio.fail_after(self.patience_s):
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(say, number)
        assert said == {number: f"{number}\n".encode() for number in range(8)}
        await backend.close()

    @pytest.mark.asyncio
    async def test_commands_and_connections_to_a_host_that_is_away_are_contact_lost(self) -> None:
        backend, runner = await self._runner()
        await self.take_away(backend)
        for host in (self.host, "no-such-host-anywhere"):
            with anyio.fail_after(self.patience_s), pytest.raises(ContactLost):
                await runner.run(host, ("true",))
            if isinstance(backend, OpensConnections):
                with anyio.fail_after(self.patience_s), pytest.raises(ContactLost):
                    await backend.connect(host, "127.0.0.1", 1)
        await backend.close()

    async def _runner(self) -> tuple[Backend, RunsCommands]:
        backend = await self.make()
        if not isinstance(backend, RunsCommands):
            pytest.skip("the backend runs no commands")
        return backend, backend

    @staticmethod
    def _lasting(mark: str) -> tuple[str, ...]:
        """A command that goes on, and starts another; their process ids are in ``<mark>.there``."""
        return ("sh", "-c", f"sleep 600 & echo $$ $! >{mark}; mv {mark} {mark}.there; wait; sleep 600")

    async def _is_ended(self, runner: RunsCommands, mark: str) -> None:
        pids = (await runner.run(self.host, ("cat", f"{mark}.there"))).stdout.decode().split()
        assert len(pids) == 2
        # A zombie has ended: its state is the field after the name.
        look = "for p; do [ -e /proc/$p/stat ] && ! grep -q ') Z' /proc/$p/stat && echo $p; done; true"
        await self._until(lambda: runner.run(self.host, ("sh", "-c", look, "sh", *pids)), lambda ran: not ran.stdout)

    # ---- of those that open connections ----

    @pytest.mark.asyncio
    async def test_what_is_sent_over_a_connection_comes_through_in_both_directions_to_its_end(self) -> None:
        backend, opener, runner = await self._opener()
        data = os.urandom(300_000)
        async with self._echo(runner) as port:
            with anyio.fail_after(self.patience_s):
                stream = await opener.connect(self.host, "127.0.0.1", port)
                async with stream, anyio.create_task_group() as tasks:
                    tasks.start_soon(_send_all, stream, data)
                    back = b"".join([part async for part in stream])
        assert back == data
        await backend.close()

    @pytest.mark.asyncio
    async def test_connections_are_apart_from_each_other_and_many_may_be_open(self) -> None:
        backend, opener, runner = await self._opener()
        back: dict[int, bytes] = {}
        async with self._echo(runner) as port:

            async def talk(number: int) -> None:
                async with await opener.connect(self.host, "127.0.0.1", port) as stream:
                    await _send_all(stream, str(number).encode() * 1_000)
                    back[number] = b"".join([part async for part in stream])

            with anyio.fail_after(self.patience_s):
                async with anyio.create_task_group() as tasks:
                    for number in range(8):
                        tasks.start_soon(talk, number)
        assert back == {number: str(number).encode() * 1_000 for number in range(8)}
        await backend.close()

    @pytest.mark.asyncio
    async def test_a_connection_to_where_nobody_listens_is_not_done(self) -> None:
        backend, opener, runner = await self._opener()
        async with self._echo(runner) as port:
            pass  # there is nobody any more
        with anyio.fail_after(self.patience_s), pytest.raises(NotDone, match=str(port)):
            await opener.connect(self.host, "127.0.0.1", port)
        await backend.close()

    async def _opener(self) -> tuple[Backend, OpensConnections, RunsCommands]:
        backend = await self.make()
        if not isinstance(backend, OpensConnections):
            pytest.skip("the backend opens no connections")
        if not isinstance(backend, RunsCommands):
            pytest.skip("the backend runs no commands: nobody starts something there to be connected to")
        return backend, backend, backend

    @contextlib.asynccontextmanager
    async def _echo(self, runner: RunsCommands) -> AsyncIterator[int]:
        """The port of something on the host that sends back what it gets."""
        mark = (await runner.run(self.host, ("mktemp",))).stdout.decode().strip()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: runner.run(self.host, ("python3", "-c", _ECHO, mark), timeout_s=600))
            listens = await self._until(lambda: runner.run(self.host, ("cat", mark)), lambda ran: ran.stdout)
            port = int(listens.stdout)
            yield port
            tasks.cancel_scope.cancel()
        dial = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        await self._until(lambda: runner.run(self.host, ("python3", "-c", dial)), lambda ran: ran.exit_code)

    async def _until(self, ask: Callable[[], Awaitable[Ran]], enough: Callable[[Ran], object]) -> Ran:
        """Run a command again and again until its answer will do."""
        with anyio.fail_after(self.patience_s):
            while not enough(ran := await ask()):  # noqa: ASYNC110  # what a host does has no event here
                await anyio.sleep(0.02)
        return ran

    @pytest.mark.asyncio
    async def test_an_option_that_it_does_not_know_is_refused_by_host_and_name(self) -> None:
        with pytest.raises(ValueError, match="no_such_option") as refused:
            await self.open_with({"no_such_option": 1})
        assert self.host in str(refused.value), f"the error does not name the host {self.host}: {refused.value}"

    @pytest.mark.asyncio
    async def test_it_may_be_closed_twice_and_before_anything_was_asked(self) -> None:
        backend = await self.make()
        await backend.close()
        await backend.close()

    # ---- how it is checked --------------------------------------------------------------------------------------

    async def _see(self, backend: Backend) -> Sight:
        """A sight that holds to the contract."""
        with anyio.fail_after(self.patience_s):
            inventory = await backend.inventory(self.host)
            sight = await backend.observe(self.host)
        seen = sorted(gpu.gpu for gpu in sight.gpus)
        there = sorted(info.gpu for info in inventory.gpus)
        assert there, f"host {self.host} has no GPUs; the contract needs one that has"
        assert len(set(there)) == len(there), f"the inventory has a GPU twice: {there}"
        assert seen == there, f"observed were {seen}, and the host has {there}"
        assert all(gpu.startswith(f"{self.host}/") for gpu in there), f"a GPU is named host/gpuN, and these are {there}"
        assert sight.boot_id, "a sight needs a boot id"
        return sight

    async def _is_lost(self, backend: Backend, host: HostId) -> None:
        for call in (backend.observe, backend.inventory):
            with anyio.fail_after(self.patience_s), pytest.raises(ContactLost):
                await call(host)


class Rig(Struct):
    """A residency driver with a host to move states on."""

    residency: Residency
    #: reaches the host, and sees what the driver does
    backend: Backend
    host: HostId
    #: GPUs of the host that nobody else uses; with two or more, two jobs are moved at a time
    gpus: tuple[GpuId, ...]
    #: what is moved: it must fit onto each of the GPUs, and (twice) into host RAM
    state: StateSpec
    ranks: int = 1
    #: the workload's process, where the driver needs it
    pid: int = 0
    started: str = ""


class ResidencyContract:
    """What every residency driver must do. Override :meth:`make`; and what else you can bring about."""

    #: seconds after which an order counts as hung
    patience_s: ClassVar[float] = 20.0
    #: used memory above what was agreed that still counts as clear
    tolerance_mb: ClassVar[int] = 300
    #: whether the rig's backend sees what the driver moves (turn off only where nothing real is moved)
    sees_memory: ClassVar[bool] = True

    # ---- what you give ------------------------------------------------------------------------------------------

    async def make(self) -> Rig:
        """A rig with nothing loaded, its workload running."""
        raise NotImplementedError("say how the driver is made: async def make(self)")

    async def take_away(self, rig: Rig) -> None:
        """Make the host, or the workload, unreachable."""
        pytest.skip("take_away is not given")

    async def open_with(self, options: Mapping[str, Any]) -> Residency:
        """The driver, opened with these options."""
        pytest.skip("open_with is not given")

    # ---- the contract -------------------------------------------------------------------------------------------

    @pytest.mark.asyncio
    async def test_load_park_load_and_each_time_the_memory_follows(self) -> None:
        rig = await self.make()
        for warm in (False, True, True):
            await self._tell(rig, self.order(rig, OrderKind.LOAD, warm=warm))
            await self._is_loaded(rig)
            await self._tell(rig, self.order(rig, OrderKind.PARK))
            await self._is_clear(rig)
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_discard_frees_what_is_loaded(self) -> None:
        rig = await self.make()
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._is_clear(rig, leftover_mb=0)
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_discard_frees_what_is_parked_and_its_left_overs(self) -> None:
        rig = await self.make()
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        await self._tell(rig, self.order(rig, OrderKind.PARK))
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._is_clear(rig, leftover_mb=0)
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_discard_of_nothing_is_done_and_so_is_a_second_one(self) -> None:
        rig = await self.make()
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._is_clear(rig, leftover_mb=0)
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_after_a_discard_it_can_be_loaded_anew(self) -> None:
        rig = await self.make()
        for _ in range(2):
            await self._tell(rig, self.order(rig, OrderKind.LOAD))
            await self._is_loaded(rig)
            await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_park_before_anything_was_loaded_puts_nothing_onto_the_gpus(self) -> None:
        rig = await self.make()
        with contextlib.suppress(NotDone, ContactLost):  # both are honest
            await self._tell(rig, self.order(rig, OrderKind.PARK))
        await self._is_clear(rig)
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_an_order_told_twice_is_done_once(self) -> None:
        rig = await self.make()
        if not rig.residency.traits.idempotent:
            pytest.skip("the driver does not say that it is idempotent")
        for kind in (OrderKind.LOAD, OrderKind.PARK, OrderKind.LOAD, OrderKind.DISCARD):
            order = self.order(rig, kind)
            await self._tell(rig, order)
            once = await self._used(rig)
            await self._tell(rig, order)
            assert await self._used(rig) == once, f"{kind} told twice moved memory twice"
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_two_jobs_are_moved_at_the_same_time(self) -> None:
        rig = await self.make()
        if len(rig.gpus) < 2:
            pytest.skip("the rig has one GPU only")

        async def go(job: str, gpu: GpuId) -> None:
            for kind in (OrderKind.LOAD, OrderKind.PARK, OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD):
                await self._tell(rig, self.order(rig, kind, job=job, gpus=(gpu,)))

        async with anyio.create_task_group() as group:
            group.start_soon(go, "a", rig.gpus[0])
            group.start_soon(go, "b", rig.gpus[1])
        await self._is_clear(rig, leftover_mb=0)
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_an_order_cancelled_at_any_await_ends_and_the_state_is_not_out_of_reach(self) -> None:
        """Afterwards the daemon tells it again (idempotent), or has the state discarded."""
        rig = await self.make()
        for moment in _moments():
            loaded = await self._cut_short(rig, self.order(rig, OrderKind.LOAD), moment)
            if rig.residency.traits.idempotent:
                await self._is_loaded(rig)
                parked = await self._cut_short(rig, self.order(rig, OrderKind.PARK), moment)
                await self._is_clear(rig)
            else:
                parked = True
            await self._tell(rig, self.order(rig, OrderKind.DISCARD))
            await self._is_clear(rig, leftover_mb=0)
            if loaded and parked:
                break
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_a_probe_after_each_order_never_contradicts_what_was_answered(self) -> None:
        rig = await self.make()
        self._needs_probes(rig)
        for kind in (OrderKind.LOAD, OrderKind.PARK, OrderKind.LOAD, OrderKind.DISCARD):
            order = self.order(rig, kind)
            await self._tell(rig, order)
            probed = await rig.residency.probe(order)
            assert probed.done or not probed.known, f"{kind} was done, and the probe says it was not: {probed.error}"
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_a_probe_of_an_order_that_was_never_told_does_not_say_done(self) -> None:
        rig = await self.make()
        self._needs_probes(rig)
        for kind in OrderKind:
            assert not (await rig.residency.probe(self.order(rig, kind))).done
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        assert not (await rig.residency.probe(self.order(rig, OrderKind.PARK))).done
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_a_probe_of_an_order_cut_short_does_not_say_done_of_what_is_not(self) -> None:
        rig = await self.make()
        self._needs_probes(rig)
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        for moment in _moments():
            order = self.order(rig, OrderKind.PARK)
            if await _cancelled(lambda order=order: rig.residency.park(order), moment):  # type: ignore[misc]
                break
            if (await rig.residency.probe(order)).done:
                await self._is_clear(rig)
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_an_order_that_a_probe_calls_not_begun_has_moved_nothing_and_can_be_told_again(self) -> None:
        rig = await self.make()
        self._needs_probes(rig)
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        for moment in (None, *_moments()):
            order = self.order(rig, OrderKind.PARK)
            if moment is not None and await _cancelled(lambda order=order: rig.residency.park(order), moment):  # type: ignore[misc]
                break
            probed = await rig.residency.probe(order)
            if probed.known and not probed.done and not probed.begun:
                await self._is_loaded(rig)
                await self._tell(rig, order)
                await self._is_clear(rig)
                assert (await rig.residency.probe(order)).begun, "it was done, and a probe says that it was not begun"
                await self._tell(rig, self.order(rig, OrderKind.LOAD))
            elif moment is not None:
                await self._tell(rig, self.order(rig, OrderKind.DISCARD))
                await self._tell(rig, self.order(rig, OrderKind.LOAD))
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_an_order_that_comes_late_is_refused_and_changes_nothing(self) -> None:
        rig = await self.make()
        late = self.order(rig, OrderKind.PARK)
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        with pytest.raises(NotDone, match=f"{late.order} .*late"):
            await self._tell(rig, late)
        await self._is_loaded(rig)
        await self._tell(rig, self.order(rig, OrderKind.DISCARD))
        await self._end(rig)

    @pytest.mark.asyncio
    async def test_with_the_host_away_no_order_is_said_to_be_done(self) -> None:
        rig = await self.make()
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        await self.take_away(rig)
        for kind in (OrderKind.PARK, OrderKind.DISCARD):
            try:
                await self._tell(rig, self.order(rig, kind))
            except (ContactLost, NotDone, TimeoutError):
                continue
            pytest.fail(f"{kind} is said to be done on a host that is away")

    @pytest.mark.asyncio
    async def test_an_option_that_it_does_not_know_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match="no_such_option"):
            await self.open_with({"no_such_option": 1})

    @pytest.mark.asyncio
    async def test_it_may_be_closed_twice_and_states_stay_where_they_are(self) -> None:
        rig = await self.make()
        await self._tell(rig, self.order(rig, OrderKind.LOAD))
        await rig.residency.close()
        await rig.residency.close()
        await self._is_loaded(rig)
        await rig.backend.close()

    # ---- how it is checked --------------------------------------------------------------------------------------

    _ids: ClassVar[Iterator[int]] = itertools.count(1)

    def order(
        self,
        rig: Rig,
        kind: OrderKind,
        *,
        job: str = "a",
        gpus: tuple[GpuId, ...] | None = None,
        warm: bool = False,
    ) -> StateOrder:
        """A new order, as the daemon would make it."""
        on = rig.gpus if gpus is None else gpus
        number = next(self._ids)
        return StateOrder(
            order=f"o{number}",
            stamp=Fence(1, number),
            kind=kind,
            job=f"j-{job}",
            run=1,
            owner="contract",
            name=job,
            pool=rig.state.pool,
            node="+".join(on),
            host=rig.host,
            gpus=on,
            state=rig.state,
            ranks=rig.ranks,
            warm=warm,
            pid=rig.pid,
            started=rig.started,
            backend=rig.backend,
        )

    async def _tell(self, rig: Rig, order: StateOrder) -> None:
        with anyio.fail_after(self.patience_s):
            match order.kind:
                case OrderKind.LOAD:
                    await rig.residency.load(order)
                case OrderKind.PARK:
                    await rig.residency.park(order)
                case OrderKind.DISCARD:
                    await rig.residency.discard(order)

    async def _cut_short(self, rig: Rig, order: StateOrder, moment: float) -> bool:
        """Cancel an order, then tell it again where that may be done. Whether it was done before it was cancelled."""
        with anyio.fail_after(self.patience_s):
            finished = await _cancelled(lambda: self._tell(rig, order), moment)
        if rig.residency.traits.idempotent:
            await self._tell(rig, order)
        return finished

    async def _used(self, rig: Rig) -> dict[GpuId, int]:
        sight = await rig.backend.observe(rig.host)
        return {seen.gpu: seen.used_mb for seen in sight.gpus if seen.gpu in rig.gpus}

    async def _is_loaded(self, rig: Rig) -> None:
        if self.sees_memory:
            for gpu, mb in (await self._used(rig)).items():
                assert mb >= rig.state.gpu_mb - self.tolerance_mb, (
                    f"{gpu} should have {rig.state.gpu_mb} MB, and has {mb}"
                )

    async def _is_clear(self, rig: Rig, leftover_mb: int | None = None) -> None:
        agreed = rig.state.leftover_mb if leftover_mb is None else leftover_mb
        for gpu, mb in (await self._used(rig)).items():
            assert mb <= agreed + self.tolerance_mb, f"{gpu} should be clear but for {agreed} MB, and has {mb}"

    def _needs_probes(self, rig: Rig) -> None:
        if not rig.residency.traits.probes:
            pytest.skip("the driver does not say that it can be probed")

    async def _end(self, rig: Rig) -> None:
        await rig.residency.close()
        await rig.backend.close()


_launches: Iterator[int] = itertools.count(1)


def _process(argv: tuple[str, ...], job: str = "j1") -> ProcessOrder:
    number = next(_launches)
    launch = f"l{number}"
    return ProcessOrder(
        launch=launch,
        number=number,
        job=job,
        run=1,
        owner="contract",
        user="ann",
        name="a",
        argv=argv,
        cwd="",
        env={"WHO": launch},
    )


async def _send_all(stream: anyio.abc.ByteStream, data: bytes) -> None:
    await stream.send(data)
    await stream.send_eof()


def _moments() -> Iterator[float]:
    """When a call is cancelled: after 0, 1, 2, ... turns of the loop (negative numbers), then after some seconds."""
    yield from (float(-turns) for turns in _TURNS)
    yield from _SECONDS


async def _cancelled(call: Callable[[], Awaitable[object]], moment: float) -> bool:
    """Start a call and cancel it at a moment. Whether it had come to an end before that."""
    ended = anyio.Event()

    async def run() -> None:
        with contextlib.suppress(PluginError):  # an end like any other
            await call()
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        if moment <= 0:
            for _ in range(round(-moment)):
                await anyio.lowlevel.checkpoint()
        else:
            with anyio.move_on_after(moment):
                await ended.wait()
        if not ended.is_set():
            group.cancel_scope.cancel()
    return ended.is_set()
