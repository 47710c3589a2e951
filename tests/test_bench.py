"""The core benchmark at a tiny size without a compiler: complete, positive, and honest in its words.
Nothing here asserts a time."""

import gc
import math
import re
import sys

import pytest
import torch
from eagerly import run_eagerly

import fp4repro
from fp4repro import NVFP4, fake_quantize
from fp4repro.bench import __main__ as stage
from fp4repro.bench import core, rivals, timing, workloads
from fp4repro.bench.timing import Ratio, Timing, interleaved, ratio
from fp4repro.bench.workloads import COPY, LINEAR_BF16, LINEAR_NVFP4, Sizes
from fp4repro.core import compiled as compiling
from fp4repro.errors import Fp4ReproError
from fp4repro.report.schema import parse_rows

TINY = Sizes(matrix=128, tokens=128, features=64, batch=1, context=128)


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch):
    run_eagerly(monkeypatch)
    monkeypatch.setitem(compiling._state, "usable", False)
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patch:
        run_eagerly(patch)
        patch.setattr(torch, "compile", lambda function: function)
        return core.measure(TINY, rounds=3, rivals=["compressed-tensors"])


# --- timing ---


def test_rounds_are_interleaved_after_the_warm_up(monkeypatch):
    calls, clock = [], iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    functions = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    got = interleaved(functions, rounds=3)
    assert calls == ["a", "b"] * (timing.WARM_UP + 3)
    assert got == {"a": Timing((1.0, 1.0, 1.0)), "b": Timing((1.0, 1.0, 1.0))}


def test_a_ratio_is_of_the_minima_with_percentiles_of_the_rounds():
    """Rounds of 3x to 7x of which one was disturbed on both sides."""
    got = ratio(Timing((3.0, 8.0, 30.0, 12.0, 7.0)), Timing((1.0, 2.0, 6.0, 2.0, 1.0)))
    assert got.value == 3.0
    assert got.low == pytest.approx(3.8) and got.high == pytest.approx(6.2)  # of 3, 4, 5, 6, 7


def test_the_garbage_collector_is_on_again_after_a_failure():
    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        interleaved({"a": fail}, rounds=1)
    assert gc.isenabled()


# --- workloads ---


def test_the_quantisers_do_what_their_names_say():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    run = {name: function() for name, function in workloads.quantisers(x).items()}
    assert torch.equal(run[COPY], x)
    assert torch.equal(run["fake-quantize-1x16-nearest"], fake_quantize(x, NVFP4))
    assert torch.equal(run["fake-quantize-eager"], fake_quantize(x, NVFP4))
    assert torch.equal(run["fake-quantize-16x16-nearest"], fake_quantize(x, NVFP4.with_block(16, 16)))
    stochastic = run["fake-quantize-1x16-stochastic"]
    assert not torch.equal(stochastic, fake_quantize(x, NVFP4))
    assert ((stochastic - x).norm() / x.norm()).item() < 0.2
    values, scale = run["hadamard-tokens-stochastic"]
    back = fp4repro.hadamard(x.bfloat16(), axis=0).float()
    assert (((values.float() * scale) - back).norm() / back.norm()).item() < 0.2


def test_linear_and_step_are_whole_and_quantise_anew():
    run = workloads.linears(TINY)
    seen = []
    original = fp4repro.layers.operands.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fp4repro.layers.operands, "prepare", lambda *a, **k: seen.append(a[1].block) or original(*a, **k)
        )
        for _ in range(2):
            run[LINEAR_NVFP4]()
    # x for fprop, W, x for wgrad, dy for dgrad, dy for wgrad: each time
    assert sorted(seen) == sorted([(1, 16), (16, 16), (16, 1), (1, 16), (16, 1)] * 2)
    seen.clear()
    run[LINEAR_BF16]()
    assert not seen


