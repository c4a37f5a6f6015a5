"""What the torch helper defends: every bit comes back, what was shared is shared again, and all of it or nothing."""

import gc
import importlib.util
import logging
import subprocess
import sys

import forked
import pytest
from patience import PATIENCE_S

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)


def setup_module():
    """Here and not above: each of pytest's workers reads this file, and would spend a second on torch."""
    global torch, communicators, storages, Dropped, TorchState, TorchStateError  # noqa: PLW0603
    import torch

    from rollmuxd_channel import communicators, storages
    from rollmuxd_channel.torch_state import Dropped, TorchState, TorchStateError


def made():
    """Tied weights, a buffer, a buffer that is a view of another, and a parameter that is a slice of a flat one."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(50, 16)
            self.head = torch.nn.Linear(16, 50, bias=False)
            self.head.weight = self.embed.weight
            self.norm = torch.nn.BatchNorm1d(16)
            self.flat = torch.nn.Parameter(torch.randn(64))
            self.register_buffer("cache", torch.arange(100.0))
            self.register_buffer("window", self.cache[10:20], persistent=False)

        def forward(self, tokens):
            return self.head(self.norm(self.embed(tokens))) + self.flat[:50]

    return Model()


def trained(steps=2, seed=0):
    torch.manual_seed(seed)
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randint(0, 50, (8,))).square().mean().backward()
    optimizer.step()


def all_tensors(*parts):
    return [tensor for part in parts for tensor in storages.tensors("it", part)]


def bits_of(*parts):
    return [tensor.detach().clone().reshape(-1).contiguous().view(torch.uint8) for tensor in all_tensors(*parts)]


def same_bits(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def memory_of(*parts):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in all_tensors(*parts)}.values())


def test_everything_is_bitwise_as_it_was_and_in_between_there_is_no_memory():
    model, optimizer = trained()
    with torch.no_grad():  # what comparing numbers would not tell apart
        model.cache[:3] = torch.tensor([float("nan"), -0.0, 1e-45])
    before, size = bits_of(model, optimizer), memory_of(model, optimizer)
    tensors = all_tensors(model, optimizer)
    state = TorchState(model=model, adam=optimizer)
    assert state.device_bytes() == size
    assert state.park() == size
    assert memory_of(model, optimizer) == 0
    assert state.host_bytes() >= size
    for kept in state._kept:
        assert sum(piece.numel() for piece in kept.host) == kept.nbytes, "the bytes are in host memory"
    assert state.load() == size
    assert same_bits(before, bits_of(model, optimizer))
    assert all(a is b for a, b in zip(tensors, all_tensors(model, optimizer), strict=True)), "no tensor is replaced"


def test_gradients_are_kept_and_on_request_dropped():
    model, _ = trained()
    assert model.flat.grad is not None
    before = bits_of(model)
    TorchState(model=model).park()
    other, _ = trained()
    state = TorchState(model=other, gradients="drop")
    state.park()
    state.load()
    assert other.flat.grad is None
    assert len(bits_of(other)) < len(before)


def test_training_goes_on_as_if_nothing_had_been():
    solo, solo_adam = trained(6)
    model, adam = trained(2)
    state = TorchState(model=model, adam=adam)
    for _ in range(4):
        state.park()
        state.load()
        step(model, adam)
    assert same_bits(bits_of(solo, solo_adam), bits_of(model, adam))


def test_what_shared_memory_shares_it_again_also_what_nobody_mentioned():
    model, _ = trained()
    a_view = model.embed.weight[3:5]
    a_detached = model.flat.detach()
    state = TorchState(model=model)
    state.park()
    state.load()
    with torch.no_grad():
        model.head.weight[4, 0] = 42.0
        model.cache[10] = 43.0
        model.flat[0] = 44.0
    assert model.embed.weight[4, 0] == a_view[1, 0] == 42.0
    assert model.window[0] == 43.0
    assert a_detached[0] == 44.0


def test_a_slice_brings_the_whole_buffer_that_it_is_cut_from():
    flat = torch.arange(1000.0)
    state = TorchState(shard=flat[100:110])
    assert state.park() == 4_000
    assert flat.untyped_storage().nbytes() == 0
    state.load()
    assert torch.equal(flat, torch.arange(1000.0))


def test_many_small_and_some_large_storages_each_keep_their_own_bytes(monkeypatch):
    monkeypatch.setattr(storages, "PIECE", 4096)
    torch.manual_seed(1)
    things = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (1, 511, 512, 513, 4095, 4097, 20_000, 7)]
    before = bits_of(things)
    state = TorchState(things=things)
    for _ in range(2):
        state.park()
        for junk in range(3):
            torch.full((20_000,), junk, dtype=torch.uint8)
        state.load()
        assert same_bits(before, bits_of(things))
    assert state.host_bytes() < sum(t.numel() for t in things) + 512 * len(things) + 4096


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "bool", "complex64", "float64"])
def test_whatever_the_type_of_the_numbers(dtype):
    thing = torch.randint(0, 2, (33, 7)).to(getattr(torch, dtype)).t()
    before = thing.clone()
    state = TorchState(thing=[thing])
    state.park()
    state.load()
    assert torch.equal(thing, before)
    assert thing.stride() == (1, 7)


def test_state_that_an_optimizer_made_since_is_parked_too():
    model, adam = trained(0)
    state = TorchState(model=model, adam=adam)
    small = state.device_bytes()
    step(model, adam)
    assert state.device_bytes() > 2 * small
    state.park()
    assert memory_of(model, adam) == 0


def test_a_part_may_be_a_function_that_is_asked_each_time():
    holder = {}
    state = TorchState(engine=lambda: holder.get("engine"))
    assert state.park() == 0
    state.load()
    holder["engine"] = torch.ones(10)
    assert state.park() == 40
    state.load()
    assert holder["engine"].sum() == 10


def test_tensors_inside_of_tensor_subclasses_are_moved():
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.randn(10), torch.randn(10)
    both = TwoTensor(a.clone(), b.clone())
    state = TorchState(both=torch.nn.Parameter(both))
    assert state.park() == 80
    state.load()
    assert torch.equal(both.a, a)
    assert torch.equal(both.b, b)


def test_sparse_gradients_are_moved():
    embed = torch.nn.Embedding(100, 4, sparse=True)
    embed(torch.tensor([3, 5, 3])).sum().backward()
    dense = embed.weight.grad.to_dense()
    state = TorchState(embed=embed)
    state.park()
    state.load()
    assert torch.equal(embed.weight.grad.to_dense(), dense)


# ---- dropped parts --------------------------------------------------------------------------------------------------


def test_a_dropped_tensor_takes_no_host_memory_and_comes_back_as_zeros():
    cache, weights = torch.ones(100_000), torch.ones(10)
    state = TorchState(weights=weights, cache=Dropped(cache))
    state.park()
    assert cache.untyped_storage().nbytes() == 0
    assert state.host_bytes() < 2_000
    state.load()
    assert cache.count_nonzero() == 0
    assert weights.sum() == 10


def test_a_dropped_module_is_filled_by_its_refill_before_the_load_is_done():
    model, _ = trained()
    checkpoint = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = TorchState(model=Dropped(model, refill=lambda: model.load_state_dict(checkpoint)))
    state.park()
    state.load()
    assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("make", [lambda: trained()[0], lambda: trained()[1], lambda: lambda: trained()[0]])
def test_a_dropped_module_that_nobody_fills_is_refused(make):
    with pytest.raises(ValueError, match="reference is dropped at a park and would come back as zeros"):
        TorchState(reference=Dropped(make())).park()


def test_what_is_in_a_dropped_part_and_in_a_kept_one_is_kept():
    shared = torch.ones(5)
    for parts in ({"a": Dropped(shared), "b": shared[1:]}, {"b": shared[1:], "a": Dropped([shared])}):
        state = TorchState(**parts)
        state.park()
        state.load()
        assert shared.sum() == 5


def test_a_refill_that_fails_is_a_failed_load_and_nothing_that_was_kept_is_lost():
    weights, failing = torch.ones(10), [True]

    def refill():
        if failing:
            raise OSError("no such checkpoint")

    state = TorchState(weights=weights, cache=Dropped(torch.ones(10), refill=refill))
    state.park()
    with pytest.raises(OSError, match="no such checkpoint"):
        state.load()
    assert (state.place, memory_of(weights)) == ("parked", 0)
    failing.clear()
    state.load()
    assert weights.sum() == 10


# ---- all of it or nothing -------------------------------------------------------------------------------------------


def test_a_park_without_host_memory_frees_nothing(monkeypatch):
    model, adam = trained()
    before = bits_of(model, adam)
    monkeypatch.setattr(storages, "PIECE", 4096)
    monkeypatch.setattr(storages.HostMemory, "_take", failing_after(2, storages.HostMemory._take))
    state = TorchState(model=model, adam=adam)
    with pytest.raises(TorchStateError, match="do not go to host memory: out of memory"):
        state.park()
    assert state.place == "loaded"
    assert same_bits(before, bits_of(model, adam))
    monkeypatch.undo()
    state.park()
    state.load()
    assert same_bits(before, bits_of(model, adam))


def test_a_load_without_room_takes_nothing_and_may_be_told_again():
    model, adam = trained()
    before = bits_of(model, adam)
    state = TorchState(model=model, adam=adam)
    state.park()
    good = state._kept[3]
    state._kept[3] = storages.Kept(good.part, OutOfMemory(good.storage), good.nbytes, good.keep, good.host)
    with pytest.raises(TorchStateError, match=r"not loaded: no room for its .* GB on cpu: out of memory"):
        state.load()
    assert (state.place, memory_of(model, adam)) == ("parked", 0)
    state._kept[3] = good
    state.load()
    assert same_bits(before, bits_of(model, adam))


class OutOfMemory:
    def __init__(self, storage):
        self.storage, self.device = storage, storage.device

    def resize_(self, nbytes):
        if nbytes:
            raise RuntimeError("out of memory\nand a page of advice")
        self.storage.resize_(nbytes)


def failing_after(times, inner):
    count = iter(range(times))

    def take(self, nbytes):
        if next(count, None) is None:
            raise RuntimeError("out of memory\nand a page of advice")
        return inner(self, nbytes)

    return take


def test_told_twice_it_is_done_once():
    weights = torch.ones(10)
    state = TorchState(weights=weights)
    assert state.load() == 0
    assert state.park() == 40
    assert state.park() == 0
    assert state.load() == 40
    assert state.load() == 0
    assert weights.sum() == 10


# ---- discarded ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parked", [False, True])
def test_a_discard_frees_both_sides_and_a_second_one_does_nothing(parked):
    model, adam = trained()
    state = TorchState(model=model, adam=adam)
    if parked:
        state.park()
    for _ in range(2):
        state.discard()
        assert (memory_of(model, adam), state.host_bytes(), state.place) == (0, 0, "gone")
    gc.collect()
    assert state.park() == 0


def test_after_a_discard_it_is_loaded_only_where_it_can_be_made_anew():
    weights = torch.ones(10)
    state = TorchState(weights=weights)
    state.discard()
    with pytest.raises(TorchStateError, match=r"the state was discarded.*rebuild="):
        state.load()
    again = TorchState(weights=torch.ones(10), rebuild=lambda: again._parts["weights"].fill_(7))
    again.discard()
    again.load()
    assert again._parts["weights"].sum() == 70


# ---- refused --------------------------------------------------------------------------------------------------------


def test_memory_that_is_not_torchs_own_is_refused_by_name_and_nothing_is_moved():
    numpy = pytest.importorskip("numpy")
    mine = torch.ones(10)
    for others in (torch.from_numpy(numpy.zeros(3)), torch.ones(3).share_memory_()):
        state = TorchState(mine=mine, batch=others)
        with pytest.raises(TorchStateError, match=r"batch has a tensor of .* bytes in memory that is not torch's own"):
            state.park()
        assert (state.place, mine.sum()) == ("loaded", 10)


def test_tensors_elsewhere_stay_as_they_are():
    here, elsewhere = torch.ones(10), torch.ones(10, device="meta")
    state = TorchState(both=[here, elsewhere])
    assert state.park() == 40
    assert TorchState(both=[torch.ones(10)], device="cuda").park() == 0


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: TorchState(), "TypeError", "needs at least one part"),  # noqa: PLW0108  (it is imported later)
        (lambda: TorchState(model=3), "TypeError", "model is a int: a part is a module, an optimizer"),
        (lambda: TorchState(model=lambda: "no").park(), "TypeError", "model is a str"),
        (lambda: TorchState(x=torch.ones(1), gradients="keep"), "ValueError", "gradients='keep'"),
        (lambda: TorchState(x=torch.ones(2, 2).to_sparse_csr()).park(), "TorchStateError", "x has a tensor of layout"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_mistake_is_named(make, error, said):
    with pytest.raises(Exception, match=said) as raised:
        make()
    assert type(raised.value).__name__ == error


def test_memory_that_cannot_be_pinned_is_said_once_and_done_without(caplog):
    host = storages.HostMemory(pin=True, warn=lambda why: logging.getLogger("test").warning("not pinned: %s", why))
    kept = storages.survey([("a", torch.ones(10), True)], torch.device("cpu"))
    if torch.cuda.is_available():
        pytest.skip("here memory can be pinned")
    for _ in range(2):
        storages.copy_out(kept, host)
        assert kept[0].host[0].view(torch.float32).sum() == 10
        host.free()
    assert len(caplog.records) == 1


# ---- in a job -------------------------------------------------------------------------------------------------------


class Communicator:
    """A process group's backend, as far as it is asked to free what it keeps."""

    def __init__(self, log, name, *, fails=""):
        self.log, self.name, self.fails = log, name, fails

    def suspend(self):
        self._do("suspend")

    def resume(self):
        self._do("resume")

    def _do(self, what):
        if self.fails == what:
            raise RuntimeError(f"Backend {self.name} does not support {what}")
        self.log.append(f"{what} {self.name}")


