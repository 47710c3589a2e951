"""A tiny Llama with random weights, saved as transformers saves a model, and its tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_llama(folder: Path, blocks: int = 2, width: int = 64) -> Path:
    """Byte-level vocabulary of 256; `width` 64, FFN of 96, `blocks` blocks of seven linears each."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder
