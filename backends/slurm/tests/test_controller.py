"""What Slurm says, and what it means: without a cluster."""

import json
import os
import re
from pathlib import Path

import pytest

from rollmuxd.spi import ContactLost, HostConfig
from rollmuxd_backend_local.agent import frames
from rollmuxd_backend_slurm import SlurmBackend, SlurmOptions, controller
from rollmuxd_backend_slurm.controller import Component, Node, environment, in_words, parse, step

RX1 = Node("h100", "rx1", "4711", None)


def test_an_allocation_is_read_with_its_end_its_restarts_and_its_nodes():
    assert parse("N/A|RUNNING|1795612024|2|rx[1-2,7]|\n") == {0: Component("RUNNING", 1795612024.0, 2, "rx[1-2,7]")}


def test_components_are_read_by_number_and_an_end_that_is_not_known_is_none():
    said = "0|RUNNING|N/A|0|rx1|\n1|COMPLETING|NONE|0|rx3|\n"
    found = parse(said)
    assert [(number, one.ends_at, one.is_there) for number, one in found.items()] == [(0, None, True), (1, None, False)]


def test_a_line_that_is_not_as_asked_for_is_no_allocation():
    with pytest.raises(ValueError, match="has not the five fields"):
        parse("slurm_load_jobs: something new\n")
    assert parse("") == {}


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (
            "srun: error: Unable to contact slurm controller\nsrun: error: Expired or invalid job 4711",
            "the Slurm controller cannot be reached",
        ),
        ("slurm_load_jobs error: Invalid job id specified", "allocation 4711 is over, or is another user's"),
        (
            "srun: error: Unable to create step for job 4711: Requested node configuration is not available",
            "node rx1 is not in allocation 4711, or has failed",
        ),
        ("srun: error: No directives to start application on any available hetjob components", "options.component"),
        ("srun: error: something new", "srun: error: something new"),
        ("", "Slurm said nothing"),
    ],
)
def test_errors_are_in_words(said, means):
    assert means in in_words(said, RX1)


def test_what_a_batch_script_says_of_its_own_steps_is_not_for_ours(monkeypatch):
    for name in ("SLURM_GRES", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SBATCH_X", "ROLLMUX_LOG", "NOTIFY_SOCKET"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    found = environment("")
    ours = {name: value for name, value in found.items() if "SLURM" in name or "ROLLMUX" in name or "_" not in name}
    assert "x" not in found.values(), ours
    assert found["SLURM_CONF"] == "/etc/slurm.conf"
    assert environment("/other.conf")["SLURM_CONF"] == "/other.conf"


def test_a_step_is_one_process_beside_all_others_with_what_the_site_needs():
    options = SlurmOptions(srun=("--container-image=x",))
    argv = step(options, Node("h100", "rx1", "4711", 0), "--unbuffered")
    assert argv[:3] == ("srun", "--jobid=4711", "--het-group=0")
    assert {"--overlap", "--nodes=1", "--ntasks=1", "--nodelist=rx1"} < set(argv)
    assert argv[-2:] == ("--container-image=x", "--unbuffered")
    assert not any("het-group" in word for word in step(options, RX1))


@pytest.mark.asyncio
async def test_without_an_allocation_it_says_how_to_get_one(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match=r'rx1: no allocation is named.*allocation = "4711"'):
        await SlurmBackend.open([HostConfig(id="rx1")], {})
    with pytest.raises(ValueError, match=r"rollmuxd init --slurm 4711"):
        await SlurmBackend.find("")
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    backend = await SlurmBackend.open([HostConfig(id="rx1")], {})
    assert backend._node("rx1") == Node("rx1", "rx1", "4712", None)


@pytest.mark.asyncio
async def test_a_number_of_an_allocation_needs_no_quotes():
    backend = await SlurmBackend.open([HostConfig(id="rx1")], {"allocation": 4711})
    assert backend._node("rx1") == Node("rx1", "rx1", "4711", None)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (b"squeue: error: cannot stat file /nowhere\n", "squeue did not end within 20 s: squeue: error: cannot stat"),
        (b"", "the Slurm controller did not answer squeue within 20 s"),
    ],
)
async def test_a_command_that_does_not_end_is_named_with_what_it_has_printed(printed, said, monkeypatch):
    async def run_process(*_, stderr, **_more):
        os.write(stderr.fileno(), printed)
        raise TimeoutError

    monkeypatch.setattr(controller.anyio, "run_process", run_process)
    with pytest.raises(ContactLost, match=said):
        await controller.components("4711", "")


@pytest.mark.asyncio
async def test_a_conf_that_is_not_there_is_said_at_once_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(controller.anyio, "run_process", None)
    with pytest.raises(ContactLost, match=r"there is no /nowhere/slurm\.conf; set options\.conf, or SLURM_CONF"):
        await controller.components("4711", "/nowhere/slurm.conf")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"users": {"ann": "ann"}}, "options.users is not for backend slurm"),
        ({"allocation": "job"}, "options.allocation"),
        ({"allocation": -1}, "options.allocation"),
        ({"allocation": True}, "options.allocation"),
        ({"component": -1}, "options.component"),
        ({"silent_s": 0}, "options.silent_s"),
    ],
)
@pytest.mark.asyncio
async def test_options_that_cannot_be_are_refused_by_host_and_key(options, said):
    with pytest.raises(ValueError, match=f"rx1: {said}"):
        await SlurmBackend.open([HostConfig(id="rx1", options={"allocation": "1", **options})], {})


class Looked(SlurmBackend):
    """A backend whose node answers as a test says it."""

    gpus = 2

    async def _wish(self, host, wish, limit_s, user=""):
        mark = wish.mark
        gpus = [{"index": number, "mig": False, "trouble": ""} for number in range(self.gpus)]
        answer = {"said": {"boot_id": "b", "gpus": gpus, "ram_mb": 1}}
        return frames.Ran(0, (mark + json.dumps(answer)).encode(), b"")


@pytest.mark.asyncio
async def test_a_requeued_allocation_is_a_restarted_machine_only_where_slurm_has_ended_everything():
    backend = await Looked.open([HostConfig(id="rx1")], {"allocation": "4711"})
    line = backend._line("rx1")
    line._told({"environment": {"SLURM_JOB_ID": "4711"}, "cgroups": "0::/user.slice\n"})
    assert (await backend._look("rx1"))["boot_id"] == "b"
    line._told({"environment": {"SLURM_JOB_ID": "4711"}, "cgroups": "4:freezer:/slurm/uid_1/job_4711/step_0\n"})
    line.restarts = 1
    assert (await backend._look("rx1"))["boot_id"] == "b/4711.1"


@pytest.mark.asyncio
async def test_where_devices_are_not_constrained_other_peoples_gpus_are_left_out():
    backend = await Looked.open([HostConfig(id="rx1")], {"allocation": "4711"})
    backend._line("rx1")._told({"environment": {"SLURM_STEP_GPUS": "1,3"}, "cgroups": ""})
    assert [gpu["index"] for gpu in (await backend._look("rx1"))["gpus"]] == [0, 1], "constrained: numbers are its own"
    backend.gpus = 4
    assert [gpu["index"] for gpu in (await backend._look("rx1"))["gpus"]] == [1, 3]


def test_the_how_to_asks_for_a_checkpoint_before_its_nodes_are_drained():
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "slurm.md").read_text()
    within = re.search(r"ends_soon\((\d+) \+ (\d+)\)", page)
    assert within is not None
    assert float(within[1]) == SlurmOptions().drain_before_s
    assert float(within[2]) > 0  # the last iteration that begins before the drain
