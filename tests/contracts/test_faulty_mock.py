"""Each fault breaks the calls it names, as often as it says, and no others; from Python and by file alike."""

import anyio
import pytest
from faulty_mock import Fault, GivenBack, Script, Stranger, write
from faulty_mock import FaultyMock as MockBackend
from faulty_mock import FaultyResidency as MockResidency

from rollmuxd.spi import ContactLost, HostConfig, NotDone, OrderKind, Probed, StateOrder, StateSpec

LOAD, PARK, DISCARD = OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD
DRIVER = MockResidency()


async def open_mock(**options):
    return await MockBackend.open([HostConfig(id="h", gpus=("h/gpu0",), options={"copy_gbps": 1e6, **options})], {})


def order(backend, kind, *, job="a", id="o1"):
    state = StateSpec(pool="rollout", gpu_mb=40_000, residual_mb=2_000)
    return StateOrder(
        order=id, kind=kind, job=f"j-{job}", run=1, owner="t", name=job, pool="rollout", node="h/n", host="h",
        gpus=("h/gpu0",), state=state, ranks=1, warm=False, pid=0, started="", backend=backend,
    )  # fmt: skip


async def used(backend):
    return (await backend.observe("h")).gpus[0].used_mb


@pytest.mark.asyncio
async def test_fail_is_not_done_and_nothing_was_done():
    backend = await open_mock()
    backend.faults.add("fail", "load", message="the engine is stuck")
    with pytest.raises(NotDone, match="the engine is stuck"):
        await DRIVER.load(order(backend, LOAD))
    assert await used(backend) == 0


@pytest.mark.asyncio
async def test_lose_has_not_done_it_and_lose_after_has():
    backend = await open_mock()
    backend.faults.add("lose", "load", times=1)
    backend.faults.add("lose_after", "load", times=1)
    with pytest.raises(ContactLost):
        await DRIVER.load(order(backend, LOAD))
    assert await used(backend) == 0
    assert (await DRIVER.probe(order(backend, LOAD))).done is False
    with pytest.raises(ContactLost):
        await DRIVER.load(order(backend, LOAD))
    assert await used(backend) == 40_000
    assert (await DRIVER.probe(order(backend, LOAD))).done is True
    await DRIVER.load(order(backend, LOAD))


@pytest.mark.asyncio
async def test_hang_never_comes_back_until_cancelled():
    backend = await open_mock()
    backend.faults.add("hang")
    for call in (
        backend.observe("h"),
        backend.inventory("h"),
        backend.kill("h", 4711, "1", "j1", "team"),
        DRIVER.load(order(backend, LOAD)),
        DRIVER.probe(order(backend, LOAD)),
    ):
        with pytest.raises(TimeoutError), anyio.fail_after(0.003):
            await call
    backend.faults.clear()
    assert await used(backend) == 0


@pytest.mark.asyncio
async def test_lie_is_done_and_nothing_was():
    backend = await open_mock()
    await DRIVER.load(order(backend, LOAD))
    lie = backend.faults.add("lie", "discard")
    await DRIVER.discard(order(backend, DISCARD))
    assert await used(backend) == 40_000
    backend.faults.remove(lie)
    backend.faults.add("lie", "observe", times=1)
    assert await used(backend) == 0
    assert await used(backend) == 40_000
    backend.faults.add("lie", "probe")
    assert await DRIVER.probe(order(backend, PARK, id="never told")) == Probed(known=True, done=True)


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_delay_comes_before_all_else():
    backend = await open_mock()
    backend.faults.add("delay", "observe", delay_s=100)
    backend.faults.add("fail", "load", delay_s=50)
    with anyio.fail_after(100.5):
        await backend.observe("h")
    with pytest.raises(TimeoutError), anyio.fail_after(49.5):
        await DRIVER.load(order(backend, LOAD))
    with pytest.raises(NotDone):
        await DRIVER.load(order(backend, LOAD))


@pytest.mark.asyncio
async def test_a_fault_may_name_a_job_by_name_or_id_and_skip_some_calls():
    backend = await open_mock()
    backend.faults.add("fail", "load", job="b")
    backend.faults.add("fail", "park", job="j-a", skip=1, times=1)
    await DRIVER.load(order(backend, LOAD))
    with pytest.raises(NotDone):
        await DRIVER.load(order(backend, LOAD, job="b"))
    await DRIVER.park(order(backend, PARK))
    with pytest.raises(NotDone):
        await DRIVER.park(order(backend, PARK))
    await DRIVER.park(order(backend, PARK))
    assert await used(backend) == 2_000


@pytest.mark.asyncio
async def test_a_fault_for_a_job_does_not_touch_a_look_at_the_host():
    backend = await open_mock()
    backend.faults.add("hang", job="a")
    with anyio.fail_after(600):
        assert await used(backend) == 0


@pytest.mark.asyncio
async def test_a_fault_for_another_host_does_not_touch_this_one():
    backend = await open_mock()
    backend.faults.add("lose", host="i")
    assert await used(backend) == 0


