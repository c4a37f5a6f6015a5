"""Commands on a host, of backends that run them."""

import anyio
import pytest

from rollmuxd.spi.backend import Backend, ExchangesBytes, RunsCommands
from rollmuxd.spi.contract.given import GivenBackend
from rollmuxd.spi.contract.moments import sentence
from rollmuxd.spi.errors import ContactLost, NotDone


class Commands(GivenBackend):
    """What is promised by those that run commands."""

    @sentence
    async def test_a_command_gets_its_input_and_gives_both_outputs_and_its_exit_code(self, backend: Backend) -> None:
        runner = self._runner(backend)
        script = "cat; echo oops >&2; exit 3"
        ran = await runner.run(self.host, ("sh", "-c", script), stdin=b"\x00in\xff\n" * 20_000)
        assert (ran.exit_code, ran.stdout, ran.stderr) == (3, b"\x00in\xff\n" * 20_000, b"oops\n")
        assert (await runner.run(self.host, ("cat",))).stdout == b"", "without stdin there is nothing to be read"
        ran = await runner.run(self.host, ("sh", "-c", "kill -9 $$"))
        assert ran.exit_code == -9, f"a command that a signal ended, and its exit code is {ran.exit_code}"

    @sentence
    async def test_no_shell_reads_the_arguments_nor_the_environment_of_a_command(self, backend: Backend) -> None:
        runner = self._runner(backend)
        odd = ["", " a  b ", "a\nb", "$HOME", "`id`", "it's", '"', "\\", "*", "~", "!x", "-n", "é"]
        odd += ["#", ";", "&&", "{1,2}"]
        ran = await runner.run(self.host, ("printf", "%s\\0", *odd))
        assert ran.stdout.decode().split("\0")[:-1] == odd
        ran = await runner.run(self.host, ("env",), env={"ROLLMUX_A": "$HOME 'x' `id`", "ROLLMUX_B": ""})
        assert {"ROLLMUX_A=$HOME 'x' `id`", "ROLLMUX_B="} < set(ran.stdout.decode().splitlines())

    @sentence
    async def test_a_command_whose_program_is_not_there_is_not_done_and_says_so(self, backend: Backend) -> None:
        runner = self._runner(backend)
        for program in ("/no/such/program", "no-such-program-anywhere"):
            with pytest.raises(NotDone, match=program):
                await runner.run(self.host, (program, "x"))
        with pytest.raises(NotDone):
            await runner.run(self.host, ())
        # The same exit code, of a program that is there.
        assert (await runner.run(self.host, ("sh", "-c", "exit 127"))).exit_code == 127

    @sentence
    async def test_a_command_over_its_time_is_ended_with_what_it_started_and_is_contact_lost(
        self, backend: Backend
    ) -> None:
        runner = self._runner(backend)
        mark = (await runner.run(self.host, ("mktemp",))).stdout.decode().strip()
        began = anyio.current_time()
        with pytest.raises(ContactLost):
            await runner.run(self.host, self._lasting(mark), timeout_s=0.5)
        assert anyio.current_time() - began < self.patience_s
        await self._is_ended(runner, mark)

    @sentence
    async def test_a_command_that_is_cancelled_is_ended_with_what_it_started(self, backend: Backend) -> None:
        runner = self._runner(backend)
        mark = (await runner.run(self.host, ("mktemp",))).stdout.decode().strip()
        with anyio.fail_after(self.patience_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: runner.run(self.host, self._lasting(mark), timeout_s=600))
                await self._until(lambda: runner.run(self.host, ("cat", f"{mark}.there")), lambda ran: ran.stdout)
                tasks.cancel_scope.cancel()
        await self._is_ended(runner, mark)

    @sentence
    async def test_many_commands_run_at_the_same_time(self, backend: Backend) -> None:
        runner = self._runner(backend)
        said: dict[int, bytes] = {}

        async def say(number: int) -> None:
            said[number] = (await runner.run(self.host, ("sh", "-c", f"sleep 0.2; echo {number}"))).stdout

        with anyio.fail_after(self.patience_s):
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(say, number)
        assert said == {number: f"{number}\n".encode() for number in range(8)}

    @sentence
    async def test_commands_and_exchanges_on_a_host_that_is_away_are_contact_lost(self, backend: Backend) -> None:
        runner = self._runner(backend)
        await self.take_away(backend)
        for host in (self.host, "no-such-host-anywhere"):
            with anyio.fail_after(self.patience_s), pytest.raises(ContactLost):
                await runner.run(host, ("true",))
            if isinstance(backend, ExchangesBytes):
                with anyio.fail_after(self.patience_s), pytest.raises(ContactLost):
                    await backend.exchange(host, "127.0.0.1", 1, b"", most=1)

    def _runner(self, backend: Backend) -> RunsCommands:
        if not isinstance(backend, RunsCommands):
            pytest.skip("the backend runs no commands")
        return backend

    @staticmethod
    def _lasting(mark: str) -> tuple[str, ...]:
        """A command that keeps running, and starts another; their process ids are in ``<mark>.there``."""
        return ("sh", "-c", f"sleep 600 & echo $$ $! >{mark}; mv {mark} {mark}.there; wait; sleep 600")

    async def _is_ended(self, runner: RunsCommands, mark: str) -> None:
        pids = (await runner.run(self.host, ("cat", f"{mark}.there"))).stdout.decode().split()
        assert len(pids) == 2
        # A zombie has ended: its state is the field after the name.
        look = "for p; do [ -e /proc/$p/stat ] && ! grep -q ') Z' /proc/$p/stat && echo $p; done; true"
        await self._until(lambda: runner.run(self.host, ("sh", "-c", look, "sh", *pids)), lambda ran: not ran.stdout)
