# ruff: noqa: E402 (lm-eval is an extra)
"""The stage of evaluations: lm-eval's own definitions and results, and no hub where data is local."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra evals")

import pyarrow
import pyarrow.parquet
from evals_cases import ROOT, SMOKE, Oracle, ask, tiny_llama, tiny_model, write_questions
from tiny import save_llama

from fp4repro.config import load_scale
from fp4repro.data.documents import Document
from fp4repro.errors import Fp4ReproError
from fp4repro.evals import __main__ as stage
from fp4repro.evals import evaluate, heldout, mmlu_pro, tasks
from fp4repro.evals.adapter import Adapter
from fp4repro.evals.arithmetic import arithmetic
from fp4repro.pretrained import Unavailable
from fp4repro.report.evals import evals_rows
from fp4repro.report.questions import load_evaluations


@pytest.fixture
def tiny(eager):
    return tiny_model()


@pytest.fixture
def llama():
    return tiny_llama()


@pytest.fixture
def parquet(tmp_path):
    return write_questions(tmp_path)


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


def test_the_scales_name_what_they_evaluate():
    laptop = load_scale(ROOT / "configs" / "scales" / "laptop.yaml").evals
    assert laptop.models == (*laptop.runs.models, "smollm2-135m")
    assert {arithmetic(name).name for name in laptop.pretrained.recipes} >= {"nvfp4+rht", "four-over-six"}