@pytest.fixture
def groups(monkeypatch):
    """Communicators of two process groups, and what was asked of them."""
    log = []
    made = [Communicator(log, "one"), Communicator(log, "two")]
    monkeypatch.setattr(communicators, "_backends", lambda device: iter(made))
    return made, log


def test_communicators_are_suspended_before_anything_is_moved_and_resumed_when_all_is_back(groups, monkeypatch):
    _, log = groups
    model, _ = trained()
    state = TorchState(model=model, communicators="suspend")
    for what in ("copy_out", "copy_in"):
        does = getattr(storages, what)
        monkeypatch.setattr(storages, what, lambda *args, does=does, what=what: (log.append(what), does(*args)))
    state.park()
    state.load()
    assert log == ["suspend one", "suspend two", "copy_out", "copy_in", "resume one", "resume two"]


def test_a_park_whose_communicators_cannot_be_suspended_has_moved_nothing(groups):
    made, log = groups
    made[1].fails = "suspend"
    model, _ = trained()
    before = bits_of(model)
    state = TorchState(model=model, communicators="suspend")
    with pytest.raises(TorchStateError, match=r"two does not support suspend; .*communicators=\"keep\""):
        state.park()
    assert log == ["suspend one", "resume one"]
    assert (state.place, same_bits(before, bits_of(model))) == ("loaded", True)


