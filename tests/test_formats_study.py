"""The format study against the literature's known answers, against counts made by loops over the
oracle's values, and end to end on a small run."""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
import yaml
from safetensors.torch import save_file

import fp4repro.fidelity.__main__ as fidelity
import fp4repro.report.__main__ as report
from fp4repro import MXFP4, NVFP4, RandomKey, quantize
from fp4repro.config import load_scale
from fp4repro.data import tokens as token_files
from fp4repro.errors import Fp4ReproError
from fp4repro.fidelity.formats import CASES, Case, Study, Tally, padded_nbytes
from fp4repro.fidelity.samples import SAMPLES, SHAPE, sample
from fp4repro.fidelity.subject import of_run
from fp4repro.fidelity.tensors import TOKENS, held_out_sequences, open_run, visit_tensors
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.report import formats as names
from fp4repro.report.schema import parse_rows

pytestmark = pytest.mark.usefixtures("eager")
ROOT = Path(__file__).parents[1]


def figures(x, case):
    tally = Tally(case)
    tally.add(x, RandomKey(1))
    return tally.figures()


# --- known answers ---


@pytest.fixture(scope="module")
def gaussian():
    return sample("gaussian", (2048, 512))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("nvfp4-1x16", 9.04e-3),
        ("nvfp4-four-over-six", 7.56e-3),
        ("nvfp4-16x16", 12.41e-3),
        ("nvfp4-1x16-stochastic", 18.85e-3),
        ("nvfp4-one-level", 9.04e-3),
        ("mxfp4-up", 13.3e-3),
    ],
)
def test_relative_error_of_normal_data(gaussian, name, published):
    got = figures(gaussian, CASES[name])
    assert abs(got[names.RELATIVE_MSE] / published - 1) < 0.015
    assert math.isclose(got[names.SQNR], -10 * math.log10(got[names.RELATIVE_MSE]))


def test_nvfp4_on_normal_data(gaussian):
    """20.44 dB, 3.5 % clipped since scales round to nearest, 6 to 8 % flushed; tiles 9 to 11 %."""
    blocks, tiles = (figures(gaussian, CASES[name]) for name in ("nvfp4-1x16", "nvfp4-16x16"))
    assert 20.40 < blocks[names.SQNR] < 20.48
    assert 0.033 < blocks[names.CLIPPED] < 0.037
    assert 0.06 < blocks[names.FLUSHED] < 0.08
    assert 0.09 < tiles[names.FLUSHED] < 0.11
    assert blocks[names.ZERO_SCALES] == tiles[names.ZERO_SCALES] == 0


@pytest.mark.parametrize("name", ["mxfp8", "fp8-1x128", "fp8-128x128", "fp8-1x128-fp32-scales", "fp8-tensor"])
def test_fp8_on_normal_data(gaussian, name):
    """Three mantissa bits: 31.5 dB, to half a decibel, and nearly every value within 1/17."""
    got = figures(gaussian, CASES[name])
    assert 31.3 < got[names.SQNR] < 32.0
    assert 0.9995 < got[names.NEAR_FP8] <= 1
    assert got[names.CLIPPED] == 0


def test_one_sixteenth_keeps_near_fp8_precision_in_nvfp4_only(gaussian):
    """arXiv 2509.25149, appendix B: a block's largest value is within 1/17; not so for powers of two."""
    got = {name: figures(gaussian, case) for name, case in CASES.items()}
    for name in ("nvfp4-1x16", "nvfp4-16x16", "nvfp4-four-over-six"):
        assert got[name][names.NEAR_FP8_MAXIMA] == 1
    for name in ("mxfp4-up", "mxfp4-down"):
        assert 0.15 < got[name][names.NEAR_FP8_MAXIMA] < 0.4
    assert got["nvfp4-1x16"][names.NEAR_FP8_BLOCKS] == 1
    # Head-room of a sixth of a step is enough to fall between 4 and 6.
    assert 0.9 < got["nvfp4-1x16-stochastic"][names.NEAR_FP8_MAXIMA] < 0.99


def test_without_the_tensor_scale_small_values_are_lost(gaussian):
    got = figures(gaussian * 1e-4, CASES["nvfp4-one-level"])
    assert got[names.ZERO_SCALES] == got[names.FLUSHED] == got[names.RELATIVE_MSE] == 1
    assert got[names.SQNR] == 0 and got[names.NEAR_FP8_MAXIMA] == got[names.CLIPPED] == 0


# --- counts against loops over the oracle's values ---