@pytest.mark.asyncio
async def test_a_faults_file_is_read_at_each_call(tmp_path):
    path = tmp_path / "faults.json"
    backend = await open_mock(faults=str(path))
    assert await used(backend) == 0, "no file, no faults"
    write(path, Script(faults=(Fault("lose", "observe", host="h"),)))
    with pytest.raises(ContactLost):
        await backend.observe("h")
    write(path, Script(strangers=(Stranger("h/gpu0", 30_000, "pid 4711 python"),)))
    observation = await backend.observe("h")
    assert (observation.gpus[0].used_mb, observation.gpus[0].processes) == (30_000, ("pid 4711 python",))
    path.unlink()
    assert await used(backend) == 0
    await DRIVER.load(order(backend, LOAD))
    write(path, Script(given_back=(GivenBack("a", "h/gpu0"),)))
    assert await used(backend) == 0


@pytest.mark.asyncio
async def test_times_are_counted_over_a_restart_where_there_is_a_memory_and_anew_under_another_id(tmp_path):
    path, memory = tmp_path / "faults.json", str(tmp_path / "hardware.json")
    write(path, Script(faults=(Fault("lose", "observe", times=1, id="first"),)))
    backend = await open_mock(faults=str(path), memory=memory)
    with pytest.raises(ContactLost):
        await backend.observe("h")
    assert await used(backend) == 0
    again = await open_mock(faults=str(path), memory=memory)
    assert await used(again) == 0
    write(path, Script(faults=(Fault("lose", "observe", times=1, id="second"),)))
    with pytest.raises(ContactLost):
        await again.observe("h")


@pytest.mark.asyncio
@pytest.mark.parametrize("text", ["{", '{"fault": []}', '{"faults": [{"do": "explode"}]}'])
async def test_a_faults_file_that_makes_no_sense_is_noticed(tmp_path, text):
    path = tmp_path / "faults.json"
    backend = await open_mock(faults=str(path))
    path.write_text(text)
    with pytest.raises(ContactLost, match="cannot be understood"):
        await backend.observe("h")
    with pytest.raises(ContactLost, match="cannot be understood"):
        await DRIVER.load(order(backend, LOAD))
    with pytest.raises(ValueError, match=r"h: options.faults: the faults file .* cannot be understood"):
        await open_mock(faults=str(path))


# ---- options ------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"copy_gpbs": 1}, "h: options.copy_gpbs is not an option of backend mock; did you mean copy_gbps?"),
        ({"zzz": 1}, "h: options.zzz is not an option of backend mock; known are gpus, "),
        ({"copy_gbps": 0}, "h: options.copy_gbps is 0: expected `float` > 0.0"),
        ({"gpu_gb": "80"}, "h: options.gpu_gb is '80': expected `float | null`, got `str`"),
        ({"cold_s": -1}, "h: options.cold_s is -1: expected `float` >= 0.0"),
        ({"owns_sessions": "yes"}, "h: options.owns_sessions is 'yes': expected `bool`, got `str`"),
    ],
)
async def test_a_wrong_option_is_refused_with_host_and_key(options, said):
    with pytest.raises(ValueError) as refused:
        await MockBackend.open([HostConfig(id="h", gpus=("h/gpu0",), options=options)], {})
    assert str(refused.value).startswith(said)


@pytest.mark.asyncio
async def test_a_record_that_cannot_be_written_is_refused_with_host_and_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"h: options.record: "):
        await open_mock(record=str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match=r"h: options.memory: "):
        await open_mock(memory=str(tmp_path / "file" / "below"))


@pytest.mark.asyncio
async def test_the_backends_options_are_the_hosts_defaults():
    hosts = [
        HostConfig(id="h", options={"gpus": 1, "gpu_gb": 24}),
        HostConfig(id="i", options={"gpus": 2}, ram_mb=64_000),
    ]
    backend = await MockBackend.open(hosts, {"gpu_gb": 141, "gpu_type": "H200"})
    first, second = await backend.inventory("h"), await backend.inventory("i")
    assert [(info.gpu, info.type, info.memory_mb) for info in first.gpus] == [("h/gpu0", "H200", 24_000)]
    assert [(info.gpu, info.memory_mb) for info in second.gpus] == [("i/gpu0", 141_000), ("i/gpu1", 141_000)]
    assert (first.ram_mb, second.ram_mb) == (512_000, 64_000)


@pytest.mark.asyncio
async def test_the_configured_gpus_come_first_and_none_comes_twice():
    host = HostConfig(id="h", gpus=("h/gpu1", "h/gpu7"), gpu_mb=24_000, options={"gpus": 3})
    inventory = await (await MockBackend.open([host], {})).inventory("h")
    assert [info.gpu for info in inventory.gpus] == ["h/gpu1", "h/gpu7", "h/gpu0", "h/gpu2"]
    assert {info.memory_mb for info in inventory.gpus} == {24_000}


@pytest.mark.asyncio
async def test_the_driver_has_no_options():
    with pytest.raises(ValueError, match="speed is not an option of residency driver mock"):
        await MockResidency.open(None, {"speed": 1})
