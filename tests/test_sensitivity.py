"""Sensitivity of blocks on a tiny model one of whose blocks is made to suffer; commands and refusals."""

import sys
from pathlib import Path

import pytest
import torch
from tiny import save_llama

import fp4repro.report.__main__ as report
import fp4repro.sensitivity.__main__ as sensitivity
from fp4repro import KeepBF16, convert, recipe
from fp4repro.errors import Fp4ReproError
from fp4repro.fidelity import subject as subjects
from fp4repro.fidelity.subject import of_pretrained
from fp4repro.pretrained import Unavailable
from fp4repro.report import sensitivity_metrics as names
from fp4repro.report.fidelity_metrics import split
from fp4repro.report.schema import parse_rows
from fp4repro.sensitivity.study import Sensitivity, errors_add_up

pytestmark = pytest.mark.usefixtures("eager")
ROOT = Path(__file__).parents[1]
BLOCKS, TOKENS = 6, 128


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"{n} and {n * n}, then {n**3}. " for n in range(400)))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(save_llama(tmp_path_factory.mktemp("llama"), blocks=BLOCKS))


@pytest.fixture
def study(llama, text):
    subject = of_pretrained(llama, None, TOKENS, text)
    with torch.no_grad():  # in every block of 16, weights or inputs are drowned by one of them
        layer = subject.model.model.layers[3]
        for norm, linears in (
            (layer.input_layernorm, ("q_proj", "k_proj", "v_proj")),
            (layer.post_attention_layernorm, ("gate_proj", "up_proj")),
        ):
            norm.weight[::16] /= 60
            for name, linear in layer.named_modules():
                if name.rpartition(".")[2] in linears:
                    linear.weight[:, ::16] *= 60
    return Sensitivity(subject, recipe("nvfp4").replace(stochastic=()), draws=1)


def test_the_block_that_suffers_is_found_and_left_in_bf16(study):
    study.run(share=1 / 6)
    assert max(study.alone, key=lambda b: study.alone[b].error) == 3
    assert study.choices["measured"].blocks == (3,)
    error = {name: choice.fidelity.error for name, choice in study.choices.items()}
    assert error["measured"] < min(error["last"], error["first"], error["least"], error["none"])
    quantised = {name: choice.fidelity.quantised for name, choice in study.choices.items()}
    assert quantised["none"] == 7 * BLOCKS and quantised["measured"] == 7 * (BLOCKS - 1)
    assert all(found.quantised == 7 for found in study.alone.values())
    assert 0 < errors_add_up(study.alone, study.choices["none"].fidelity) < 10
    # What is written down as patterns is the same choice again.
    rule = KeepBF16(names=study.choices["measured"].patterns)
    kept = convert(study.subject.model, recipe("nvfp4").replace(keep=rule)).kept
    assert {n for n, why in kept.items() if "rule" in why} == {n for n in kept if "layers.3." in n}


def test_choices_have_the_same_size(study):
    study.measure_locally()
    study.alone = {b: study.whole.fidelity(study.keeping([]), 1) for b in study.blocks}
    chosen = study.candidates(share=0.5)
    sizes = {name: len(blocks) for name, blocks in chosen.items()}
    assert (
        sizes.pop("none") == 0
        and set(sizes.values()) == {3}
        and sizes.keys() | {"none"} == names.CHOICES.keys()
    )
    assert chosen["last"] == [3, 4, 5] and chosen["first"] == [0, 1, 2]
    assert chosen["paper"] == [0, 4, 5]  # 2 and 8 of 62: a fifth of them at the start
    local = sorted(study.blocks, key=lambda b: -study.local[b]["wgrad"])
    assert chosen["local"] == local[:3]
    assert study.share_of_parameters(chosen["measured_by_size"]) <= study.share_of_parameters(chosen["paper"])
    assert study.share_of_parameters(study.blocks) == 1 and study.share_of_parameters([2]) == pytest.approx(
        1 / 6
    )


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_a_share_that_chooses_nothing_is_refused(study, share):
    with pytest.raises(Fp4ReproError, match="leaves some quantised and some not"):
        study.candidates(share)


def test_command_and_its_report(tmp_path, llama, text, command, capsys):
    out = tmp_path / "rows.csv"
    command(
        sensitivity, llama, "--text", text, "--tokens", TOKENS, "--share", 0.34, "--draws", 1, "--out", out
    )
    markdown = capsys.readouterr().out
    rows = parse_rows(out)
    places = {split(row.setting)[1] for row in rows}
    assert places == {*names.CHOICES, *(f"block-0{b}" for b in range(BLOCKS))}
    assert {row.metric for row in rows} == set(names.UNITS)
    of = {(split(row.setting)[1], row.metric): row for row in rows}
    assert of["paper", names.BLOCKS].value == 2 and of["none", names.PARAMETERS].value == 0
    assert of["paper", names.ERROR].note == "blocks in BF16: 4 5"
    assert f"{of['paper', names.ERROR].value:.4f}" in markdown and "Smallest gradient error" in markdown

    files = {
        f"--{kind}": tmp_path / f"sensitivity.{kind[:3]}" for kind in ("table", "markdown", "png", "svg")
    }
    flat = [part for pair in files.items() for part in pair]
    scale = ROOT / "configs" / "scales" / "smoke.yaml"
    command(report, "sensitivity", "--scale", scale, "--rows", out, *flat)
    assert files["--table"].read_bytes() == out.read_bytes()
    assert files["--markdown"].read_text() == markdown
    assert files["--png"].read_bytes().startswith(b"\x89PNG") and ">measured<" in files["--svg"].read_text()


def test_a_model_that_cannot_be_had(tmp_path, text, command, monkeypatch, capsys):
    def nowhere(name):
        raise Unavailable("no network")

    monkeypatch.setattr(subjects, "load_pretrained", nowhere)
    out = tmp_path / "rows.csv"
    with pytest.raises(Unavailable):
        command(sensitivity, "x/y", "--text", text, "--out", out)
    command(sensitivity, "x/y", "--text", text, "--out", out, "--if-available")
    assert all(row.value is None and row.note == "not run: no network" for row in parse_rows(out))
    assert "Not run: no network." in capsys.readouterr().out
    with pytest.raises(Fp4ReproError, match="between 0 and 1"):
        command(sensitivity, "x/y", "--share", 1.5)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(Fp4ReproError, match="--scale and --data"):
        command(sensitivity, tmp_path)


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setenv("FP4REPRO_COMPILE", "0")

    def call(stage, *arguments):
        monkeypatch.setattr(sys, "argv", ["stage", *map(str, arguments)])
        stage.main()

    return call