def test_a_park_without_host_memory_resumes_what_it_had_suspended(groups, monkeypatch):
    _, log = groups
    monkeypatch.setattr(storages, "copy_out", raising)
    with pytest.raises(TorchStateError, match="do not go to host memory"):
        TorchState(model=trained()[0], communicators="suspend").park()
    assert log == ["suspend one", "suspend two", "resume one", "resume two"]


def raising(*_):
    raise RuntimeError("no host memory")


def test_a_load_whose_communicators_do_not_come_back_is_no_load_and_may_be_told_again(groups):
    made, log = groups
    made[1].fails = "resume"
    model, _ = trained()
    before = bits_of(model)
    state = TorchState(model=model, communicators="suspend")
    state.park()
    with pytest.raises(RuntimeError, match="resume"):
        state.load()
    assert state.place == "parked"
    assert {tensor.untyped_storage().nbytes() for tensor in all_tensors(model)} == {0}
    made[1].fails = ""
    state.load()
    assert log[2:] == ["resume one", "resume two"]
    assert same_bits(before, bits_of(model))


def test_communicators_that_this_torch_cannot_suspend_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(communicators, "supported", lambda: False)
    with pytest.raises(ValueError, match=r"cannot suspend them .*residual_gb"):
        TorchState(model=trained()[0], communicators="suspend")


