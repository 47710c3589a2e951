"""Evaluations: the scoring against known answers, and forward passes that are shared."""

import math
import os
import string
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra evals")

import pyarrow
import pyarrow.parquet
from evals_cases import CPU, Oracle, ask, tiny_llama, tiny_model, write_questions

from fp4repro.data.documents import Document
from fp4repro.errors import Fp4ReproError
from fp4repro.evals import evaluate, heldout, mmlu_pro
from fp4repro.evals.adapter import Adapter
from fp4repro.evals.arithmetic import arithmetic
from fp4repro.evals.model import wrap


@pytest.fixture
def tiny(eager):
    return tiny_model()


@pytest.fixture
def llama():
    return tiny_llama()


@pytest.fixture
def parquet(tmp_path):
    return write_questions(tmp_path)


@pytest.mark.parametrize("letter", "ACJ")
def test_a_fixed_answer_scores_the_exact_share_of_its_letter(parquet, letter):
    rows = pyarrow.parquet.read_table(parquet / "test.parquet").to_pylist()
    share = sum(row["answer"] == letter for row in rows) / len(rows)
    got = ask(Oracle(letter), [mmlu_pro.letters_task(str(parquet))])["results"]["mmlu_pro_letters"]
    # A question without the letter has its likelihoods all equal: the first option is taken.
    short = [r for r in rows if len(r["options"]) <= string.ascii_uppercase.index(letter)]
    share += sum(row["answer"] == "A" for row in short) / len(rows)
    assert got["acc,none"] == pytest.approx(share, abs=1e-12)
    assert 0 < share < 1 or letter == "J"


def test_the_whole_benchmark_and_one_letter():
    data = os.environ.get("FP4REPRO_DATA")
    if not data or not (Path(data) / "mmlu_pro" / "test.parquet").is_file():
        pytest.skip("FP4REPRO_DATA names no folder with mmlu_pro/test.parquet")
    rows = pyarrow.parquet.read_table(Path(data) / "mmlu_pro" / "test.parquet").to_pylist()
    assert len(rows) == 12032
    chance = np.mean([1 / len(row["options"]) for row in rows])
    assert chance == pytest.approx(0.1109, abs=5e-5)
    sample = [rows[i * len(rows) // 300] for i in range(300)]
    results = ask(Oracle("A"), [mmlu_pro.letters_task("local")], 300)
    share = sum(row["answer"] == "A" for row in sample) / 300
    assert results["results"]["mmlu_pro_letters"]["acc,none"] == pytest.approx(share, abs=1e-12)


def test_an_oracle_of_right_answers_is_always_right():
    documents = [Document("a", " ".join(f"word{i}" for i in range(2000)))]
    (question, *_) = questions = heldout.cloze_questions(documents)
    assert len(questions) == 2000 // 56 and questions == heldout.cloze_questions(documents)
    for question in questions:
        gold = question["options"][question["answer"]]
        assert f"{question['text']} {gold}" in documents[0].text
        assert len(set(question["options"])) == heldout.OPTIONS == 10
        assert all(option in documents[0].text for option in question["options"])
    assert len({question["answer"] for question in questions}) > 5  # its place says nothing
    gold = questions[3]["options"][questions[3]["answer"]]
    got = ask(Oracle(gold), [heldout.cloze_task(documents)])["samples"]["heldout_cloze"]
    right = [sample["acc"] for sample in got]
    assert right[3] == 1.0 and sum(right) < len(right)


def test_too_little_text_for_a_cloze_is_a_sentence():
    with pytest.raises(Fp4ReproError, match=r"raise corpus_bytes\.validation"):
        heldout.cloze_questions([Document("a", "too short " * 40)])


def brute(model, prefix: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Log likelihood by one whole pass, token after token."""
    whole = torch.tensor([prefix + continuation])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model.module(whole)
    logits = getattr(out, "logits", out)[0].double().log_softmax(-1)
    places = range(len(prefix) - 1, len(prefix) + len(continuation) - 1)
    total = sum(logits[i, t].item() for i, t in zip(places, continuation, strict=True))
    return total, all(logits[i].argmax() == t for i, t in zip(places, continuation, strict=True))


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_shared_passes_score_as_whole_ones(name, request):
    model = request.getfixturevalue(name)
    generator = np.random.default_rng(1)
    prefix = generator.integers(256, size=20).tolist()
    tails = [generator.integers(256, size=n).tolist() for n in (1, 1, 5, 9)]
    asked = [(("", ""), prefix, tail) for tail in tails] + [(("", ""), prefix[:3], tails[2])]
    got = Adapter(model)._loglikelihood_tokens(asked, disable_tqdm=True)
    for (_, before, tail), (value, greedy) in zip(asked, got, strict=True):
        wanted, is_greedy = brute(model, before, tail)
        assert value == pytest.approx(wanted, abs=0.02 * len(tail))  # BF16: other shapes, other sums
        assert greedy == is_greedy


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_letters_share_one_forward_pass(name, request, parquet):
    model = request.getfixturevalue(name)
    passes = []
    model.module.register_forward_hook(lambda *_: passes.append(1))
    model.context = 10_000
    ask(Adapter(model), [mmlu_pro.letters_task(str(parquet))], 7)
    assert len(passes) == 7
    passes.clear()
    ask(Adapter(model), [mmlu_pro.cloze_task(str(parquet))], 7)
    assert len(passes) == (14 if model.caches else 7)  # the prefix once, then all options


def test_the_head_multiplies_in_fp32(tiny):
    before = tiny.module.head.weight.detach().clone()
    (logits,) = tiny.logits([1, 2, 3], [[4, 5]])
    assert logits.dtype == torch.float32 and logits.shape == (3, 384)
    assert not torch.equal(logits, logits.bfloat16().float())
    assert torch.equal(before, tiny.module.head.weight)


def test_a_long_text_loses_its_beginning_and_a_long_answer_keeps_one_token(tiny):
    tokens = list(range(200))
    (short,) = tiny.logits(tokens, [[7, 8]])
    (again,) = tiny.logits(tokens[-62:], [[7, 8]])
    assert torch.equal(short, again)
    (long,) = tiny.logits(tokens, [list(range(100))])
    assert long.shape == (101, 384)


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_greedy_text_is_the_likeliest_each_time(name, request):
    model = request.getfixturevalue(name)
    got = list(model.greedy([1, 2, 3], 5))
    tokens = [1, 2, 3]
    for _ in range(5):
        tokens.append(int(model.logits(tokens, [[]])[0][-1].argmax()))
    assert got == tokens[3:]


def test_running_text_is_scored_whole(tiny):
    text = "So foul a sky clears not without a storm. " * 5
    request = type("Request", (), {"args": (text,)})
    (total,) = Adapter(tiny).loglikelihood_rolling([request], disable_tqdm=True)
    tokens = tiny.encode(text)
    wanted, previous = 0.0, [300]
    for start in range(0, len(tokens), 64):
        piece = tokens[start : start + 64]
        wanted += brute(tiny, previous, piece)[0]
        previous = [piece[-1]]
    assert total == pytest.approx(wanted, rel=0.01)


def test_arithmetics_differ_and_bf16_is_left_alone(tiny):
    import fp4repro

    scores = {}
    for name in ("bf16", "fp8", "mxfp4", "nvfp4", "nvfp4+rht", "four-over-six", "four-over-six+rht", "bf16"):
        recipe = arithmetic(name).replace(keep=fp4repro.KeepBF16())
        fp4repro.convert(tiny.module, recipe)
        value = tiny.logits(list(range(40)), [[1, 2]])[0].sum().item()
        assert scores.setdefault(name, value) == value
    assert len(set(scores.values())) == len(scores) == 7


@pytest.mark.parametrize("name", ["nvfp5", "nvfp4+rth", "bf16+rht"])
def test_an_unknown_arithmetic_is_a_sentence(name):
    with pytest.raises(Fp4ReproError, match=r"nvfp5|rth|quantises nothing"):
        arithmetic(name)


def test_taking_the_transform_out_changes_no_bit_and_putting_it_on_fprop_does(tiny):
    import fp4repro

    scores = []
    for recipe in (arithmetic("nvfp4"), arithmetic("nvfp4").replace(hadamard=()), arithmetic("nvfp4+rht")):
        fp4repro.convert(tiny.module, recipe.replace(keep=fp4repro.KeepBF16()))
        scores.append(tiny.logits(list(range(40)), [[1, 2]])[0])
    assert torch.equal(scores[0], scores[1]) and not torch.equal(scores[0], scores[2])


def test_bits_are_of_log_likelihoods():
    sample = {"doc_id": 3, "doc": {}, "arguments": [()], "bits_per_byte": (-3 * math.log(2), 4)}
    ((*_, value, weight, chance),) = evaluate.answers({"t": [sample]}, {"t": ["bits_per_byte"]})
    assert value == pytest.approx(3.0) and weight == 4 and chance is None


def test_a_model_without_an_end_of_text_is_a_sentence(llama):
    llama.tokenizer.eos_token_id = llama.module.config.eos_token_id = None
    with pytest.raises(Fp4ReproError, match=r"^llama has no eos_token_id"):
        wrap("llama", llama.module, llama.tokenizer, CPU)
