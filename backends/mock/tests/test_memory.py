"""Hardware does not forget when the daemon dies, and forgets all when the machine restarts or the process dies."""

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from faulty_mock import reboot

from rollmuxd.cli.processes import started as start_time
from rollmuxd.spi import HostConfig, NotDone, OrderKind, Probed, StateOrder, StateSpec
from rollmuxd_backend_mock import MockBackend, MockResidency
from rollmuxd_backend_mock.processes import alive

GPUS = ("h/gpu0", "h/gpu1")
LOAD, PARK, DISCARD = OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD


@pytest.fixture
def process():
    """A process that stands for a job's."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


async def open_mock(**options):
    return await MockBackend.open([HostConfig(id="h", gpus=GPUS, options={"copy_gbps": 1e6, **options})], {})


def order(backend, kind, *, id="o1", pid=0, started="", job="a"):
    state = StateSpec(pool="rollout", gpu_mb=40_000, residual_mb=2_000, ram_mb=80_000)
    return StateOrder(
        order=id, kind=kind, job=f"j-{job}", run=1, owner="t", name=job, pool="rollout", node="h/n", host="h",
        gpus=GPUS, state=state, ranks=1, warm=False, pid=pid, started=started, backend=backend,
    )  # fmt: skip


def events(said):
    return [json.loads(line)["event"] for line in Path(said["record"]).read_text().splitlines()]


async def used(backend):
    return [gpu.used_mb for gpu in (await backend.observe("h")).gpus]


# ---- the daemon dies -------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_is_on_the_gpus_outlives_the_daemon(tmp_path):
    memory = str(tmp_path / "mem" / "hardware.json")
    first = await open_mock(memory=memory)
    await MockResidency().load(order(first, LOAD))
    boot_id = (await first.observe("h")).boot_id
    # Killed: nothing is closed.
    second = await open_mock(memory=memory)
    assert await used(second) == [40_000, 40_000]
    assert (await second.observe("h")).boot_id == boot_id
    await MockResidency().park(order(second, PARK, id="o2"))
    assert await used(await open_mock(memory=memory)) == [2_000, 2_000]


@pytest.mark.asyncio
async def test_without_a_memory_it_begins_empty():
    backend = await open_mock()
    await MockResidency().load(order(backend, LOAD))
    again = await open_mock()
    assert await used(again) == [0, 0]
    assert (await again.observe("h")).boot_id != (await backend.observe("h")).boot_id


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_an_order_that_the_daemon_died_over_was_begun_and_not_finished(tmp_path):
    memory = str(tmp_path / "hardware.json")
    backend = await open_mock(memory=memory, cold_s=30)
    with anyio.move_on_after(29):
        await MockResidency().load(order(backend, LOAD))
    again = await open_mock(memory=memory)
    assert await used(again) == [40_000, 40_000], "unknown is never free"
    probed = await MockResidency().probe(order(again, LOAD))
    assert probed == Probed(known=True, done=False, error="it was begun and not finished")
    await MockResidency().load(order(again, LOAD))
    assert (await MockResidency().probe(order(again, LOAD))).done


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_probe_knows_done_not_begun_and_not_yet(tmp_path):
    memory = str(tmp_path / "hardware.json")
    backend = await open_mock(memory=memory, cold_s=30)
    driver = MockResidency()
    load = order(backend, LOAD)
    assert await driver.probe(load) == Probed(known=True, done=False, error="it was not begun", begun=False)
    async with anyio.create_task_group() as group:
        group.start_soon(driver.load, load)
        await anyio.sleep(29)
        assert await driver.probe(load) == Probed(known=False)
    assert await driver.probe(load) == Probed(known=True, done=True)
    again = await open_mock(memory=memory)
    assert await driver.probe(order(again, LOAD)) == Probed(known=True, done=True)
    assert not (await driver.probe(order(again, LOAD, job="b"))).done, "a new journal counts its orders from one again"


@pytest.mark.asyncio
async def test_the_memory_is_whole_at_every_moment(tmp_path):
    memory = tmp_path / "hardware.json"
    backend = await open_mock(memory=str(memory))
    for turn in range(20):
        await MockResidency().load(order(backend, LOAD, id=f"l{turn}"))
        json.loads(memory.read_bytes())
        await MockResidency().park(order(backend, PARK, id=f"p{turn}"))
        json.loads(memory.read_bytes())
    assert [path.name for path in tmp_path.iterdir()] == ["hardware.json"]


@pytest.mark.asyncio
async def test_two_hosts_may_share_a_memory_and_one_that_is_away_is_kept(tmp_path):
    options = {"memory": str(tmp_path / "hardware.json"), "copy_gbps": 1e6}
    hosts = [HostConfig(id="h", gpus=GPUS), HostConfig(id="i", gpus=("i/gpu0",))]
    backend = await MockBackend.open(hosts, options)
    await MockResidency().load(order(backend, LOAD))
    await MockBackend.open(hosts[1:], options)
    assert await used(await MockBackend.open(hosts, options)) == [40_000, 40_000]


@pytest.mark.asyncio
async def test_violations_are_remembered(tmp_path):
    said = {"memory": str(tmp_path / "hardware.json"), "record": str(tmp_path / "witness.jsonl")}
    backend = await open_mock(**said)
    await MockResidency().load(order(backend, LOAD))
    with pytest.raises(NotDone):
        await MockResidency().load(order(backend, LOAD, job="b"))
    await open_mock(**said)
    assert events(said).count("violation") == 1


@pytest.mark.asyncio
async def test_a_damaged_memory_is_an_error_with_the_remedy(tmp_path):
    memory = tmp_path / "hardware.json"
    memory.write_text("{")
    with pytest.raises(ValueError, match=r"h: options.memory: .*delete it to start with empty GPUs"):
        await open_mock(memory=str(memory))


# ---- the machine restarts --------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_restart_in_mid_load_is_not_done():
    backend = await open_mock(cold_s=30)
    with pytest.raises(ExceptionGroup) as failed:
        async with anyio.create_task_group() as group:
            group.start_soon(MockResidency().load, order(backend, LOAD))
            await anyio.sleep(29)
            reboot(backend.host("h").machine)
    assert "machine restarted" in str(failed.value.exceptions[0])
    assert await used(backend) == [0, 0]


# ---- the process dies ------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("waited_for", [True, False], ids=["gone", "zombie"])
async def test_bytes_go_with_their_process(process, waited_for, tmp_path):
    said = {"memory": str(tmp_path / "hardware.json"), "record": str(tmp_path / "witness.jsonl")}
    backend = await open_mock(**said)
    started = start_time(process.pid) or ""
    await MockResidency().load(order(backend, LOAD, pid=process.pid, started=started))
    assert await used(backend) == [40_000, 40_000]
    process.kill()
    if waited_for:
        process.wait()
    else:
        with anyio.fail_after(600):
            while alive(process.pid, started):
                await anyio.sleep(0.001)
    assert await used(backend) == [0, 0]
    assert events(said)[-4:] == ["dead", "dead", "clean", "clean"]
    assert await used(await open_mock(watch_pids=False, **said)) == [0, 0]


@pytest.mark.asyncio
async def test_a_pid_that_is_another_process_by_now_is_a_dead_process(process):
    if start_time(process.pid) is None:
        pytest.skip("this system does not show start times of processes")
    backend = await open_mock()
    started = start_time(process.pid)
    await MockResidency().load(order(backend, LOAD, pid=process.pid, started=started))
    backend.hosts["h"].machine.hardware.states["j-a run 1 rollout h/n"].started = str(int(started) - 1)
    assert await used(backend) == [0, 0]


@pytest.mark.asyncio
async def test_a_start_time_that_is_not_the_kernels_is_not_compared(process):
    backend = await open_mock()
    await MockResidency().load(order(backend, LOAD, pid=process.pid, started="Tue Mar  3 10:00:00 2026"))
    assert await used(backend) == [40_000, 40_000]


@pytest.mark.asyncio
async def test_bytes_of_an_unknown_process_stay():
    backend = await open_mock()
    await MockResidency().load(order(backend, LOAD, pid=0))
    assert await used(backend) == [40_000, 40_000]


@pytest.mark.asyncio
async def test_nothing_is_loaded_into_a_dead_process(process, tmp_path):
    said = {"record": str(tmp_path / "witness.jsonl")}
    backend = await open_mock(**said)
    started = start_time(process.pid) or ""
    process.kill()
    process.wait()
    with pytest.raises(NotDone, match="has died"):
        await MockResidency().load(order(backend, LOAD, pid=process.pid, started=started))
    assert await used(backend) == [0, 0]
    assert events(said) == [], "not for a moment"
    await MockResidency().load(order(await open_mock(watch_pids=False), LOAD, pid=process.pid, started=started))


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_a_process_that_dies_over_a_load_is_not_done(process):
    backend = await open_mock(cold_s=30)
    with pytest.raises(ExceptionGroup) as failed:
        async with anyio.create_task_group() as group:
            group.start_soon(MockResidency().load, order(backend, LOAD, pid=process.pid))
            await anyio.sleep(29)
            process.kill()
            process.wait()
    assert "has died meanwhile" in str(failed.value.exceptions[0])


@pytest.mark.asyncio
async def test_it_ends_sessions_only_where_it_owns_them(process):
    started = start_time(process.pid)
    if started is None:
        pytest.skip("this system does not show start times of processes")
    own = "j1", pwd.getpwuid(os.getuid()).pw_name
    assert not await (await open_mock()).kill("h", process.pid, started, *own)
    assert alive(process.pid, started)
    owner = await open_mock(owns_sessions=True)
    assert not await owner.kill("h", process.pid, str(int(started) + 1), *own)
    assert not await owner.kill("h", process.pid, "Tue Mar  3 10:00:00 2026", *own), (
        "what cannot be compared is not ended"
    )
    assert alive(process.pid, started)
    assert await owner.kill("h", process.pid, started, *own)
    assert process.wait() == -9
    assert not await owner.kill("h", process.pid, started, *own), "there is nothing to end any more"


@pytest.mark.asyncio
async def test_a_process_is_never_ended_without_a_start_time_nor_oneself():
    owner, own = await open_mock(owns_sessions=True), ("j1", pwd.getpwuid(os.getuid()).pw_name)
    for pid in (0, 1, os.getpid()):
        assert not await owner.kill("h", pid, start_time(pid) or "1", *own)
    assert alive(os.getpid(), start_time(os.getpid()) or "")
    assert not alive(2**40, "")


# ---- what the daemon gives it ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_in_a_folder_of_the_daemons_it_remembers_unless_told_to_forget(tmp_path):
    async def opened(**options):
        hosts = [HostConfig(id="h", gpus=GPUS, options={"copy_gbps": 1e6, **options})]
        return await MockBackend.open(hosts, {"state_dir": str(tmp_path)})

    first = await opened()
    await MockResidency().load(order(first, LOAD))
    again = await opened()
    assert await used(again) == [40_000, 40_000]
    assert (await again.observe("h")).boot_id == (await first.observe("h")).boot_id
    assert [path.name for path in tmp_path.iterdir()] == ["memory.json"]
    assert await used(await opened(memory="")) == [0, 0]
