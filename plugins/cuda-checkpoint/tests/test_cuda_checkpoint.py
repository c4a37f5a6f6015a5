"""What the cuda-checkpoint driver defends: one process at a time, and with every failure it is told what it left."""

import os
from pathlib import Path

import anyio
import pytest
from fake_engines import EngineHost
from patience import PATIENCE_S

from rollmuxd.spi import ContactLost, GpuObservation, NotDone, Observation, OrderKind, Probed, Ran, Residency, StateSpec
from rollmuxd.spi.contract import ResidencyContract, Rig
from rollmuxd.spi.fakes import FakeChannel
from rollmuxd_cuda_checkpoint import CudaCheckpointResidency

LOAD, PARK, DISCARD = OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD
GPU = "host1/gpu0"
LEADS = {("lock", "running"): "locked", ("checkpoint", "locked"): "checkpointed",
         ("restore", "checkpointed"): "locked", ("unlock", "locked"): "running"}  # fmt: skip


class Host(EngineHost):
    """A host with CUDA processes, the utility, and commands that list, start and stop the processes.

    ``faults[action, pid]``: fail (says so, nothing done), lie (exit code 0, nothing done), stuck (the state is "failed"
    from then on), hang, hang_after (does it, and does not return).
    """

    def __init__(self, pids=(101,)):
        super().__init__("host1", {})
        self.pids = dict.fromkeys(pids, "running")
        self.faults = {}
        self.actions = []
        self.busy = 0
        self.commands["cuda-checkpoint"] = self._tool
        self.commands["list-pids"] = self._list
        self.commands["job"] = self._job

    async def observe(self, host):
        self._reach(host)
        used = sum(8_000 for state in self.pids.values() if state != "checkpointed")
        return Observation((GpuObservation(GPU, used),), "boot")

    async def _list(self, argv):
        return Ran(0, "".join(f"{pid}\n" for pid in self.pids).encode(), b"")

    async def _job(self, argv):
        self.pids = {101: "running"} if argv[1] == "start" else {}
        return Ran(0, b"", b"")

    async def _tool(self, argv):
        options = dict(zip(argv[1:], [*argv[2:], ""], strict=True))
        pid = int(options["--pid"])
        if pid not in self.pids:
            return Ran(1, b"", b"Could not find process")
        if "--get-state" in options:
            return Ran(1, b"", b"no answer") if self.faults.get(("state", pid)) else self._say(self.pids[pid])
        action = options["--action"]
        self.actions.append((action, pid))
        assert action != "lock" or options["--timeout"].isdecimal()
        assert self.busy == 0, "two processes are acted upon at a time"
        self.busy += 1
        try:
            return await self._act(action, pid)
        finally:
            self.busy -= 1

    async def _act(self, action, pid):
        fault = self.faults.pop((action, pid), "")
        await anyio.sleep(0)
        if fault == "hang":
            await anyio.sleep_forever()
        if fault in {"fail", "stuck"}:
            self.pids[pid] = "failed" if fault == "stuck" else self.pids[pid]
            return Ran(1, b"", f"Could not {action}: OOM\n".encode())
        if fault == "lie":
            return Ran(0, b"", b"")
        leads = LEADS.get((action, self.pids[pid]))
        if leads is None:
            return Ran(1, b"", b"invalid state")
        self.pids[pid] = leads
        if fault == "hang_after":
            await anyio.sleep_forever()
        return Ran(0, b"", b"")

    @staticmethod
    def _say(text):
        return Ran(0, f"{text}\n".encode(), b"")


def state(**options):
    given = {"list": ("list-pids",), **options}
    return StateSpec(pool="rollout", gpu_mb=8_000, driver="cuda-checkpoint", options=tuple(given.items()))


def order(host, kind, *, driver=None, warm=True, pid=0, started="", **options):
    spec = state(**options) if pid == 0 else StateSpec(pool="rollout", driver="cuda-checkpoint")
    rig = Rig(driver, host, "host1", (GPU,), spec, pid=pid, started=started)
    return ResidencyContract().order(rig, kind, warm=warm)