def awkward():
    """Zeros, a zero block, blocks that underflow, and a wide range; float32 (32, 128)."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 128)) * np.exp2(rng.uniform(-12, 12, (32, 8))).repeat(16, 1)
    x[rng.random(x.shape) < 0.2] = 0
    x[3, 16:32] = 0
    x[7, 32:48] *= 1e-9
    return x.astype(np.float32)


def counted(x, result, block, maximum):
    """The shares by plain loops, from the oracle's values, scaled magnitudes and stored scales."""
    rows, columns = block
    kept = clipped = flushed = near = blocks = zero = claims = maxima = 0
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            cells = [(i, j) for i in range(top, top + rows) for j in range(left, left + columns) if x[i, j]]
            good = {
                c
                for c in cells
                if abs(float(result.values[c]) - float(x[c])) <= abs(float(x[c])) * 1.000001 / 17
            }
            kept += len(cells)
            near += len(good)
            flushed += sum(result.values[c] == 0 for c in cells)
            clipped += sum(abs(result.scaled[c]) > maximum * 1.000001 and result.stored[c] > 0 for c in cells)
            if cells:
                largest = max(abs(x[c]) for c in cells)
                blocks += 1
                zero += bool(result.stored[top, left] == 0)
                claims += len(good) * 16 >= len(cells)
                maxima += any(abs(x[c]) == largest for c in good)
    return {
        names.CLIPPED: clipped / kept,
        names.FLUSHED: flushed / kept,
        names.NEAR_FP8: near / kept,
        names.ZERO_SCALES: zero / blocks,
        names.NEAR_FP8_BLOCKS: claims / blocks,
        names.NEAR_FP8_MAXIMA: maxima / blocks,
    }


@pytest.mark.parametrize(
    ("name", "block", "kind", "make"),
    [
        ("nvfp4-1x16", (1, 16), oracle.E2M1, oracle.nvfp4),
        ("nvfp4-16x16", (16, 16), oracle.E2M1, lambda x: oracle.nvfp4(x, (16, 16))),
        ("nvfp4-one-level", (1, 16), oracle.E2M1, lambda x: oracle.nvfp4(x, tensor_scale=False)),
        ("nvfp4-four-over-six", (1, 16), oracle.E2M1, lambda x: oracle.four_over_six(x, "mse")),
        ("mxfp4-up", (1, 32), oracle.E2M1, lambda x: oracle.power_of_two_scaled(x, (1, 32), oracle.E2M1)),
        ("mxfp8", (1, 32), oracle.E4M3, lambda x: oracle.power_of_two_scaled(x, (1, 32), oracle.E4M3)),
        ("fp8-1x128", (1, 128), oracle.E4M3, lambda x: oracle.power_of_two_scaled(x, (1, 128), oracle.E4M3)),
    ],
)
def test_shares_and_errors_against_the_oracle(name, block, kind, make):
    x = awkward()
    result = make(x)
    got = figures(torch.from_numpy(x), CASES[name])
    expected = counted(x, result, block, float(oracle.MAXIMUM[kind]))
    assert {metric: got[metric] for metric in expected} == pytest.approx(expected, abs=1e-12)
    exact = x.astype(np.float64)
    mse = ((result.values - exact) ** 2).sum() / (exact**2).sum()
    assert got[names.RELATIVE_MSE] == pytest.approx(mse, rel=1e-5)


def test_mxfp4_scales_of_the_ocp_standard():
    """The block's largest power of two maps to 4, whatever lies above it is clipped at 6."""
    x = torch.from_numpy(awkward())
    q = quantize(x, CASES["mxfp4-down"].format)
    amax = x.view(32, 4, 32).abs().amax(-1)
    held = amax > 0
    expected = torch.exp2(torch.floor(torch.log2(amax[held]))) / 4
    assert torch.equal(q.scales.float()[held], expected)


def test_a_matrix_that_does_not_fill_its_blocks_counts_its_own_values():
    x = torch.ones(130, 200)
    x[129, 199] = 0
    for name in ("fp8-1x128", "fp8-128x128", "fp8-tensor"):
        tally = Tally(CASES[name])
        tally.add(x, RandomKey())
        assert (tally.totals["values"], tally.totals["kept"]) == (26000, 25999)
        assert tally.totals["near"] == 25999 and tally.errors == [0.0]
        assert tally.totals["blocks"] == {"fp8-1x128": 260, "fp8-128x128": 4, "fp8-tensor": 1}[name]
        assert tally.figures()[names.SQNR] is None


# --- bits ---


