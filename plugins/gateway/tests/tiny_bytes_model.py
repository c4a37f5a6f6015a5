"""A language model with a byte-level tokenizer that vLLM can serve: ``python tiny_bytes_model.py FOLDER``.

Random weights, four times as large as usual: with nearly flat logits a wrong token would often be the right one by
chance, or by rounding. Run by the Python that has vLLM.
"""

import sys
from pathlib import Path

VOCABULARY = 512
TEXT = [
    "The quick brown fox jumps over the lazy dog. ",
    "Grüße aus Köln und Zürich, où les élèves étudient. ",
    "x = (a + b) * c; return [i ** 2 for i in range(10)]\n",
    "0123456789 3.14159 2.71828 1.41421 ",
]


def make(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT * 50, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(4)
    model.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
