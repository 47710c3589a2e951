# ruff: noqa: E402 (lm-eval is an extra)
"""Evaluations: the scoring against known answers, shared forward passes, and no hub where data is local."""

import json
import math
import os
import re
import socket
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra evals")

import pyarrow
import pyarrow.parquet
from lm_eval.api.model import LM
from tiny import save_llama

from fp4repro.config import load_scale
from fp4repro.data.documents import Document
from fp4repro.errors import Fp4ReproError
from fp4repro.evals import __main__ as stage
from fp4repro.evals import evaluate, heldout, mmlu_pro, tasks
from fp4repro.evals.adapter import Adapter
from fp4repro.evals.arithmetic import arithmetic
from fp4repro.evals.model import EvalModel, wrap
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.pretrained import Unavailable
from fp4repro.report.evals import evals_rows
from fp4repro.report.questions import load_evaluations

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


@pytest.fixture
def tiny(eager):
    """Our model, small and untrained, with a token a byte and room for 64."""
    module = HybridModel(ModelConfig.from_dict(TINY), generator=torch.Generator().manual_seed(0))
    return EvalModel("tiny", module, byte_tokenizer(), begin=300, end=300, context=64, device=CPU)


@pytest.fixture
def llama():
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


@pytest.fixture
def parquet(tmp_path):
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
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
    return tmp_path


def ask(lm, asked, limit=None):
    lm.model = type("Anything", (), {"device": CPU}) if not hasattr(lm, "model") else lm.model
    return evaluate.ask(lm, asked, limit)


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


def refuse_the_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for module in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("letter", "BJ")
def test_the_official_form_scores_the_exact_share_of_a_fixed_letter(parquet, letter, monkeypatch):
    refuse_the_network(monkeypatch)
    rows = pyarrow.parquet.read_table(parquet / "test.parquet").to_pylist()
    share = sum(row["answer"] == letter for row in rows) / len(rows)
    results = ask(Oracle(letter), [mmlu_pro.official_task(str(parquet))])
    got = results["results"]["mmlu_pro"]
    assert got["exact_match,custom-extract"] == pytest.approx(share, abs=1e-12)
    assert len(results["samples"]) == 14 and sum(map(len, results["samples"].values())) == 70
    answers = list(evaluate.answers(results["samples"], evaluate.metrics_of(results)))
    assert sum(value for *_, value, _, _ in answers) == pytest.approx(70 * share)
    assert {chance for *_, chance in answers} == {1 / len(row["options"]) for row in rows}


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_a_model_writes_the_official_form(name, request, parquet, monkeypatch):
    refuse_the_network(monkeypatch)
    model = request.getfixturevalue(name)
    group = mmlu_pro.official_task(str(parquet))
    for task in group.get_all_tasks():
        # Five examples of one token a byte do not fit; 2048 new tokens an untrained model would all write.
        task.config.generation_kwargs["max_gen_toks"] = 8
    (sample,) = ask(Adapter(model), [group], 1)["samples"]["mmlu_pro_law"]
    (written,), (_, settings) = sample["resps"][0], sample["arguments"][0]
    assert "Question:" in settings["until"] and sample["exact_match"] == 0
    prompt = model.encode(sample["arguments"][0][0])
    assert written == model.decode(list(model.greedy(prompt, 8))).partition("Question:")[0]


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


def test_ours_and_lm_evals_figures_agree(tiny, parquet, tmp_path):
    documents = [Document("a", "\n".join(f"line {i} of a text {i * i}" for i in range(900)))]
    asked = [
        heldout.cloze_task(documents),
        heldout.text_task(documents),
        mmlu_pro.letters_task(str(parquet)),
        mmlu_pro.cloze_task(str(parquet)),
    ]
    about = {"scale": "s", "device": "d", "torch": "t", "commit": "c", "recipes": [], "not_run": {}}
    evaluate.evaluate_model(tiny, ["bf16", "nvfp4"], asked, 6, tmp_path / "out", about)
    got = load_evaluations([tmp_path / "out"])
    assert [arm[1] for arm in got.found] == ["bf16", "nvfp4"]
    checked = 0
    for (_, recipe), answers in got.found.items():
        theirs = json.loads((tmp_path / "out" / "lm_eval" / f"{recipe}.json").read_text())["results"]
        for (task, metric), answer in answers.items():
            assert len(answer.questions) == 6
            assert theirs[task][f"{metric},none"] == pytest.approx(answer.figure, rel=1e-12)
            checked += 1
    assert checked == 2 * (3 + 2 + 3 + 2)