def test_bits_by_hand():
    """48 x 32 in NVFP4: 768 bytes of codes, 96 scales, 4 of amax; 128 x 4 scales when padded."""
    q = quantize(torch.randn(48, 32, generator=torch.Generator().manual_seed(0)), NVFP4)
    assert q.nbytes == 768 + 96 + 4
    assert padded_nbytes(q) == 768 + 512 + 4
    got = figures(torch.ones(48, 32), Case(MXFP4))
    assert got[names.BITS] == pytest.approx(8 * (768 + 48 + 4) / 1536)
    assert got[names.PADDED_BITS] == pytest.approx(8 * (768 + 512 + 4) / 1536)
    assert figures(torch.ones(48, 32), CASES["fp8-1x128"])[names.PADDED_BITS] is None


# --- samples ---


def test_samples_are_the_same_again_and_what_they_say():
    drawn = {name: sample(name) for name in SAMPLES}
    for name, x in drawn.items():
        assert x.shape == SHAPE and x.dtype == torch.float32
        assert torch.equal(x, sample(name))
        assert not torch.equal(x, sample(name, seed=1))
    assert not torch.equal(drawn["gaussian"][:, 1], drawn["outlier-channel"][:, 1])
    assert abs(drawn["gaussian"].std().item() - 1) < 0.005
    assert drawn["student-t"].abs().max() / 3**0.5 > 8 and drawn["gaussian"].abs().max() < 6
    spread = drawn["outlier-channel"].std(0)
    assert ((spread > 40) & (spread < 60)).sum() == 8 and ((spread > 0.9) & (spread < 1.1)).sum() == 1016


# --- tensors of a model ---


@pytest.fixture
def scale(tmp_path):
    """A tiny scale on a text of its own."""
    (tmp_path / "a.txt").write_text("".join(f"{n} {n**2} and {n**3}\n" for n in range(3000)))
    (tmp_path / "b.txt").write_text("".join(f"{n} {n**2} and {n**3}\n" for n in range(3000, 4000)))
    text = yaml.safe_load((ROOT / "configs" / "scales" / "smoke.yaml").read_text())
    text |= {
        "scale": "small",
        "corpus": {"files": [str(tmp_path / "a.txt")], "validation": [str(tmp_path / "b.txt")]},
        "corpus_bytes": {},
        "tokenizer": {"vocabulary": 384},
        "model_overrides": {"pattern": "M-*", "width": 64, "ffn_width": 96},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(text))
    return path


@pytest.fixture
def run(tmp_path, scale):
    """Files of a run as training leaves them, without the training; and its token files."""
    loaded = load_scale(scale)
    token_files.prepare(loaded, tmp_path / "data")
    changes = loaded.model_overrides | {"vocabulary": loaded.tokenizer.vocabulary}
    config = ModelConfig.from_yaml(loaded.model_path).replace(**changes)
    model = HybridModel(config, generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "run"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    checksums = token_files.open_tokens(tmp_path / "data", loaded).checksums
    settings = {f"model.{k}": v for k, v in config.__dict__.items()}
    settings |= {f"data.{k}": v for k, v in checksums.items()}
    about = {"setting": "bf16/seed-0", "scale": "small", "settings": settings}
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def test_hooks_see_the_operands_of_every_linear(tmp_path, scale, run):
    """dW = dy^T x of what the hooks saw is the gradient that autograd gives."""
    loaded = load_scale(scale)
    model, data, name = open_run(run, tmp_path / "data", loaded)
    assert name == "bf16/seed-0"
    tokens, targets = held_out_sequences(data, loaded)
    assert tokens.shape == targets.shape == (8, 128) and tokens.numel() == TOKENS
    seen = {}
    subject = of_run(run, tmp_path / "data", loaded, TOKENS)
    assert torch.equal(subject.tokens, tokens) and "bf16/seed-0" in subject.note
    model, named = subject.model, subject.linears
    visit_tensors(named, subject.loss, lambda kind, _, x: seen.setdefault(kind, []).append(x.clone()))
    layers = list(named.values())
    assert len(layers) == 2 + 2 + 4 and all(layer.weight.grad is None for layer in layers)
    assert [len(seen[kind]) for kind in ("weights", "activations", "gradients")] == [8, 8, 8]
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, targets).backward()
    gradients = list(seen["gradients"])
    for layer, w, x in zip(layers, seen["weights"], seen["activations"], strict=True):
        assert torch.equal(w, layer.weight)
        assert x.dtype == torch.bfloat16 and x.shape == (TOKENS, layer.in_features)
        products = [
            (dy.float().T @ x.float() - layer.weight.grad).norm() / layer.weight.grad.norm()
            for dy in gradients
            if dy.shape == (TOKENS, layer.out_features)
        ]
        assert min(products) < 0.01, layer


