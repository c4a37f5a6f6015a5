"""What NVML says is understood as it is meant, and what it does not say is never taken for free memory."""

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from rollmuxd.spi import ContactLost, HostConfig
from rollmuxd_backend_local import LocalBackend, payload
from rollmuxd_backend_local.onhost import machine

GPU = {"uuid": "GPU-8f2c", "name": "NVIDIA H20", "total_mb": 97_871}
LOST, NOT_SUPPORTED, NO_PERMISSION, NO_DRIVER = 15, 3, 4, 9


@pytest.fixture
def box(tmp_path):
    """A function from GPUs to a backend; the latest GPUs count."""

    async def made(*found, configured=(), **more):
        (tmp_path / "gpus.json").write_text(json.dumps({"gpus": found, **more}))
        host = HostConfig(id="box", gpus=tuple(f"box/gpu{number}" for number in configured))
        return await LocalBackend.open([host], {"made_up_gpus": str(tmp_path / "gpus.json")})

    return made


@pytest.fixture
def at_home(monkeypatch):
    monkeypatch.setattr(machine, "in_a_pid_namespace", lambda: False)


@pytest.mark.asyncio
async def test_a_gpu_has_its_type_its_size_and_its_own_name(box):
    inventory = await (await box(GPU)).inventory("box")
    (info,) = inventory.gpus

    assert (info.gpu, info.type, info.memory_mb, info.uuid) == ("box/gpu0", "NVIDIA H20", 97_871, "GPU-8f2c")
    assert inventory.ram_mb > 0
    assert (await (await box(GPU)).observe("box")).uuids == {"box/gpu0": "GPU-8f2c"}


@pytest.mark.asyncio
async def test_whose_process_it_is_is_said_with_pid_name_user_and_memory(box, at_home):
    observation = await (await box({**GPU, "processes": [{"pid": os.getpid(), "mb": 5_100}]})).observe("box")
    user = machine.user_name(os.geteuid())

    assert observation.gpus[0].used_mb == 5_100
    assert observation.gpus[0].processes == (f"pid {os.getpid()} {machine.process_name(os.getpid())} ({user}, 5.1 GB)",)


@pytest.mark.asyncio
async def test_memory_that_no_listed_process_has_is_somebodys_all_the_same(box, at_home):
    seen = (await (await box({**GPU, "more_mb": 8_200})).observe("box")).gpus[0]
    assert (seen.used_mb, seen.processes) == (8_200, ("8.2 GB of processes not listed by the driver",))


@pytest.mark.asyncio
async def test_of_a_process_whose_memory_is_not_told_the_gpus_memory_counts(box, at_home):
    seen = (
        await (await box({**GPU, "more_mb": 8_200, "processes": [{"pid": 2**22, "mb": None}]})).observe("box")
    ).gpus[0]
    assert (seen.used_mb, seen.processes) == (8_200, (f"pid {2**22}",))


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [NOT_SUPPORTED, NO_PERMISSION])
async def test_where_processes_are_not_listed_memory_still_is(box, at_home, error):
    errors = {"processes": error}
    seen = (await (await box({**GPU, "more_mb": 8_200, "errors": errors})).observe("box")).gpus[0]
    assert (seen.used_mb, seen.processes) == (8_200, ("8.2 GB of processes that may not be listed",))


@pytest.mark.asyncio
async def test_in_a_container_a_pid_is_not_taken_for_the_process_that_has_it_here(box, monkeypatch):
    monkeypatch.setattr(machine, "in_a_pid_namespace", lambda: True)
    seen = (await (await box({**GPU, "processes": [{"pid": os.getpid(), "mb": 5_100}]})).observe("box")).gpus[0]
    assert seen.used_mb == 5_100
    assert seen.processes == (f"pid {os.getpid()} as the machine counts, not this container (5.1 GB)",)
    seen = (await (await box({**GPU, "more_mb": 8_200})).observe("box")).gpus[0]
    assert seen.processes == ("8.2 GB of processes in another PID namespace",)


