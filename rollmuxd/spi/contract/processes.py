"""Jobs' processes, of backends that start them."""

import itertools
import operator
from collections.abc import Iterator

import anyio
import pytest

from rollmuxd.spi.backend import Backend, Output, ProcessOrder, StartsProcesses
from rollmuxd.spi.contract.given import GivenBackend
from rollmuxd.spi.contract.moments import sentence
from rollmuxd.spi.errors import NotDone


class Processes(GivenBackend):
    """What is promised by those that start jobs' processes."""

    @sentence
    async def test_a_launch_told_twice_is_one_process(self, backend: Backend) -> None:
        starter = self._starter(backend)
        order = _process(("sleep", "600"))
        first = await starter.start(self.host, order)
        assert await starter.start(self.host, order) == first
        assert await starter.alive(self.host, order.launch)
        assert await starter.stop(self.host, order.launch)
        assert not await starter.alive(self.host, order.launch)
        assert not await starter.stop(self.host, order.launch), "there was nothing left to be ended"

    @sentence
    async def test_a_stop_ends_what_the_process_started_in_turn_and_what_ignores_it(self, backend: Backend) -> None:
        starter = self._starter(backend)
        order = _process(("sh", "-c", "trap '' TERM; sleep 600 & sleep 600 & wait; wait; sleep 600"))
        await starter.start(self.host, order)
        await anyio.sleep(0.2)  # until its children are there
        with anyio.fail_after(self.patience_s):
            assert await starter.stop(self.host, order.launch)
        assert not await starter.alive(self.host, order.launch)

    @sentence
    async def test_a_process_that_ends_by_itself_is_not_alive(self, backend: Backend) -> None:
        starter = self._starter(backend)
        order = _process(("true",))
        await starter.start(self.host, order)
        await self._until(lambda: starter.alive(self.host, order.launch), operator.not_)

    @sentence
    async def test_what_a_process_prints_can_be_read_in_pieces_and_after_its_end(self, backend: Backend) -> None:
        starter = self._starter(backend)
        order = _process(("sh", "-c", "printf 123456; printf 789 >&2"))
        await starter.start(self.host, order)
        printed, at = b"", 0
        with anyio.fail_after(self.patience_s):
            while len(printed) < 9:
                piece = await starter.output(self.host, order.launch, at, 4)
                assert len(piece.data) <= 4
                assert piece.next == at + len(piece.data)
                printed, at = printed + piece.data, piece.next
                await anyio.sleep(0.01)
        assert printed == b"123456789"
        assert (await starter.output(self.host, order.launch, at, 4)).data == b""
        assert await starter.output(self.host, order.launch, -2, 4) == Output(data=b"89", next=9)
        assert await starter.output(self.host, order.launch, -100, 4) == Output(data=b"1234", next=4)

    @pytest.mark.asyncio
    async def test_a_process_does_not_hear_where_the_daemon_tells_systemd_how_it_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
        backend = await self.make()
        starter = self._starter(backend)
        order = _process(("sh", "-c", 'printf %s "[$NOTIFY_SOCKET]"'))
        await starter.start(self.host, order)
        printed = await self._until(
            lambda: starter.output(self.host, order.launch, 0, 100), lambda found: len(found.data) >= 2
        )
        assert printed.data == b"[]", "a process may take itself for the daemon's service"
        await backend.close()

    @sentence
    async def test_a_program_that_is_not_there_is_not_started_and_says_so(self, backend: Backend) -> None:
        starter = self._starter(backend)
        order = _process(("/no/such/program",))
        with pytest.raises(NotDone, match="/no/such/program"):
            await starter.start(self.host, order)
        assert not await starter.alive(self.host, order.launch)

    @sentence
    async def test_a_jobs_next_launch_ends_what_is_left_of_the_one_before_and_nobody_elses(
        self, backend: Backend
    ) -> None:
        starter = self._starter(backend)
        one, other, next_ = _process(("sleep", "600")), _process(("sleep", "600"), job="j2"), _process(("sleep", "600"))
        for order in (one, other, next_):
            await starter.start(self.host, order)
        alive = [await starter.alive(self.host, order.launch) for order in (one, other, next_)]
        for order in (other, next_):
            await starter.stop(self.host, order.launch)
        assert alive == [False, True, True]

    @sentence
    async def test_what_was_started_for_one_job_is_never_ended_because_another_says_that_it_is_its_own(
        self, backend: Backend
    ) -> None:
        starter = self._starter(backend)
        order = _process(("sleep", "600"))
        process = await starter.start(self.host, order)
        for owner in (self.owner, order.owner):
            assert not await backend.kill(self.host, process.pid, process.started, "j2", owner)
        assert await starter.alive(self.host, order.launch)
        await starter.stop(self.host, order.launch)

    @sentence
    async def test_a_launch_that_comes_late_does_not_take_the_place_of_a_later_one(self, backend: Backend) -> None:
        starter = self._starter(backend)
        late, there = _process(("sleep", "600")), _process(("sleep", "600"))
        await starter.start(self.host, there)
        with pytest.raises(NotDone, match="late"):
            await starter.start(self.host, late)
        assert await starter.alive(self.host, there.launch)
        assert not await starter.alive(self.host, late.launch)
        await starter.stop(self.host, there.launch)

    @pytest.mark.asyncio
    async def test_after_a_restart_it_knows_its_processes_again(self) -> None:
        backend = await self.make()
        starter = self._starter(backend)
        order = _process(("sleep", "600"))
        first = await starter.start(self.host, order)
        await backend.close()
        again = await self.make_again()
        assert isinstance(again, StartsProcesses)
        assert await again.start(self.host, order) == first
        assert await again.stop(self.host, order.launch)
        await again.close()

    def _starter(self, backend: Backend) -> StartsProcesses:
        if not isinstance(backend, StartsProcesses) or not backend.starts_on(self.host):
            pytest.skip("the backend starts no processes on this host")
        return backend


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