@pytest.mark.parametrize("file", ["questions.csv", "lm_eval/bf16.json"])
def test_one_digit_in_either_file_and_they_agree_no_more(tiny, parquet, tmp_path, file):
    about = {"scale": "s", "device": "d", "torch": "t", "commit": "c", "recipes": [], "not_run": {}}
    evaluate.evaluate_model(tiny, ["bf16"], [mmlu_pro.letters_task(str(parquet))], 6, tmp_path, about)
    assert load_evaluations([tmp_path]).quantised == {("tiny", "bf16"): (0, "of 11 linears")}
    path = tmp_path / file
    text = path.read_text()
    # The bits of the first question, or their sum over all: the eighth digit.
    place = re.search(r"gold_bits_per_byte,(none\": )?\d+\.\d{7}", text).end() - 1
    path.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])
    with pytest.raises(Fp4ReproError, match=r"bf16\.json: mmlu_pro_letters, gold_bits_per_byte of tiny is"):
        load_evaluations([tmp_path])


def run_stage(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fp4repro.evals", *map(str, arguments)])
    stage.main()


def test_a_pretrained_model_on_local_data_never_asks_the_hub(parquet, tmp_path, monkeypatch, capsys, eager):
    refuse_the_network(monkeypatch)
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    model, out = save_llama(tmp_path / "llama"), tmp_path / "out"
    options = ["--recipe", "bf16", "nvfp4", "--limit", 4, "--mmlu-pro", parquet, "--out", out]
    asked = ["mmlu_pro_letters", "mmlu_pro_cloze", "heldout_cloze", "heldout_text"]
    run_stage(monkeypatch, model, *options, "--scale", SMOKE, "--tasks", *asked)
    got = load_evaluations([out])
    assert [recipe for _, recipe in got.found] == ["bf16", "nvfp4"] and not got.missing
    first = got.found[str(model), "bf16"]
    assert list(dict.fromkeys(task for task, _ in first)) == asked
    bits, words = first["heldout_text", "bits_per_byte"], first["heldout_text", "word_perplexity"]
    assert words.figure == pytest.approx(2 ** (bits.values.sum() / words.weights.sum()))
    printed = capsys.readouterr().out
    assert f"{words.figure:.2f} [" in printed and "not different from chance" in printed
    assert "taking it out of `nvfp4` changes nothing here" in printed


def test_a_model_that_cannot_be_had_gives_rows_that_say_so(tmp_path, monkeypatch, capsys, eager):
    def missing(name, _):
        raise Unavailable(f"{name} is far away")

    monkeypatch.setattr("fp4repro.evals.model.load_model", missing)
    arguments = ["far/model", "--scale", SMOKE, "--tasks", "heldout_text", "--recipe", "bf16", "fp8"]
    with pytest.raises(Unavailable):
        run_stage(monkeypatch, *arguments, "--out", tmp_path)
    run_stage(monkeypatch, *arguments, "--out", tmp_path, "--if-available")
    (row, other) = evals_rows(load_evaluations([tmp_path]))
    assert row.value is None and row.note == "not run: far/model is far away"
    assert (row.setting, other.setting) == ("far/model in bf16", "far/model in fp8")
    assert capsys.readouterr().out.count("far/model: not run: far/model is far away.") == 1


def test_taking_the_transform_out_changes_no_bit_and_putting_it_on_fprop_does(tiny):
    import fp4repro

    scores = []
    for recipe in (arithmetic("nvfp4"), arithmetic("nvfp4").replace(hadamard=()), arithmetic("nvfp4+rht")):
        fp4repro.convert(tiny.module, recipe.replace(keep=fp4repro.KeepBF16()))
        scores.append(tiny.logits(list(range(40)), [[1, 2]])[0])
    assert torch.equal(scores[0], scores[1]) and not torch.equal(scores[0], scores[2])


@pytest.mark.parametrize("error", [ConnectionError("no"), FileNotFoundError("no")])
def test_a_task_of_the_hub_without_the_hub_is_a_sentence(monkeypatch, error):
    def load(_):
        raise error

    monkeypatch.setattr(tasks, "_from_lm_eval", load)
    with pytest.raises(Fp4ReproError, match=r"^the questions of hellaswag come from the .* hub, which is"):
        tasks.load_tasks(["hellaswag"], load_scale(SMOKE), "local")


def test_the_official_definitions_run_on_local_files_without_any_network(parquet, monkeypatch):
    refuse_the_network(monkeypatch)
    with pytest.raises(AssertionError, match="a socket was opened"):
        socket.create_connection(("localhost", 9))
    group = mmlu_pro.official_task(str(parquet))
    assert len(list(group.get_all_tasks())) == 14
    biology = next(task for task in group.get_all_tasks() if task.task_name == "mmlu_pro_biology")
    biology.set_config("num_fewshot", 5)
    prompt = biology.fewshot_context(biology.eval_docs[0], 5)
    assert prompt.startswith("The following are multiple choice questions (with answers) about biology.")
    assert prompt.count("Let's think step by step.") == 6
    assert len(biology.eval_docs) == 5 and biology.OUTPUT_TYPE == "generate_until"
    letters = mmlu_pro.letters_task(str(parquet))
    assert len(letters.eval_docs) == 70


def test_what_needs_the_hub():
    assert not tasks.needs_hub(["heldout_cloze", "mmlu_pro", "mmlu_pro_letters"], "local")
    assert not tasks.needs_hub(["mmlu_pro"], "/a/folder")
    assert tasks.needs_hub(["mmlu_pro"], "hub")
    assert tasks.needs_hub(["hellaswag"], "local")


def test_switching_the_hub_off_comes_before_anything_reads_it(monkeypatch):
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(variable, "0")
    tasks.switch_hub_off()
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
    # The stage may import neither before it has decided.
    code = (
        "import sys, fp4repro.evals.__main__; print({'datasets', 'lm_eval', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("source", ["local", "/nowhere"])
def test_questions_that_are_not_there_are_a_sentence(source, monkeypatch):
    monkeypatch.delenv("FP4REPRO_DATA", raising=False)
    with pytest.raises(Fp4ReproError, match=r"no local MMLU-Pro.*or say hub"):
        mmlu_pro.letters_task(source)


def test_the_papers_benchmarks_are_tasks_of_lm_eval():
    from lm_eval.tasks import TaskManager

    folder = Path(lm_eval.tasks.__file__).parent
    names = tasks.paper_tasks()
    assert len(names) == 14
    assert tasks.spelled_out(["mmlu_pro", "paper"])[:3] == ["mmlu_pro", "mmlu", "agieval_en"]
    assert len(tasks.spelled_out(["mmlu_pro", "paper"])) == 14
    # Indexing all of lm-eval takes half a minute: only the folders that the names can be in are read.
    places = ["mmlu/default", "mmlu_pro", "agieval", "gsm8k", "benchmarks", "global_mmlu/default/en"]
    places += ["mgsm", "humaneval", "mbpp", "arc", "hellaswag", "openbookqa", "piqa", "winogrande"]
    manager = TaskManager(include_path=[str(folder / p) for p in places], include_defaults=False)
    assert set(names.values()) <= set(manager.all_tasks)


def test_bits_are_of_log_likelihoods():
    sample = {"doc_id": 3, "doc": {}, "arguments": [()], "bits_per_byte": (-3 * math.log(2), 4)}
    ((*_, value, weight, chance),) = evaluate.answers({"t": [sample]}, {"t": ["bits_per_byte"]})
    assert value == pytest.approx(3.0) and weight == 4 and chance is None


def test_the_scales_name_what_they_evaluate():
    laptop = load_scale(ROOT / "configs" / "scales" / "laptop.yaml").evals
    assert laptop.models == (*laptop.runs.models, "smollm2-135m")
    assert {arithmetic(name).name for name in laptop.pretrained.recipes} >= {"nvfp4+rht", "four-over-six"}


def test_a_model_without_an_end_of_text_is_a_sentence(llama):
    llama.tokenizer.eos_token_id = llama.module.config.eos_token_id = None
    with pytest.raises(Fp4ReproError, match=r"^llama has no eos_token_id"):
        wrap("llama", llama.module, llama.tokenizer, CPU)
