"""Models, questions and an oracle for the tests of evaluations."""

import string
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

pytest.importorskip("lm_eval", reason="needs the extra evals")

import pyarrow
import pyarrow.parquet
from lm_eval.api.model import LM

from fp4repro.evals import evaluate, mmlu_pro
from fp4repro.evals.model import EvalModel, wrap
from fp4repro.models import HybridModel, ModelConfig

ROOT = Path(__file__).parents[1]
SMOKE = ROOT / "configs" / "scales" / "smoke.yaml"
CPU = torch.device("cpu")
CATEGORIES = ("biology", "business", "chemistry", "computer science", "economics", "engineering", "health")
CATEGORIES += ("history", "law", "math", "other", "philosophy", "physics", "psychology")
TINY = {"pattern": "M-*-", "width": 32, "vocabulary": 384, "ffn_width": 64, "query_heads": 2, "kv_heads": 1}
TINY |= {"head_dim": 16, "mamba_heads": 2, "mamba_head_dim": 16, "state": 23, "chunk": 16}


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and one for a letter after a space, as real ones have."""
    merges = [("\u0120", letter) for letter in mmlu_pro.LETTERS]  # how the alphabet spells a space
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def tiny_model() -> EvalModel:
    """Our model, small and untrained, with a token a byte and room for 64."""
    module = HybridModel(ModelConfig.from_dict(TINY), generator=torch.Generator().manual_seed(0))
    return EvalModel("tiny", module, byte_tokenizer(), begin=300, end=300, context=64, device=CPU)


def tiny_llama() -> EvalModel:
    """A Hugging Face model of the same sort, which caches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128})
    config.update({"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 300})
    tokenizer = byte_tokenizer()
    tokenizer.eos_token_id, tokenizer.bos_token_id = 300, None
    return wrap("llama", LlamaForCausalLM(config), tokenizer, CPU)


class Oracle(LM):
    """Finds the continuation `wanted` likeliest wherever it is one, and writes that it is the answer."""

    def __init__(self, wanted: str):
        super().__init__()
        self.wanted = wanted

    def loglikelihood(self, requests, **_):
        return [(0.0 if r.args[1].strip() == self.wanted else -9.0, False) for r in requests]

    def loglikelihood_rolling(self, requests, **_):
        raise NotImplementedError

    def generate_until(self, requests, **_):
        return [f"It is plain. The answer is ({self.wanted})." for _ in requests]


def write_questions(folder: Path) -> Path:
    """A folder with 70 questions in the form of MMLU-Pro's, of 3 to 10 options, five a category."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(70):
        options = [f"option {number} {place}" for place in range(int(generator.integers(3, 11)))]
        answer = int(generator.integers(len(options)))
        category = CATEGORIES[number % 14]
        rows.append({"question_id": number, "question": f"What is {number}?", "options": options})
        rows[-1] |= {"answer": string.ascii_uppercase[answer], "answer_index": answer, "src": "here"}
        rows[-1] |= {"category": category, "cot_content": f"A: Let's think step by step. Aha {number}."}
    for split in ("test", "validation"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


def ask(lm, asked, limit=None):
    lm.model = type("Anything", (), {"device": CPU}) if not hasattr(lm, "model") else lm.model
    return evaluate.ask(lm, asked, limit)