def test_a_pid_namespace_is_noticed_by_who_is_in_it(tmp_path):
    """For real: the payload is opened in a new one."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("PID namespaces cannot be made here; that needs root")
    (tmp_path / "gpus.json").write_text(json.dumps({"gpus": [{**GPU, "processes": [{"pid": 1, "mb": 5_000}]}]}))
    question = payload.pack({"ask": "look", "made_up": str(tmp_path / "gpus.json")}, "mark:")
    ran = subprocess.run([*apart, sys.executable, "-I", "-c", payload.OPEN], input=question, capture_output=True)

    (gpu,) = payload.unpack(ran.stdout, "mark:")["said"]["gpus"]
    assert gpu["processes"] == ["pid 1 as the machine counts, not this container (5.0 GB)"]


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["uuid", "memory", "mig", "processes"])
async def test_a_lost_gpu_is_said_to_whoever_configured_it_and_the_others_are_seen(box, what):
    lost = {**GPU, "errors": {what: LOST}}
    observation = await (await box(GPU, lost, configured=(0, 1))).observe("box")
    assert [seen.gpu for seen in observation.gpus] == ["box/gpu0"]
    assert list(observation.unread) == ["box/gpu1"]
    assert "the GPU is lost" in observation.unread["box/gpu1"]
    assert "restart the machine" in observation.unread["box/gpu1"]


@pytest.mark.asyncio
async def test_a_lost_gpu_that_nobody_configured_is_left_out(box):
    backend = await box(GPU, {**GPU, "errors": {"uuid": LOST}}, configured=(0,))
    observation = await backend.observe("box")
    assert ([seen.gpu for seen in observation.gpus], observation.unread) == (["box/gpu0"], {})
    assert [info.gpu for info in (await backend.inventory("box")).gpus] == ["box/gpu0"]


@pytest.mark.asyncio
async def test_a_gpu_whose_memory_cannot_be_told_is_never_taken_for_empty(box):
    backend = await box({**GPU, "errors": {"memory": NOT_SUPPORTED}}, configured=(0,))
    observation = await backend.observe("box")
    assert (observation.gpus, observation.unread) == ((), {"box/gpu0": "NVML says: NVML error 3"})


@pytest.mark.asyncio
async def test_a_split_gpu_is_nobodys_and_refused_to_whoever_configured_it(box):
    split = {**GPU, "mig": True}
    assert (await (await box(split, GPU)).inventory("box")).gpus[0].gpu == "box/gpu1"
    unread = (await (await box(split, GPU, configured=(0, 1))).observe("box")).unread
    assert list(unread) == ["box/gpu0"]
    assert "nvidia-smi -i 0 -mig 0" in unread["box/gpu0"]


@pytest.mark.asyncio
async def test_a_gpu_that_is_configured_and_not_there_is_said_to_be_so(box):
    observation = await (await box(GPU, configured=(0, 3))).observe("box")
    assert observation.unread == {"box/gpu3": "it is in the configuration and not on box; its GPUs are box/gpu0"}


@pytest.mark.asyncio
async def test_a_driver_that_is_reloaded_is_read_again(box):
    backend = await box(GPU)
    await backend.observe("box")
    await box(GPU, errors={"count": 1})
    with pytest.raises(ContactLost):
        await backend.observe("box")
    await box(GPU)
    assert len((await backend.observe("box")).gpus) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "words"),
    [(NO_DRIVER, "not loaded; load it"), (13, "510 or newer is needed"), (18, "restart the machine")],
)
async def test_a_driver_that_is_not_there_is_said_with_what_to_do(box, error, words):
    backend = await box(GPU, errors={"start": error})
    with pytest.raises(ContactLost, match=words):
        await backend.observe("box")


@pytest.mark.asyncio
async def test_this_machine_without_a_driver_says_so():
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    backend = await LocalBackend.open([HostConfig(id="box")], {})
    with pytest.raises(ContactLost, match=r"box: there is no NVIDIA driver here .* install one"):
        await backend.inventory("box")


_HANGS = """
import sys, time
import anyio
from rollmuxd.spi import ContactLost, HostConfig
from rollmuxd_backend_local import LocalBackend, asking
from rollmuxd_backend_local.onhost.made_up import MadeUp
asking.LOOK_S = 0.05
MadeUp.count = lambda self: time.sleep(600)

async def main():
    backend = await LocalBackend.open([HostConfig(id="box")], {"made_up_gpus": sys.argv[1]})
    for _ in range(10):
        try:
            await backend.observe("box")
        except ContactLost as error:
            print(error)
    await backend.close()

anyio.run(main)
"""


def test_a_driver_that_hangs_hangs_neither_the_daemon_nor_its_end(tmp_path):
    (tmp_path / "gpus.json").write_text(json.dumps({"gpus": []}))
    ran = subprocess.run(
        [sys.executable, "-c", _HANGS, tmp_path / "gpus.json"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    first, *_, last = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr
    assert "box did not answer within 0.05 s; see dmesg" in first
    assert "8 looks hang in its GPU driver" in last


@pytest.mark.asyncio
async def test_two_hosts_would_be_one_machine():
    with pytest.raises(ValueError, match="b: it is reached by backend local, and so is a: both are this machine"):
        await LocalBackend.open([HostConfig(id="a"), HostConfig(id="b")], {})


# ---- the library itself ----------------------------------------------------------------------------------------------

_LOOK = """
import json
from rollmuxd_backend_local.onhost import gpus
print(json.dumps(gpus.look(gpus.nvml())))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc) to make a stand-in for NVIDIA's library")
    source = Path(__file__).with_name("nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


def test_the_layouts_of_the_library_are_those_of_nvml_h(library):
    """A library of C stands in for NVIDIA's."""
    ran = subprocess.run(
        [sys.executable, "-c", _LOOK],
        env={**os.environ, "LD_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    looked = json.loads(ran.stdout)
    first, lost, split = looked["gpus"]

    assert looked["driver"] == "580.65.06"
    assert (first["uuid"], first["type"], first["memory_mb"], first["used_mb"]) == (
        "GPU-0",
        "NVIDIA H20",
        80_000,
        9_001,
    )
    assert first["processes"][0].startswith("pid 1 ")
    assert "7.0 GB" in first["processes"][0]
    assert first["processes"][1].startswith("pid 4194000")
    assert "lost" in lost["trouble"]
    assert (split["mig"], split["trouble"]) == (True, "")


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.13"])
def test_the_payload_is_opened_by_pythons_of_other_machines(version, tmp_path):
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    places = [shutil.which(f"python{version}"), *home.glob(f".pyenv/versions/{version}.*/bin/python3")]
    tried = [
        place for place in places if place and not subprocess.run([place, "-c", ""], capture_output=True).returncode
    ]
    if not tried:
        pytest.skip(f"there is no Python {version} here")
    (tmp_path / "gpus.json").write_text(json.dumps({"gpus": [GPU]}))
    for question in ({"ask": "look"}, {"ask": "about"}, {"ask": "alive", "owner": "nobody", "launch": "l1"}):
        packed = payload.pack({**question, "made_up": str(tmp_path / "gpus.json")}, "mark:")
        ran = subprocess.run([tried[0], "-I", "-c", payload.OPEN], input=packed, capture_output=True)
        assert "said" in payload.unpack(b"some noise\n" + ran.stdout, "mark:"), ran.stderr.decode()