def test_saved_bytes_by_hand():
    """BF16: x and W in 2 bytes; NVFP4: both in 4.5 bits and 4 bytes of amax each."""
    x, w = TINY.tokens * TINY.features, TINY.features**2
    got = workloads.saved_bytes(TINY)
    assert got == {LINEAR_BF16: 2 * (x + w), LINEAR_NVFP4: (x + w) * 9 // 16 + 8}


# --- table ---


def test_the_table_has_every_bar(measured):
    assert [m.bar for m in measured] == list(core.BARS)
    for m in measured:
        if m.bar.setting == "torchao":
            assert m.verdict == "not run: torchao was not asked for" and m.ratio is None
            continue
        if m.bar.setting.startswith("gpu-") and not torch.cuda.is_available():
            assert m.verdict == "not run: no CUDA device" and m.ratio is None
            continue
        assert m.ratio.value > 0 and m.ratio.low > 0 and math.isfinite(m.ratio.high)
        assert m.verdict == ("met" if m.bar.met(m.ratio.value) else "not met")
    text = core.table(measured)
    lines = text.splitlines()
    assert len(lines) == 2 + len(core.BARS) and len({len(line) for line in lines}) == 1
    for bar, line in zip(core.BARS, lines[2:], strict=True):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert cells[0] == bar.what
        sign, bound = re.fullmatch(r"(<=|>=) ([\d.]+)x", cells[1]).groups()
        assert (sign == ">=") == bar.at_least and float(bound) == bar.bound
        assert cells[-1] in ("met", "not met") or cells[-1].startswith("not run: ")


def test_the_bars_are_those_of_the_project():
    assert {bar.setting: bar.bound for bar in core.BARS} == {
        "clone": 1.3,  # the control
        "fake-quantize-1x16-nearest": 2.2,
        "fake-quantize-16x16-nearest": 1.6,
        "fake-quantize-1x16-stochastic": 2.8,
        "hadamard-tokens-stochastic": 4.5,
        "fake-quantize-eager": 13.0,
        "linear-nvfp4": 1.3,
        "training-step-nvfp4": 1.5,
        "saved-for-backward": 0.30,
        "gpu-amax-pass": 0.66,
        "gpu-apply-pass": 1.33,
        "compressed-tensors": 4.0,
        "torchao": 10.0,
    }
    assert Sizes() == Sizes(matrix=4096, tokens=2048, features=1024, batch=8, context=128)


def test_a_verdict_follows_from_value_and_direction():
    at_most, at_least = core.BARS[1], core.BARS[-1]
    assert at_most.met(2.2) and not at_most.met(2.21)
    assert at_least.met(10.0) and not at_least.met(9.99)
    assert core.Measured(at_most, Ratio(2.0, 1.0, 3.0), 1e-3).verdict == "met"


def test_rows_follow_the_schema(measured):
    rows = list(core.rows(measured, "as tested", {"device": "CPU"}))
    ratios = [row for row in rows if row.unit == core.UNIT]
    assert [row.setting for row in ratios] == [bar.setting for bar in core.BARS]
    assert {row.metric for row in rows} == {
        core.TO_COPY,
        core.TO_BF16,
        core.TO_OURS,
        core.SAVED,
        "best_time",
    }
    for row in ratios:
        assert re.search(r"at (most|least) [\d.]+", row.note), row.note
    timed = [row for row in ratios if row.ci_low is not None and row.metric != core.SAVED]
    not_timed = 2 if torch.cuda.is_available() else 4  # saved bytes, torchao, and the GPU's
    assert len(timed) == len(core.BARS) - not_timed
    assert all("20th to 80th percentile" in row.note and "as tested" in row.note for row in timed)


def test_saved_memory_meets_its_bar(measured):
    (saved,) = [m for m in measured if m.bar.metric == core.SAVED]
    assert 0.28 < saved.ratio.value < 0.30 and saved.verdict == "met"


# --- rivals ---


def test_a_rival_that_is_missing_breaks_or_differs_is_not_run(monkeypatch):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))

    def absent():
        raise ModuleNotFoundError("no", name="torchao.prototype")

    def needs():
        raise ModuleNotFoundError("no", name="msgspec")

    def broken():
        return lambda x: x.no_such_method()

    expected = [
        (absent, "torchao is not installed"),
        (needs, "torchao needs msgspec"),
        (broken, "torchao failed: AttributeError: "),
        (lambda: torch.zeros_like, "torchao differs from NVFP4 by 1 of the norm"),
        (lambda: lambda x: x * torch.nan, "torchao differs from NVFP4 by nan"),
    ]
    for make, said in expected:
        monkeypatch.setitem(rivals.RIVALS, "torchao", make)
        run, why = rivals.rival("torchao", x)
        assert run is None and why.startswith(said)
    monkeypatch.setitem(rivals.RIVALS, "torchao", lambda: lambda x: fake_quantize(x, NVFP4))
    run, why = rivals.rival("torchao", x)
    assert why == "" and torch.equal(run(), fake_quantize(x, NVFP4))


def test_compressed_tensors_does_the_same_task():
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    close = torch.isclose(rivals.compressed_tensors()(x), fake_quantize(x, NVFP4), rtol=1e-5)
    assert close.float().mean() > 0.98  # its reciprocal global scale moves a block's scale at times


# --- command ---


def test_command_prints_and_writes_what_was_measured(tmp_path, monkeypatch, capsys, measured):
    asked = []
    monkeypatch.setattr(core, "measure", lambda sizes, rounds: asked.append((sizes, rounds)) or measured)
    monkeypatch.setattr(stage, "keep_freed_memory", lambda: asked.append("kept"))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: asked.append(n))
    out = tmp_path / "bench.csv"
    monkeypatch.setattr(sys, "argv", ["bench", "core", "--size", "256", "--rounds", "7", "--out", str(out)])
    stage.main()
    assert asked == ["kept", 2, (Sizes(matrix=256), 7)]
    printed = capsys.readouterr().out
    assert core.table(measured) in printed
    for said in ("256 x 256 values", "2 threads", "freed memory kept", "no compiler, all of it eager"):
        assert said in printed
    rows = parse_rows(out)
    assert {row.experiment for row in rows} == {core.EXPERIMENT}
    assert rows == list(core.rows(measured, rows[1].note, {k: getattr(rows[0], k) for k in _SHARED}))


_SHARED = ("device", "torch", "commit")


@pytest.mark.parametrize(
    "arguments", [("--size", "100"), ("--size", "0"), ("--threads", "0"), ("--rounds", "0")]
)
def test_a_size_that_cannot_be_measured_is_refused(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["bench", "core", *arguments])
    with pytest.raises(Fp4ReproError, match=arguments[0]):
        stage.main()