class TestContract(ResidencyContract):
    tolerance_mb = 0

    async def make(self) -> Rig:
        self.host = Host()
        self.host.pids = {101: "checkpointed"}
        spec = state(start=("job", "start"), stop=("job", "stop"))
        return Rig(CudaCheckpointResidency(lock_s=1, limit_s=2), self.host, "host1", (GPU,), spec)

    async def take_away(self, rig: Rig) -> None:
        self.host.away = True

    async def open_with(self, options) -> Residency:
        return await CudaCheckpointResidency.open(FakeChannel(), options)


async def failing(call, error, match):
    with anyio.fail_after(PATIENCE_S), pytest.raises(error, match=match) as raised:
        await call
    return str(raised.value)


@pytest.mark.asyncio
async def test_one_process_after_the_other_and_back_in_the_other_order():
    host, driver = Host((101, 102)), CudaCheckpointResidency()
    await driver.park(order(host, PARK))
    assert host.actions == [("lock", 101), ("checkpoint", 101), ("lock", 102), ("checkpoint", 102)]
    host.actions.clear()
    await driver.load(order(host, LOAD))
    assert host.actions == [("restore", 102), ("unlock", 102), ("restore", 101), ("unlock", 101)]
    assert set(host.pids.values()) == {"running"}


@pytest.mark.asyncio
async def test_a_lock_that_fails_leaves_the_process_running_and_says_so():
    host = Host()
    host.faults["lock", 101] = "fail"
    said = await failing(CudaCheckpointResidency().park(order(host, PARK)), NotDone, "lock of pid 101 on host1 failed")
    assert said.endswith("exit code 1: Could not lock: OOM; it is running")


@pytest.mark.asyncio
async def test_a_checkpoint_that_fails_is_unlocked_again():
    host = Host()
    host.faults["checkpoint", 101] = "fail"
    said = await failing(CudaCheckpointResidency().park(order(host, PARK)), NotDone, "checkpoint of pid 101")
    assert said.endswith("it is locked, and was unlocked again")
    assert host.pids[101] == "running"


@pytest.mark.asyncio
async def test_what_was_parked_before_one_failed_is_brought_back():
    host = Host((101, 102, 103))
    host.faults["checkpoint", 103] = "fail"
    host.faults["restore", 101] = "stuck"
    said = await failing(CudaCheckpointResidency().park(order(host, PARK)), NotDone, "checkpoint of pid 103")
    assert "pid 102 was brought back" in said
    assert "restore of pid 101 on host1 failed" in said
    assert said.count("it is failed") == 1
    assert host.pids == {101: "failed", 102: "running", 103: "running"}


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["fail", "stuck", "lie"])
async def test_a_restore_that_fails_is_told_with_the_state_it_left(fault):
    host, driver = Host(), CudaCheckpointResidency()
    await driver.park(order(host, PARK))
    host.faults["restore", 101] = fault
    left = {"fail": "checkpointed", "stuck": "failed", "lie": "checkpointed"}[fault]
    said = await failing(driver.load(order(host, LOAD)), NotDone, f"it is {left}; a restore that failed cannot be")
    assert ("the tool said that it was done" in said) == (fault == "lie")


@pytest.mark.asyncio
async def test_a_process_in_state_failed_is_not_touched():
    host, driver = Host(), CudaCheckpointResidency()
    host.pids[101] = "failed"
    await failing(driver.park(order(host, PARK)), NotDone, "is failed, which no checkpoint leads out of: end it")
    await failing(driver.load(order(host, LOAD)), NotDone, "is failed, which no restore leads out of: end it")
    assert host.actions == []