def test_several_tensors_pool_shares_and_average_errors():
    study = Study({"nvfp4-1x16": CASES["nvfp4-1x16"]})
    parts = [sample("gaussian", (64, 64)), sample("student-t", (32, 64)) * 1e-3, torch.zeros(16, 64)]
    for part in parts:
        study.add("weights", part)
    got = {row.metric: row for row in study.rows({})}
    alone = [figures(part, CASES["nvfp4-1x16"]) for part in parts[:2]]
    assert got[names.RELATIVE_MSE].value == pytest.approx(sum(f[names.RELATIVE_MSE] for f in alone) / 2)
    pooled = (2 * alone[0][names.FLUSHED] + alone[1][names.FLUSHED]) / 3
    assert got[names.FLUSHED].value == pytest.approx(pooled, abs=1e-3)
    assert re.search(r"^\d\d\.\d\d to \d\d\.\d\d dB over 2 tensors$", got[names.SQNR].note)


# --- commands ---


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setenv("FP4REPRO_COMPILE", "0")  # the stage's own default, set back after the test
    monkeypatch.setattr(fidelity, "SHAPE", (128, 128))

    def call(stage, *arguments):
        monkeypatch.setattr(sys, "argv", ["stage", *map(str, arguments)])
        threads = torch.get_num_threads()
        try:
            stage.main()
        finally:
            torch.set_num_threads(threads)

    return call


def test_study_and_its_report(tmp_path, scale, run, command):
    of_run = ("formats", "--scale", scale, "--run", run, "--data", tmp_path / "data", "--out")
    command(fidelity, *of_run, tmp_path / "formats.csv")
    rows = parse_rows(tmp_path / "formats.csv")
    kinds = [*SAMPLES, "weights", "activations", "gradients"]
    assert [row.setting for row in rows[:: len(names.UNITS)]] == [f"{c}/{d}" for d in kinds for c in CASES]
    assert {row.metric for row in rows} == set(names.UNITS) == set(names.MEANING)
    assert {row.scale for row in rows} == {"small"} and all(row.torch and row.device for row in rows)
    empty = {row.metric for row in rows if row.value is None}
    assert empty == {names.PADDED_BITS}
    assert "the 8 linears in the blocks of bf16/seed-0 at scale small, 1024 held-out" in rows[-1].note

    command(fidelity, *of_run, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "formats.csv").read_bytes()

    files = [tmp_path / f"formats.{suffix}" for suffix in ("md", "png", "svg")]
    given = zip(("--markdown", "--png", "--svg"), files, strict=True)
    flat = [part for pair in given for part in pair]
    command(report, "formats", "--scale", scale, "--table", tmp_path / "formats.csv", *flat)
    text = files[0].read_text()
    for metric in names.MEANING:
        assert f"- {metric}: " in text
    sqnr = next(row for row in rows if row.setting == "nvfp4-1x16/weights" and row.metric == names.SQNR)
    line = next(line for line in text.splitlines() if line.startswith("| nvfp4-1x16 "))
    assert [cell.strip() for cell in line.split("|")][5] == f"{sqnr.value:.2f}"
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert ">nvfp4-16x16<" in files[2].read_text() and ">gradients<" in files[2].read_text()


def test_mistakes_are_sentences(tmp_path, scale, run, command):
    out = ("--out", tmp_path / "out.csv")
    data = ("--data", tmp_path / "data")

    def refused(match, *arguments):
        with pytest.raises(Fp4ReproError, match=match):
            command(fidelity, "formats", "--scale", scale, *arguments, *out)
        assert not (tmp_path / "out.csv").exists()

    refused("belong together", "--run", run)
    refused("no finished run", "--run", tmp_path, *data)
    about = json.loads((run / "run.json").read_text())
    for change, said in (
        ({"scale": "laptop"}, "of a run at scale 'laptop'"),
        ({"settings": about["settings"] | {"data.train.bin": "0"}}, "is not what .* was trained on"),
        ({"settings": about["settings"] | {"model.ffn_width": 128}}, "of another model"),
    ):
        (run / "run.json").write_text(json.dumps(about | change))
        refused(said, "--run", run, *data)
    (run / "run.json").write_text("{")
    refused("run.json is damaged", "--run", run, *data)
    (run / "run.json").write_text(json.dumps(about))
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused("is missing, damaged or of another model", "--run", run, *data)


def test_rows_of_another_experiment_are_refused():
    rows = list(Study({"nvfp4-1x16": CASES["nvfp4-1x16"]}).rows({}))
    assert rows == [] and names.by_format_and_data(rows) == {}
    study = Study({"nvfp4-1x16": CASES["nvfp4-1x16"]})
    study.add("gaussian", torch.ones(16, 16))
    (first, *_) = study.rows({})
    wrong = type(first)(**{f: getattr(first, f) for f in first.__slots__} | {"experiment": "pretrain"})
    with pytest.raises(Fp4ReproError, match="is not one of the format study"):
        names.by_format_and_data([wrong])
