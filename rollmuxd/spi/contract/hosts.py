"""What is seen of a host, nothing of one that is away, and whose processes are ended there."""

import operator
import os

import anyio
import pytest

from rollmuxd.spi.backend import Backend, Observation
from rollmuxd.spi.contract.given import GivenBackend
from rollmuxd.spi.contract.moments import cancelled, sentence


class Hosts(GivenBackend):
    """What every backend promises of its hosts."""

    @sentence
    async def test_it_sees_every_gpu_of_the_host_exactly_once(self, backend: Backend) -> None:
        await self._see(backend)

    @sentence
    async def test_used_memory_is_never_negative_nor_more_than_the_gpu_has(self, backend: Backend) -> None:
        memory = {info.gpu: info.memory_mb for info in (await backend.inventory(self.host)).gpus}
        for seen in (await backend.observe(self.host)).gpus:
            assert 0 <= seen.used_mb <= memory[seen.gpu], f"{seen} on a GPU of {memory[seen.gpu]} MB"

    @sentence
    async def test_asked_twice_it_has_the_same_gpus_and_the_same_boot_id(self, backend: Backend) -> None:
        first, second = await self._see(backend), await self._see(backend)
        assert first.boot_id == second.boot_id, "the boot id changed, and the machine was not restarted"
        assert [gpu.gpu for gpu in first.gpus] == [gpu.gpu for gpu in second.gpus]
        assert await backend.inventory(self.host) == await backend.inventory(self.host)

    @sentence
    async def test_it_may_be_called_concurrently(self, backend: Backend) -> None:
        observations: list[Observation] = []

        async def look() -> None:
            observations.append(await self._see(backend))

        with anyio.fail_after(self.patience_s):
            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(look)
        assert len({observation.boot_id for observation in observations}) == 1

    @sentence
    async def test_a_call_cancelled_at_any_await_ends_and_leaves_it_usable(self, backend: Backend) -> None:
        for moment in self._moments():
            with anyio.fail_after(self.patience_s):
                finished = await cancelled(lambda: backend.observe(self.host), moment)
                await self._see(backend)
            if finished:
                break

    @sentence
    async def test_it_looks_each_time_and_never_gives_a_cached_answer(self, backend: Backend) -> None:
        before = {seen.gpu: seen.used_mb for seen in (await self._see(backend)).gpus}
        gpu, mb = await self.occupy(backend)
        after = {seen.gpu: seen.used_mb for seen in (await self._see(backend)).gpus}
        assert after[gpu] >= before[gpu] + mb, (
            f"{gpu} had {before[gpu]} MB, {mb} came, and it is seen with {after[gpu]}"
        )

    @pytest.mark.asyncio
    async def test_opening_it_needs_no_host_to_be_there(self) -> None:
        backend = await self.make_unreachable()
        await self._is_lost(backend, self.host)
        await backend.close()

    @sentence
    async def test_a_host_that_is_away_is_contact_lost_and_never_an_empty_answer(self, backend: Backend) -> None:
        await self._see(backend)
        await self.take_away(backend)
        await self._is_lost(backend, self.host)
        await self._is_lost(backend, self.host)

    @sentence
    async def test_a_host_that_comes_back_is_seen_again(self, backend: Backend) -> None:
        await self.take_away(backend)
        await self._is_lost(backend, self.host)
        await self.bring_back(backend)
        await self._see(backend)

    @sentence
    async def test_a_host_it_was_not_opened_for_is_contact_lost(self, backend: Backend) -> None:
        await self._is_lost(backend, "no-such-host-anywhere")

    @sentence
    async def test_it_never_ends_a_process_whose_start_time_is_another(self, backend: Backend) -> None:
        # This process: if it is ended after all, that will be noticed.
        assert not await backend.kill(self.host, os.getpid(), "started at another time", "j1", self.owner)
        assert not await backend.kill(self.host, os.getpid(), "", "j1", self.owner)

    @sentence
    async def test_it_never_ends_a_process_group_or_init(self, backend: Backend) -> None:
        for pid in (0, 1):
            assert not await backend.kill(self.host, pid, "", "j1", self.owner)

    @sentence
    async def test_it_ends_its_own_process_with_the_right_start_time_only(self, backend: Backend) -> None:
        pid, started = await self.start_process(backend)
        assert not await backend.kill(self.host, pid, f"{started}0", "j1", self.owner)
        assert await self.is_running(backend, pid), "a process was ended that could have been another's"
        assert await backend.kill(self.host, pid, started, "j1", self.owner)
        await self._until(lambda: self.is_running(backend, pid), operator.not_)

    @sentence
    async def test_it_ends_no_process_on_the_word_of_an_owner_whom_nobody_has_given_it_to(
        self, backend: Backend
    ) -> None:
        pid, started = await self.start_process(backend)
        for owner in ("no-such-owner-anywhere", ""):
            assert not await backend.kill(self.host, pid, started, "j1", owner)
        assert await self.is_running(backend, pid), "any job's client could have it end any process"

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