@pytest.mark.asyncio
@pytest.mark.looptime
@pytest.mark.parametrize(
    ("action", "kind", "after_s"), [("lock", PARK, 15), ("checkpoint", PARK, 180), ("restore", LOAD, 180),
                                    ("unlock", LOAD, 15)]
)  # fmt: skip
async def test_each_action_has_a_time_limit_and_the_state_is_told(action, kind, after_s):
    host, driver = Host(), CudaCheckpointResidency()
    if kind is LOAD:
        await driver.park(order(host, PARK))
    host.faults[action, 101] = "hang"
    began = anyio.current_time()
    verb = driver.park if kind is PARK else driver.load
    with pytest.raises(NotDone, match=f"{action} of pid 101 on host1 failed: cuda-checkpoint took longer"):
        await verb(order(host, kind))
    assert anyio.current_time() - began == pytest.approx(after_s, abs=0.1)


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_what_was_done_and_did_not_return_is_still_an_error_and_a_second_telling_goes_on_from_there():
    host, driver = Host(), CudaCheckpointResidency()
    host.faults["checkpoint", 101] = "hang_after"
    with pytest.raises(NotDone, match="it is checkpointed"):
        await driver.park(order(host, PARK))
    await driver.park(order(host, PARK))
    assert host.actions == [("lock", 101), ("checkpoint", 101)]


@pytest.mark.asyncio
async def test_a_state_that_nobody_can_tell_is_contact_lost():
    host, driver = Host(), CudaCheckpointResidency()
    host.faults["state", 101] = True
    told = order(host, PARK)
    await failing(driver.park(told), ContactLost, "the state of pid 101 on host1 cannot be told")
    probed = await driver.probe(told)
    assert (probed.known, probed.done) == (False, False)


@pytest.mark.asyncio
async def test_a_probe_tells_the_states_as_they_are():
    host, driver = Host((101, 102)), CudaCheckpointResidency()
    host.faults["lock", 102] = "fail"
    told = order(host, PARK)
    await failing(driver.park(told), NotDone, "lock of pid 102")
    assert await driver.probe(told) == Probed(known=True, error="pid 101 is running, pid 102 is running")
    await driver.park(told)
    assert await driver.probe(told) == Probed(known=True, done=True)
    assert await driver.probe(order(host, PARK)) == Probed(known=False)


# ---- which process ---------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_without_a_list_it_is_the_sessions_process_if_it_is_still_that_one():
    host, driver = Host(), CudaCheckpointResidency()
    pid = os.getpid()
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    host.pids = {pid: "running"}
    await driver.park(order(host, PARK, pid=pid, started=started))
    assert host.pids == {pid: "checkpointed"}
    said = await failing(
        driver.load(order(host, LOAD, pid=pid, started="1")), NotDone, "ended while it was parked: start the job again"
    )
    assert f"pid {pid}" in said
    await driver.load(order(host, LOAD, pid=pid, started="1", warm=False))  # the job will start it
    await driver.discard(order(host, DISCARD, pid=pid, started="1"))
    assert host.pids == {pid: "checkpointed"}, "another process of that number is left alone"


@pytest.mark.asyncio
@pytest.mark.parametrize("printed", ["1\n", "-5\n", "12a\n", "$(reboot)\n"])
async def test_what_is_no_process_id_is_refused(printed):
    host = Host()

    async def strange(argv):
        return Ran(0, printed.encode(), b"")

    host.commands["list-pids"] = strange
    await failing(CudaCheckpointResidency().park(order(host, PARK)), NotDone, "for a process id")
    assert host.actions == []


@pytest.mark.asyncio
async def test_a_discard_waits_for_the_process_to_end_and_tells_who_has_to_end_it():
    host = Host()
    await failing(
        CudaCheckpointResidency().discard(order(host, DISCARD, end_wait_s=0.2)), NotDone, "still runs .*end it"
    )
    assert host.pids == {101: "running"}


# ---- opt-in ----------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_it_is_off_until_an_operator_turns_it_on():
    host, off = Host(), await CudaCheckpointResidency.open(FakeChannel(), {})
    with pytest.raises(ValueError, match="enabled = true"):
        off.check(state())
    await failing(off.park(order(host, PARK)), NotDone, "is off here")
    on = await CudaCheckpointResidency.open(FakeChannel(), {"enabled": True})
    on.check(state())
    with pytest.raises(ValueError, match="no shell reads it"):
        on.check(state(list="pgrep python"))
    assert on.admin_options == {"list", "start", "stop"}
