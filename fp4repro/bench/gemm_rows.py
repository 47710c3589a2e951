"""The GEMM benchmark's results as rows: times, rates, speed-ups, errors, and the sums of a model."""

from collections.abc import Iterator, Sequence

from fp4repro.bench.gemm import Machine, Result, geometric_mean
from fp4repro.bench.timing import HIGH, LOW
from fp4repro.report.schema import NOT_RUN, Row
from fp4repro.roofline.devices import Device, load_devices

EXPERIMENT = "kernels"
FP8_BASELINES = ("mxfp8", "fp8-tensor")  # the first that was timed is the named baseline
INTERVAL = f"interval: {LOW}th to {HIGH}th percentile"
TIMES = {"kernel": "kernel_time", "quantised": "quantised_time"}


def device_of(name: str) -> Device | None:
    """The known device whose name a driver's name contains, the longest one."""
    plain = name.upper().replace(" ", "-")
    found = [device for key, device in load_devices().items() if key in plain]
    return max(found, key=lambda device: len(device.name), default=None)


def rows(model: str, results: Sequence[Result], machine: Machine, where: dict[str, str]) -> Iterator[Row]:
    """`where`: the columns that all rows share."""
    on = device_of(where["device"]) if machine.major is not None else None
    by_gemm: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_gemm.setdefault((result.gemm.linear, result.gemm.product), []).append(result)
    for (linear, product), group in by_gemm.items():
        for result in group:
            setting = f"{model}/{linear}/{product}/{result.compared.name}"
            yield from _of_product(setting, result, group, on, where)
            if machine.major is None:
                yield _not_on_a_gpu(f"{setting}/native", where)
    yield from _sums(model, list(by_gemm.values()), where)


def _of_product(
    setting: str, result: Result, group: Sequence[Result], on: Device | None, where: dict[str, str]
) -> Iterator[Row]:
    common = {"experiment": EXPERIMENT, "setting": setting, **where}
    if result.why_not:
        for metric in TIMES.values():
            yield Row(metric=metric, value=None, unit="ms", note=result.why_not, **common)
        return
    gemm = result.gemm
    shape = f"{gemm.m} x {gemm.n} x {gemm.k}; {INTERVAL}; {result.note}"
    baselines = {r.compared.name: r for r in group if r.kernel}
    named = next((name for name in FP8_BASELINES if name in baselines), None)
    for attribute, metric in TIMES.items():
        median, low, high = (1e3 * t for t in getattr(result, attribute))
        yield Row(metric=metric, value=median, unit="ms", ci_low=low, ci_high=high, n=1, note=shape, **common)
        for base in filter(None, ("bf16", named)):
            if base in baselines and base != result.compared.name:
                faster = getattr(baselines[base], attribute)[0] / getattr(result, attribute)[0]
                of = f"speedup_{attribute}_to_{base}"
                yield Row(metric=of, value=faster, unit=f"x {base}", n=1, note=shape, **common)
    rate = gemm.flops / result.kernel[0] / 1e12
    yield Row(metric="rate", value=rate, unit="TFLOP/s", n=1, note=result.note, **common)
    if on is not None and result.compared.operand in on.peak:
        share = 1e12 * rate / on.flops(result.compared.operand)
        yield Row(metric="share_of_peak", value=share, unit="1", n=1, note=f"peak of {on.name}", **common)
    for metric, value in result.errors.items():
        yield Row(metric=metric, value=value, unit="1", n=1, note=result.note, **common)


def _not_on_a_gpu(setting: str, where: dict[str, str]) -> Row:
    return Row(
        experiment=EXPERIMENT,
        setting=setting,
        metric="kernel_time",
        value=None,
        unit="ms",
        note=f"{NOT_RUN}no CUDA device",
        **where,
    )


def _sums(model: str, groups: Sequence[Sequence[Result]], where: dict[str, str]) -> Iterator[Row]:
    """Over the products that were timed in BF16 and in a format: geometric mean of the speed-ups, and the
    speed-up of the sum of times, each linear as often as it stands in the model."""
    names = dict.fromkeys(r.compared.name for group in groups for r in group)
    for name in (n for n in names if n != "bf16"):
        pairs = []
        for group in groups:
            timed = {r.compared.name: r for r in group if r.kernel}
            if "bf16" in timed and name in timed:
                pairs.append((timed["bf16"], timed[name]))
        for attribute in TIMES:
            common = {"experiment": EXPERIMENT, "setting": f"{model}/all/{name}", "unit": "x bf16", **where}
            for metric in ("geometric_mean", "sum"):
                label = f"speedup_{attribute}_{metric}"
                if not pairs:
                    why = f"{NOT_RUN}no product was timed in both bf16 and {name}"
                    yield Row(metric=label, value=None, note=why, **common)
                    continue
                times = [[getattr(r, attribute)[0] for r in pair] for pair in pairs]
                if metric == "geometric_mean":
                    value = geometric_mean([base / ours for base, ours in times])
                else:
                    counts = [base.count for base, _ in pairs]
                    totals = [sum(c * t[side] for c, t in zip(counts, times, strict=True)) for side in (0, 1)]
                    value = totals[0] / totals[1]
                note = f"{len(pairs)} of {len(groups)} products; {pairs[0][1].note}"
                yield Row(metric=label, value=value, n=1, note=note, **common)


def line(result: Result) -> str:
    """One result for a reader, aligned."""
    gemm = result.gemm
    head = f"{gemm.linear:16} {gemm.product} {gemm.m:6} x {gemm.n:6} x {gemm.k:6} {result.compared.name:10}"
    if result.why_not:
        return f"{head} {result.why_not}"
    kernel, quantised = (1e3 * getattr(result, name)[0] for name in TIMES)
    return (
        f"{head} {kernel:9.3f} ms, with quantisation {quantised:9.3f} ms, error {result.errors['error']:.3g}"
    )
