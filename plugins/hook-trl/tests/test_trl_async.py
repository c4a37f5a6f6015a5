"""The real AsyncGRPOTrainer of the installed TRL, on a tiny model: where its slots are, and that they change no bit.

TRL itself takes a rollout worker and a way for weights from outside; here both are threads and lists of this process.
Attention on a GPU's kernel is computed by torch. The fake daemon grants at once.
"""

import importlib.util
import queue
import threading
import warnings

import pytest

# Looked for only: each of pytest's workers reads this file, and one or two of them need torch and TRL.
if importlib.util.find_spec("trl") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("TRL is not installed: pip install 'trl>=1.16,<1.17'", allow_module_level=True)

import numpy as np
from patience import PATIENCE_S

from rollmuxd.testing import fake_daemon

pytestmark = [pytest.mark.filterwarnings("ignore")]

SAMPLES, STEPS = 4, 3


def setup_module():
    global torch  # noqa: PLW0603
    import torch


def attention(query, key, value, starts, path_starts, *_, softmax_scale, causal, window_size):
    """What the kernel computes: each segment's queries attend to the path that ends with it."""
    out = torch.empty_like(query)
    for number in range(len(starts) - 1):
        mine = slice(int(starts[number]), int(starts[number + 1]))
        path = slice(int(path_starts[number]), int(path_starts[number + 1]))
        mask = torch.ones(mine.stop - mine.start, path.stop - path.start, dtype=torch.bool)
        mask = mask.tril(mask.shape[1] - mask.shape[0])
        scores = torch.einsum("qhd,khd->hqk", query[mine], key[path]) * softmax_scale
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        out[mine] = torch.einsum("hqk,khd->qhd", weights, value[path])
    return out


class Worker:
    """In place of TRL's AsyncRolloutWorker: makes samples all the time, as many as the queue takes."""

    def __init__(self, enough=None):
        self.rollout_buffer, self.metrics_queue = Looked(4 * SAMPLES), queue.Queue()
        self.version, self.made, self.enough = 0, 0, enough
        self.made_one = threading.Semaphore(0)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.make)

    def start(self):
        self.thread.start()

    def stop(self):
        self.stopped.set()
        if self.thread.is_alive():
            self.thread.join()

    def update_model_version(self, version):
        self.version = version

    def check_health(self, stale_after_s):
        if self.made == self.enough:
            raise RuntimeError("no more samples")

    def make(self):
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        while not self.stopped.is_set() and self.made != self.enough:
            chance = np.random.default_rng(self.made)
            sample = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=chance.integers(2, 12, 6),
                completion_mask=np.array([0, 0, 1, 1, 1, 1]),
                old_log_probs=np.full(6, -2.5, dtype=np.float32),
                advantage=float(chance.normal()),
                model_version=self.version,
                group_id=self.made // 2,
                metrics={},
            )
            while not self.stopped.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=0.05)
                except queue.Full:
                    continue
                self.made += 1
                self.made_one.release()
                break


class Weights:
    """In place of the way to a vLLM server: writes down which phase was held."""

    def __init__(self):
        self.held, self.sent = lambda: None, []

    def init_weight_transfer(self): ...

    def pause(self): ...

    def send_weights(self, tensors):
        assert all(tensor.isfinite().all() for _, tensor in tensors)
        self.sent.append(self.held())

    def resume(self): ...

    def destroy(self): ...


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model on disk, as TRL wants it, and its tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    words = ["<pad>", "<end>", *map(str, range(10))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokens = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", padding_side="left")
    path = str(tmp_path_factory.mktemp("model"))
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(1)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=12, pad_token_id=0, eos_token_id=1, bos_token_id=None, **shape)
    ).save_pretrained(path)
    tokens.save_pretrained(path)
    yield path, tokens
    torch.set_num_threads(threads)


@pytest.fixture
def make(tiny, tmp_path, monkeypatch):
    """What makes a trainer, by the hook or by TRL alone."""
    for name in ("URL", "SOCKET", "API_KEY", "REQUIRED", "JOB", "RUN_KEY"):
        monkeypatch.delenv(f"ROLLMUX_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing

        from rollmuxd_hook_trl import AsyncGRPOTrainer
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(
        packing, "_flash_attn", lambda: type("Kernel", (), dict(flash_attn_varlen_func=staticmethod(attention)))
    )
    workers = []

    def make(kind=AsyncGRPOTrainer, worker=None, rollmux=None, **more):
        workers.append(worker or Worker())
        settings = dict(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            token_budget=0,
            per_device_train_batch_size=SAMPLES // 2,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            learning_rate=1e-2,
            max_staleness=1_000,
            run_name="math",
        )
        weights = Weights()
        ours = {} if rollmux is None else {"rollmux": rollmux}
        made = kind(
            model=tiny[0],
            args=AsyncGRPOConfig(**{**settings, **more}),
            processing_class=tiny[1],
            train_dataset=Dataset.from_dict({"prompt": ["1"] * 64}),
            rollout_worker=workers[-1],
            weight_transfer=weights,
            **ours,
        )
        weights.held = lambda: made._turns.current if hasattr(made, "_turns") else None
        return made, weights

    yield make
    for worker in workers:
        worker.stop()


@pytest.fixture
def daemon():
    with fake_daemon() as fake:
        yield fake


def bits(made):
    return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}


