"""From a version's file into a torch module: whole, through staged memory, and in parts by the ranks of a host."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from patience import PATIENCE_S

from rollmuxd_weights import Publisher, load_into
from rollmuxd_weights.apply.torch_module import tensors

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)


def setup_module():
    """Here and not above: each of pytest's workers reads this file, and would spend a second on torch."""
    global torch  # noqa: PLW0603
    import torch


def model(seed):
    """Tensors of several types and of odd sizes: large ones, small ones, an empty one, tied ones, a transposed one."""
    torch.manual_seed(seed)
    made = torch.nn.Module()
    made.layers = torch.nn.ModuleList([torch.nn.Linear(301, 517).bfloat16(), torch.nn.Linear(7, 3)])
    made.tied = made.layers[0].weight
    made.register_buffer("counts", torch.randint(0, 1 << 40, (1001,)))
    made.register_buffer("mask", torch.rand(777) < 0.5)
    made.register_buffer("scale", torch.rand(()))
    made.register_buffer("empty", torch.empty(0, 4))
    made.register_buffer("across", torch.rand(90, 70).T)
    return made


def same(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture
def published(tmp_path):
    with Publisher("job", dir=tmp_path / "t") as publisher:
        return publisher.publish(model(1).state_dict(), 1).path


def test_a_model_gets_the_tensors_and_another_one_is_refused(published):
    other = model(2)
    load_into(other, published)
    assert same(other, model(1))
    with pytest.raises(ValueError, match="of another model"):
        load_into(torch.nn.Sequential(other), published)
    other.layers[1] = torch.nn.Linear(8, 3)
    with pytest.raises(ValueError, match="weight as"):
        load_into(other, published)


def test_a_model_of_other_types_gets_the_values(published):
    other = model(2)
    other.layers.float()
    load_into(other, published)
    assert torch.equal(other.layers[0].weight, model(1).layers[0].weight.float())


@pytest.mark.parametrize(("size", "stages"), [(4097, 1), (4096, 4), (1 << 20, 2)])
def test_bytes_that_pass_through_staged_memory_are_all_there(published, monkeypatch, size, stages):
    """(On a GPU they do; here the same code has a processor for its device.)"""
    monkeypatch.setattr("rollmuxd_weights.apply.torch_module._STAGED", ("cpu",))
    monkeypatch.setattr("rollmuxd_weights.apply.torch_module._STAGE", size)
    monkeypatch.setattr("rollmuxd_weights.apply.torch_module._STAGES", stages)
    other = model(2)
    load_into(other, published)
    assert same(other, model(1))


_RANK = """
import json, sys
sys.path[:] = json.loads(sys.argv[4])
import torch
import torch.distributed as dist
from rollmuxd_weights.apply import torch_module
from test_weights_torch import model, same, setup_module

setup_module()
rank, path, where = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + where, rank=rank, world_size=3)
read = 0
copies = torch_module._Stages.copy

def counted(stages, into, source):
    global read
    read += len(source)
    copies(stages, into, source)

torch_module._Stages.copy = counted
torch_module._LEAST_GATHERED = 1000
other = model(2 + rank)
torch_module.load_into(other, path, group=dist.group.WORLD)
print(json.dumps({"same": same(other, model(1)), "read": read}), flush=True)
dist.destroy_process_group()
"""


def started(program, *words):
    command = [sys.executable, "-c", program, *map(str, words)]
    imported = ("torch.distributed.tensor", "torch._dynamo")
    return forked.Popen(command, stdout=subprocess.PIPE, text=True, imported=imported)


@pytest.mark.slow
@pytest.mark.e2e
def test_the_ranks_of_a_host_read_a_part_each_and_gather_the_rest(published, tmp_path):
    words = [published, tmp_path / "rendezvous", json.dumps([*sys.path, str(Path(__file__).parent)])]
    ranks = [started(_RANK, rank, *words) for rank in range(3)]
    told = [json.loads(rank.communicate(timeout=PATIENCE_S)[0]) for rank in ranks]
    assert [one["same"] for one in told] == [True] * 3
    assert all(one["read"] < 0.36 * published.stat().st_size for one in told), told


_SHARDED = """
import json, sys
sys.path[:] = json.loads(sys.argv[4])
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from rollmuxd_weights import Older, Publisher, take_part
from rollmuxd_weights.between import Between
from test_weights_torch import model, setup_module

setup_module()
rank, folder, where = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + where, rank=rank, world_size=3)
mesh = init_device_mesh("cpu", (3,))
whole = {name: one for name, one in model(1).state_dict().items() if one.dim()}
shards = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in whole.items() if one.is_floating_point()}
tensors = {**whole, **shards}
told = {"here": sum(one.to_local().numel() for one in shards.values())}
mover = lambda publisher: Between(publisher, lambda: tensors, None, rollouts=1, expected_s=1)
if rank:
    mover(None).publish("1.4")
    take_part(tensors)
else:
    with Publisher("job", dir=folder) as publisher:
        first = mover(publisher)
        first.publish("1.4")
        first.wait()
        told["path"] = str(publisher.store.path(publisher.store.current()))
        try:
            publisher.publish(tensors, 1)
        except Older as error:
            told["refused"] = str(error)
dist.barrier()
print(json.dumps(told), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.e2e
def test_shards_are_gathered_by_all_ranks_and_none_waits_for_one_that_may_not_publish(tmp_path):
    words = [tmp_path / "t", tmp_path / "rendezvous", json.dumps([*sys.path, str(Path(__file__).parent)])]
    ranks = [started(_SHARDED, rank, *words) for rank in range(3)]
    first, *others = [json.loads(rank.communicate(timeout=PATIENCE_S)[0]) for rank in ranks]
    found, whole = dict(tensors(first["path"])), model(1).state_dict()
    assert found.keys() == {name for name, one in whole.items() if one.dim()}
    assert all(torch.equal(one, whole[name]) for name, one in found.items())
    assert "not newer" in first["refused"]
    assert 0 < others[0]["here"] < sum(one.numel() for one in found.values() if one.is_floating_point()) / 2