def test_groups_over_gloo_keep_nothing_on_a_device_and_are_left_alone(tmp_path):
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        state = TorchState(model=trained()[0], communicators="suspend")
        state.park()
        state.load()
        distributed.barrier()
        (group,) = distributed.distributed_c10d._world.pg_map
        # What is asked of NCCL's is there in this torch, and gloo says no.
        with pytest.raises(RuntimeError, match="gloo does not support suspend"):
            group._get_backend(torch.device("cpu")).suspend()
    finally:
        distributed.destroy_process_group()


def test_as_hooks_of_a_job_it_moves_for_its_pool():
    class Job:
        def __init__(self):
            self.hooks = {}

        def __getattr__(self, kind):
            return lambda hook, pool: self.hooks.setdefault((kind, pool), hook)

    job, weights = Job(), torch.ones(10)
    state = TorchState(weights=weights).attach(job, pool="train")
    for kind, place in (("park", "parked"), ("load", "loaded"), ("discard", "gone")):
        job.hooks[f"on_{kind}", "train"](object())
        assert state.place == place


def test_what_a_workload_imports_brings_nothing_of_the_daemon():
    code = (
        "import sys, rollmuxd_channel.torch_state\n"
        "print([name for name in ('anyio', 'rollmuxd', 'msgspec', 'starlette') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


SHARDED = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from rollmuxd_channel.torch_state import TorchState

def sharded(model, how):
    if how == "flat":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        flat = model._handle.flat_param
        return model, lambda: [flat._local_shard, flat._full_param_padded]
    if how == "blocks":
        fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    shards = [parameter.to_local() for parameter in model.parameters()]
    return model, lambda: shards

def trained(how, parks):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    model, shards = sharded(model, how)
    adam = torch.optim.Adam(model.parameters())
    state = TorchState(model=model, adam=adam)
    made = []
    for _ in range(3):
        model(torch.randn(8, 16)).square().mean().backward()
        adam.step()
        adam.zero_grad()
        with torch.no_grad():  # after which the outermost module has all of its parameters
            made.append(model(torch.randn(8, 16)))
        if parks:
            parked = state.park()
            assert [shard.untyped_storage().nbytes() for shard in shards()] == [0] * len(shards())
            assert state.load() == parked > 5_000
    return made

pid = os.fork()
rank = int(not pid)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
for how in ("blocks", "root", "flat"):
    same = [torch.equal(one, other) for one, other in zip(trained(how, False), trained(how, True), strict=True)]
    os.write(1, f"rank {rank} {how}: {all(same)}\\n".encode())
dist.barrier()
dist.destroy_process_group()
if pid:
    sys.exit(os.waitpid(pid, 0)[1])
"""


@pytest.mark.slow
def test_shards_of_fsdp_are_parked_also_after_a_forward_alone_and_train_on_as_if_nothing_had_been(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    # (torch imports _dynamo later: here it is done once for both ranks)
    imported = ("torch.distributed.tensor", "torch._dynamo")
    command = [sys.executable, "-c", SHARDED, str(tmp_path / "store")]
    ran = forked.run(command, capture_output=True, text=True, timeout=PATIENCE_S, imported=imported)
    said = [f"rank {rank} {how}: True" for rank in (0, 1) for how in ("blocks", "flat", "root")]
    assert sorted(ran.stdout.splitlines()) == said, ran.stderr
