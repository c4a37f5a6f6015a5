"""The mock's driver on hosts of another backend: made-up bytes follow its orders there, and the contract holds."""

import json
import subprocess
import sys

import made_up_moves
import msgspec
import pytest
from made_up_mock import MadeUpResidency

from rollmuxd.core.ids import Fence
from rollmuxd.spi import HostConfig, NotDone, OrderKind, StateSpec
from rollmuxd.spi.contract import ResidencyContract, Rig
from rollmuxd.spi.fakes import FakeChannel
from rollmuxd_backend_local import LocalBackend

GPUS = ("box/gpu0", "box/gpu1")
STATE = StateSpec(pool="rollout", gpu_mb=4_000, residual_mb=500, ram_mb=8_000, driver="mock")


class TestOnAHostOfTheLocalBackend(ResidencyContract):
    tolerance_mb = 0
    cancelled_after_turns = (0,)  # each order is a program that is started
    cancelled_after_s = (0.02, 0.08)

    @pytest.fixture(autouse=True)
    def place(self, tmp_path):
        self.file, self.record = tmp_path / "gpus.json", tmp_path / "witness.jsonl"
        self.file.write_text(json.dumps({"gpus": [{"uuid": gpu, "total_mb": 80_000} for gpu in GPUS]}))

    async def make(self):
        backend = await LocalBackend.open([HostConfig(id="box", gpus=GPUS)], {"made_up_gpus": str(self.file)})
        options = {"made_up_gpus": str(self.file), "record": str(self.record), "copy_gbps": 1_000.0}
        residency = await MadeUpResidency.open(FakeChannel(), options)
        return Rig(residency=residency, backend=backend, host="box", gpus=GPUS, state=STATE)

    async def open_with(self, options):
        return await MadeUpResidency.open(FakeChannel(), options)

    @pytest.mark.asyncio
    async def test_two_jobs_on_one_gpu_are_refused_and_told_to_the_witness(self):
        rig = await self.make()
        await rig.residency.load(self.order(rig, OrderKind.LOAD, job="a"))
        with pytest.raises(NotDone, match="THE SCHEDULER IS BROKEN: double hold of box/gpu0"):
            await rig.residency.load(self.order(rig, OrderKind.LOAD, job="b"))
        told = [json.loads(line) for line in self.record.read_text().splitlines()]
        assert [line["event"] for line in told] == ["load", "load", "loaded", "loaded", "violation"]
        assert {line["mb"] for line in told[:4]} == {4_000}
        await self._end(rig)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("gone", [False, True])
    async def test_a_command_that_its_daemon_left_behind_and_that_was_overtaken_is_refused_on_the_host(self, gone):
        """It went on while the next daemon, which knows nothing of it, had the state moved."""
        rig, other = await self.make(), await self.make()
        orders = [
            msgspec.structs.replace(self.order(rig, kind), order=f"o{number}", stamp=Fence(1, number), issued_at=at)
            for kind, number, at in (
                (OrderKind.LOAD, 3, 100), (OrderKind.LOAD, 4, 200),
                (OrderKind.DISCARD, 5, 300), (OrderKind.LOAD, 1, 400),
            )
        ]  # fmt: skip
        late, load, discard, of_a_new_journal = orders
        await other.residency.load(load)
        if gone:
            await other.residency.discard(discard)
        with pytest.raises(NotDone, match=f"order o3 comes late: o{4 + gone} was carried out after it"):
            await rig.residency.load(late)
        assert (await rig.backend.observe("box")).gpus[0].used_mb == (0 if gone else 4_000)
        await other.residency.load(of_a_new_journal)
        await self._end(rig)
        await self._end(other)

    @pytest.mark.asyncio
    async def test_the_bytes_of_a_process_that_died_are_gone(self):
        rig = await self.make()
        order = self.order(rig, OrderKind.LOAD)
        await rig.residency.load(msgspec.structs.replace(order, pid=2**22 - 1, started="1"))
        assert (await rig.backend.observe("box")).gpus[0].used_mb == 0
        await self._end(rig)


def test_a_move_that_ends_between_its_two_files_is_not_called_done(tmp_path):
    box, in_the_way = tmp_path / "gpus.json", tmp_path / "gpus.json.new"
    box.write_text(json.dumps({"gpus": [{"processes": []}]}))
    told = dict(
        file=str(box), record="", key="k", stamp=[1, 1], issued_at=0, host="box", gpus=["box/gpu0"], mb=4_000,
        agreed_mb=500, copy_s=0, job="j1", name="a", run=1, pool="rollout", node="n", pid=0, started="",
    )  # fmt: skip

    def do(what, order):
        more = {"do": what, "order": order, "order_key": order}
        argv = [sys.executable, made_up_moves.__file__, json.dumps({**told, **more})]
        return subprocess.run(argv, capture_output=True, check=False).returncode

    assert do("load", "o1") == made_up_moves.DONE
    in_the_way.mkdir()
    assert do("discard", "o2") == made_up_moves.NOT_DONE
    in_the_way.rmdir()

    assert do("probe", "o2") != made_up_moves.DONE
    assert do("discard", "o2") == made_up_moves.DONE
    assert json.loads(box.read_text()) == {"gpus": [{"processes": []}]}
