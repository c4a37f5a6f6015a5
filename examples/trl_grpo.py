"""Two TRL runs on the GPUs of one: ordinary GRPO scripts, each with one line changed.

    python examples/trl_grpo.py --task high & python examples/trl_grpo.py --task same

The line is the import of `GRPOTrainer`. Everything else is as TRL has it; `rollmux=` says what could also be left to
the defaults. Model and tokenizer are made on the spot, so no network and no GPU is needed. The weights at the end are
the same with a daemon and without one, in company and alone: their checksum is printed last.
"""

import argparse
import hashlib
import os
import string

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig

from rollmuxd_hook_trl import GRPOTrainer  # was: from trl import GRPOTrainer


def high(completions: list[str], **_: object) -> list[float]:
    """The more high digits, the better."""
    return [sum(digit in "789" for digit in text) / 8 for text in completions]


def same(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """The more often the digit that was asked for, the better."""
    return [text.count(prompt[0]) / 8 for prompt, text in zip(prompts, completions, strict=True)]


TASKS = {"high": high, "same": same}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per digit."""
    words = ["<pad>", "<end>", *string.digits, "="]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<end>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def model(seed: int, width: int, words: int) -> LlamaForCausalLM:
    """A small one, with random weights."""
    set_seed(seed)
    shape = dict(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=words, pad_token_id=0, eos_token_id=1, bos_token_id=None, **shape))


def trainer(
    task: str, out: str, *, seed: int = 1, width: int = 32, kind: type = GRPOTrainer, **more: object
) -> GRPOTrainer:
    """A run of a task; ``more`` goes to GRPOConfig, and to the trainer what that knows of."""
    words = tokenizer()
    ours = {key: more.pop(key) for key in ("rollmux", "callbacks", "eval_dataset", "rollout_func") if key in more}
    settings = dict(
        output_dir=out, seed=seed, use_cpu=not torch.cuda.is_available(), bf16=False, learning_rate=3e-3, beta=0.0,
        per_device_train_batch_size=8, num_generations=8, max_completion_length=8, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_steps=5, run_name=f"trl-{task}",
    )  # fmt: skip
    return kind(
        model=model(seed, width, len(words)),
        reward_funcs=TASKS[task],
        args=GRPOConfig(**{**settings, **more}),
        train_dataset=Dataset.from_dict({"prompt": [f"{digit}=" for digit in string.digits] * 8}),
        processing_class=words,
        **ours,
    )


def digest(of: torch.nn.Module) -> str:
    """A checksum of the weights."""
    told = hashlib.sha256()
    for tensor in of.state_dict().values():
        told.update(tensor.cpu().contiguous().numpy().tobytes())
    return told.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="high")
    parser.add_argument("--name", help="the job's name (trl-TASK)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--out", default="trl-out", help="where checkpoints go")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (0: none)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, in place of who had it")
    parser.add_argument("--parking", action="store_true", help="park the weights on CPUs too, where it frees nothing")
    parser.add_argument("--split", action="store_true", help="a pool for each phase, which only CPUs allow")
    asked = parser.parse_args()
    if asked.steps < 1:
        parser.error(f"--steps is {asked.steps}, and it is at least 1")
    if asked.width < 2 or asked.width % 2:
        parser.error(f"--width is {asked.width}, and it is a multiple of 2, the attention heads")
    torch.set_num_threads(1)  # the same bits with any number of cores
    rollmux = dict(name=asked.name or f"trl-{asked.task}", train=dict(nodes=1), replace=asked.resume)
    if asked.parking:
        rollmux["parking"] = True
    if asked.split:
        rollmux["rollout"] = dict(nodes=1)
    saving = dict(save_strategy="steps", save_steps=asked.save_every) if asked.save_every else {}
    sizes = dict(seed=asked.seed, width=asked.width, max_steps=asked.steps)
    try:
        run = trainer(asked.task, asked.out, **sizes, rollmux=rollmux, **saving)
    except ValueError as error:
        parser.error(str(error))
    run.train(resume_from_checkpoint=asked.resume)
    print(f"{rollmux['name']}: weights {digest(run.model)}", flush=True)


if __name__ == "__main__":
    main()
