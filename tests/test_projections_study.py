"""The study of LoRA-SVD: its rows against figures worked out apart, and its report."""

import argparse
import sys

import pytest
import torch
from test_formats_study import ROOT, run, scale  # noqa: F401 (fixtures)

from fp4repro.errors import Fp4ReproError
from fp4repro.fullstack import __main__ as stage
from fp4repro.fullstack import projections as study
from fp4repro.recipes import LoraSVD
from fp4repro.report import __main__ as report
from fp4repro.report import projection_tables as names
from fp4repro.report.schema import Row, parse_rows

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setenv("FP4REPRO_COMPILE", "0")  # the stage's own default, set back after the test
    for name, value in {"SIZE": 128, "TOKENS": 128, "RANKS": (8,), "DRIFTS": (0.5,), "ROUNDS": 2}.items():
        monkeypatch.setattr(study, name, value)
    for function, size in (("weight", (128,)), ("operands", (128, 128))):
        monkeypatch.setattr(getattr(study, function), "__defaults__", size)


def command(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", ["stage", *map(str, arguments)])
    threads = torch.get_num_threads()
    try:
        module.main()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("spectrum", study.SPECTRA)
def test_spectra_are_what_they_say(spectrum):
    w = study.weight(spectrum, 256)
    assert w.square().mean() == pytest.approx(1 / 256)
    sigma = torch.linalg.svdvals(w)
    power = study.SPECTRA[spectrum]
    if power is not None:
        assert sigma[0] / sigma[99] == pytest.approx(100**power, rel=1e-3)
    exact = (sigma[:8] ** 2).sum() / (sigma**2).sum()
    assert study.energy(w, 8) == pytest.approx(exact.item(), rel=1e-4)


def test_flops_of_the_side_path():
    """The notes' 3 % for K = N = 2048 and rank 32 is that of very many tokens."""
    assert study.side_path_flops(10**9, 2048, 2048, 32) == pytest.approx(2 * 32 / 2048, rel=1e-3)
    tokens, out, into, rank = 64, 48, 32, 4
    products = tokens * into * rank + out * into * rank + tokens * rank * out
    assert study.side_path_flops(tokens, out, into, rank) == products / (tokens * out * into)


def test_errors_are_to_the_products_of_w():
    w, (x, dy) = study.weight("gaussian", 64), study.operands(128, 64)
    none = study.errors(study.layer_of(w, None), w, x, dy)
    assert 0.12 < none[names.OUTPUT] < 0.17 < none[names.GRADIENT] < 0.2
    assert study.errors(study.layer_of(w, None), 2 * w, x, dy)[names.OUTPUT] > 0.4
    full = study.errors(study.layer_of(w, LoraSVD(64)), w, x, dy)
    assert full[names.OUTPUT] < 0.01


def test_study_and_its_report(tmp_path, scale, run, small, monkeypatch):  # noqa: F811
    out = tmp_path / "projections.csv"
    given = ("--scale", scale, "--run", run, "--data", tmp_path / "data", "--out", out)
    command(monkeypatch, stage, "projections", *given)
    rows = parse_rows(out)
    parts = names.by_part(rows)
    assert set(parts) == set(names._PARTS) and {row.metric for row in rows} == set(names.UNITS)
    assert {row.scale for row in rows} == {"small"} and all(row.torch and row.device for row in rows)
    modelled = {row.metric for row in rows if row.provenance == "modelled"}
    assert modelled == {names.FLOPS, names.RATE_SHARE}
    law = parts[names.RATIO_LAW]["i^-0.5/rank-8"]
    assert law[names.OUTPUT_RATIO].value == pytest.approx(law[names.LAW].value, rel=0.05)
    stale = parts[names.STALE]
    fresh, old, none = (stale[f"0.5/{kind}"][names.OUTPUT].value for kind in ("fresh", "stale", "none"))
    assert fresh < 1.02 * old < none
    real = parts[names.TRAINED]["rank-8"]
    assert "8 linears of bf16/seed-0 at scale small, 1024 held-out tokens" in real[names.ENERGY].note
    assert 0 < real[names.ENERGY].value < 1

    files = [tmp_path / f"projections.{suffix}" for suffix in ("md", "png", "svg")]
    flat = [part for pair in zip(("--markdown", "--png", "--svg"), files, strict=True) for part in pair]
    command(monkeypatch, report, "projections", "--scale", scale, "--table", out, *flat)
    text = files[0].read_text()
    assert f"{law[names.OUTPUT].value:.4f}" in text and all(metric in text for metric in names.MEANING)
    assert files[1].read_bytes().startswith(b"\x89PNG") and ">trained weights<" in files[2].read_text()


def test_mistakes_are_sentences(tmp_path, scale, run):  # noqa: F811
    given = argparse.Namespace(scale=scale, folder=run, data=None, out=tmp_path / "out.csv")
    with pytest.raises(Fp4ReproError, match="belong together"):
        study.run(given)
    wrong = Row(experiment="formats", setting="a/b", metric="m", value=1.0, unit="1")
    with pytest.raises(Fp4ReproError, match="is not one of the study of projections"):
        names.by_part([wrong])
