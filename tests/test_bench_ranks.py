"""The benchmarks of ranks and of the scan: what their rows say, from times made up; no time is asserted."""

import pytest
import torch

from fp4repro.bench import ranks, scan
from fp4repro.bench.timing import Timing
from fp4repro.train.world import ALONE

WHERE = {"device": "CPU", "torch": "2", "commit": "abc"}
FIVE = 5  # rounds


def made_up(speedup: float) -> dict[str, Timing]:
    """Two ranks are `speedup` times as fast as one, whose step takes a second."""
    times = {ranks.alone(recipe): Timing((1.0,) * FIVE) for recipe in ranks.RECIPES}
    for recipe in ranks.RECIPES:
        for parallel in ranks.PARALLEL:
            times[ranks.together(recipe, parallel)] = Timing((1 / speedup,) * FIVE)
        times[ranks.apart(recipe)] = Timing((0.5,) * FIVE)
    return times | {ranks.AMAX: Timing((0.125,) * FIVE)}


@pytest.mark.parametrize(("speedup", "verdict"), [(2.0, "met"), (1.25, "not met")])
def test_rows_of_two_ranks_by_hand(speedup, verdict):
    found = list(ranks.all_rows(made_up(speedup), ranks.Sizes(batch=4, context=128), "words", WHERE))
    rows = {(row.setting, row.metric): row for row in found}
    assert len(rows) == len(found)
    for recipe in ranks.RECIPES:
        assert rows[ranks.alone(recipe), "tokens_per_second"].value == 512
        assert rows[ranks.alone(recipe), "speedup_without_sums"].value == 2
        for parallel in ranks.PARALLEL:
            row = rows[ranks.alone(recipe), f"speedup_{parallel}"]
            assert row.value == row.ci_low == row.ci_high == pytest.approx(speedup)
            assert row.note.startswith(f"at least 1.6: {verdict};")
            rate = rows[ranks.together(recipe, parallel), "tokens_per_second"]
            assert rate.value == pytest.approx(512 * speedup)
    assert rows[ranks.AMAX, "share_of_step"].value == pytest.approx(0.125 * speedup)
    assert rows[ranks.AMAX, "best_time"].value == 125


def test_what_is_timed_trains(eager):
    sizes = ranks.Sizes(batch=2, context=32)
    assert ranks.settings(sizes, "fsdp").accumulate == ranks.RANKS
    workload = ranks.training_step("nvfp4", sizes, ALONE)
    (run,) = (c.cell_contents for c in workload.run.__closure__ if isinstance(c.cell_contents, ranks.Run))
    before = [p.detach().clone() for p in run.model.parameters()]
    workload.run()
    workload.run()
    assert run.step == 2 and not workload.shared
    assert ranks.training_step("nvfp4", sizes, ALONE, shared=True).shared
    assert not any(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


@pytest.mark.slow
def test_two_processes_time_every_workload(tmp_path, monkeypatch):
    monkeypatch.setenv("FP4REPRO_COMPILE", "0")
    times = ranks.timings(ranks.Sizes(batch=2, context=32), 2, tmp_path)
    assert times.keys() == made_up(1.0).keys()
    assert all(len(t.seconds) == 2 and min(t.seconds) > 0 for t in times.values())


def test_the_scans_do_the_same_task():
    pytest.importorskip("transformers.models.nemotron_h")
    pairs, inputs = scan.workloads(scan.Sizes(batch=1, context=48))  # one and a half chunks
    for bar in scan.BARS:
        gradients = []
        for name in (bar.setting, bar.against):
            scan.with_backward(pairs[name], inputs)()
            gradients.append([t.grad for t in inputs.values() if t.grad is not None])
        assert len(gradients[0]) >= 1
        for theirs, ours in zip(*gradients, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)


def test_a_rival_that_computes_something_else_is_not_timed(monkeypatch):
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    right = modeling.mamba2_chunk_scan
    monkeypatch.setattr(modeling, "mamba2_chunk_scan", lambda *a, **k: 1.01 * right(*a, **k))
    measured = scan.measure(scan.Sizes(batch=1, context=32), rounds=1)
    assert "its output is off by 0.01 of the greatest value" in measured[0].verdict
    monkeypatch.setattr(modeling, "mamba2_chunk_scan", right)
    assert {m.verdict for m in scan.measure(scan.Sizes(batch=1, context=32), rounds=1)} <= {"met", "not met"}


def test_without_transformers_the_rows_say_so(monkeypatch):
    def gone(sizes):
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(scan, "workloads", gone)
    assert all("not run: no fallback in transformers" in m.verdict for m in scan.measure(scan.Sizes(), 1))