def alone(make, **more):
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    made, _ = make(AsyncGRPOTrainer, **more)
    made.train()
    return bits(made)


class Looked(queue.Queue):
    """Knows which phase was held when the loop asked for a sample."""

    def __init__(self, room):
        super().__init__(room)
        self.held, self.asked = lambda: None, set()

    def get(self, *args, **options):
        self.asked.add(self.held())
        return super().get(*args, **options)


@pytest.mark.parametrize(
    "more",
    [
        dict(),
        dict(token_budget=12),
        dict(weight_sync_steps=2),
        dict(save_strategy="steps", save_steps=1, save_only_model=True),
    ],
    ids=["fixed", "by_tokens", "sent_less_often", "saved"],
)
def test_a_step_and_its_weights_are_one_slot_and_not_a_bit_is_different(make, daemon, more):
    made, weights = make(**more)
    made.rollout_queue.held = weights.held
    before = bits(made)
    made.train()
    assert daemon.phases == ["init", "init", *["train"] * STEPS]
    assert daemon.ended == {"math": "finished"}
    assert weights.sent == ["init", *["train"] * (STEPS // more.get("weight_sync_steps", 1))]
    assert made.rollout_queue.asked == {None}, "it waits for its own rollouts while it holds a slot"
    (body,) = daemon.registered
    assert [(phase.name, phase.pools) for phase in body.phases] == [("train", ["train"])]
    assert body.asynchronous is not None
    after, same = bits(made), alone(make, **more)
    assert any((before[name] != after[name]).any() for name in after)
    assert all(torch.equal(after[name], same[name]) for name in same)


def test_samples_are_made_while_it_waits_for_a_slot_and_parked_it_is_the_same(make, daemon):
    made, _ = make(rollmux=dict(parking=True))
    for tensor in made.model.parameters():  # (on a CPU they lie in the mapped file, which cannot be parked)
        tensor.data = tensor.data.clone()
    go, moved = made._turns.go, []

    def another_job_first(phase):
        if phase == "train" and made._turns.current is None:
            assert daemon.result_of(daemon.order("park", "train")).ok
            moved.append({tensor.untyped_storage().nbytes() for tensor in made.model.parameters()})
            for _ in range(SAMPLES):
                assert made.rollout_worker.made_one.acquire(timeout=PATIENCE_S)
            assert daemon.result_of(daemon.order("load", "train", warm=True)).ok
        go(phase)

    made._turns.go = another_job_first
    made.train()
    assert moved == [{0}] * STEPS
    after, same = bits(made), alone(make)
    assert all(torch.equal(after[name], same[name]) for name in same)


def test_where_weights_cannot_be_sent_the_slot_is_given_back_and_the_job_ends_with_that(make, daemon):
    made, weights = make()
    send = weights.send_weights

    def fails(tensors):
        send(tensors)
        if weights.sent[-1] == "train":
            raise ConnectionError("the server is gone")

    weights.send_weights = fails
    with pytest.raises(ConnectionError, match="the server is gone"):
        made.train()
    assert daemon.ended == {"math": "failed: ConnectionError: the server is gone"}
    assert daemon.phases == ["init", "init", "train"]
    assert len([call for call in daemon.calls if call.path.endswith("/release")]) == 3
    assert made.rollout_worker.stopped.is_set()


def test_rollouts_that_have_failed_end_the_job_while_it_holds_no_slot(make, daemon, monkeypatch):
    worker = Worker(enough=SAMPLES)
    made, _ = make(worker=worker)
    load = made.get_train_dataloader

    def impatient():
        loader = load()
        made._rollout_dataset.poll_interval_s = 0.01
        return loader

    monkeypatch.setattr(made, "get_train_dataloader", impatient)
    with pytest.raises(RuntimeError, match="no more samples"):
        made.train()
    assert daemon.phases == ["init", "init"]
    assert daemon.ended["math"].startswith("failed: RuntimeError: no more samples")


@pytest.mark.parametrize(
    ("rollmux", "said"),
    [
        (dict(rollout=dict(nodes=1)), "this run generates on GPUs of its own, so give train= only"),
        (dict(gateway="http://127.0.0.1:1"), "this run has no phase rollout that joins it, only train; leave it out"),
        (dict(movable="warm"), "load their state where it was, and cannot on other GPUs"),
    ],
    ids=["rollout", "gateway", "movable"],
)
def test_what_an_asynchronous_run_cannot_keep_is_refused_before_anything_is_sent(make, daemon, rollmux, said):
    with pytest.raises(ValueError, match=said):
        make(rollmux=rollmux)
    assert daemon.calls == []


def test_a_trainer_that_hides_where_batches_come_from_is_refused(make):
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    from rollmuxd_hook_trl import SharingAsync, UnknownTrl

    class Own(AsyncGRPOTrainer):
        def get_train_dataloader(self):
            return []

    with pytest.raises(UnknownTrl, match=r"Own\.get_train_dataloader takes the place of AsyncGRPO's"):
        type("Shared", (SharingAsync, Own), {})


def test_without_a_daemon_nothing_is_different(make, capfd, monkeypatch):
    monkeypatch.setattr("rollmuxd.client.runtime._said_alone", False)
    made, _ = make()
    made.train()
    after, same = bits(made), alone(make)
    assert all(torch.equal(after[name], same[name]) for name in same)
    assert "no daemon" in capfd.readouterr().err
