"""The roofline's rows: each published figure with its prediction, the headline, and predictions.

Every row says where it comes from. Published speed-ups are quotients of two published rows of one setting.
"""

from collections.abc import Iterator, Sequence

from fp4repro.core.formats import MXFP8
from fp4repro.models import ModelConfig
from fp4repro.recipes import PRODUCTS, Recipe
from fp4repro.report.markdown import aligned
from fp4repro.report.schema import NOT_RUN, Row
from fp4repro.roofline.calibrate import FIT, GEMM, HELD_OUT, STEP, Check, median_error, model_config
from fp4repro.roofline.devices import Device, device
from fp4repro.roofline.factors import Factors
from fp4repro.roofline.linears import Linear, block_linears
from fp4repro.roofline.passes import SLOTS_OF, seconds_by_tensor
from fp4repro.roofline.recipes import speed_recipe
from fp4repro.roofline.speedup import linear_seconds, speedups
from fp4repro.roofline.step import Setting

EXPERIMENT = "roofline"
HEADLINE_DEVICES = ("GB200", "GB300")
HEADLINE_MODELS = ("nemotron-12b", "llama3-70b")
BASELINES = ("bf16", "mxfp8")
# As the paper's 12B could be run: 16 GPUs, 16,384 tokens a microbatch, and optimizer shards on all.
HEADLINE_SETTING = Setting(sequence=8192, microbatch=2, batch=256, gpus=16)
WIDTHS = tuple(2**n for n in range(9, 15))
PEAK, KERNEL, QUANTISED, END_TO_END = "peak_ratio", "kernel", "with_quantisation", "end_to_end"


def rows(found: Sequence[Check], factors: Factors) -> Iterator[Row]:
    """The whole table."""
    for name, value in vars(factors).items():
        fitted = name in ("math_bf16", "math_fp8", "math_fp4", "passes", "step")
        how = "fitted on the rows marked fit" if fitted else "assumed"
        unit = "s" if name == "launch" else "1"
        yield Row(
            experiment=EXPERIMENT,
            setting="factors",
            metric=name,
            value=value,
            unit=unit,
            provenance="modelled",
            note=how,
        )
    for check in found:
        yield from _check_rows(check)
    for role in (FIT, HELD_OUT):
        for kind in (GEMM, STEP):
            some = [c for c in found if c.role == role and c.entry.case["kind"] == kind]
            yield _error_row(f"{role}-{kind}", some)
    yield _error_row(HELD_OUT, [c for c in found if c.role == HELD_OUT])
    yield from _headline(found, factors)
    yield from _by_shape(factors)


def _check_rows(check: Check) -> Iterator[Row]:
    entry = check.entry
    common = {"experiment": EXPERIMENT, "setting": f"check/{entry.id}", "device": entry.case["device"]}
    note = f"{check.role}; {entry.what}; {entry.setting}"
    yield Row(
        metric="published",
        value=entry.value,
        unit=entry.unit,
        provenance="published",
        note=f"{note}; {entry.source}",
        **common,
    )
    yield Row(
        metric="modelled", value=check.predicted, unit=entry.unit, provenance="modelled", note=note, **common
    )
    yield Row(
        metric="error", value=100 * check.error, unit="%", provenance="modelled", note=check.role, **common
    )


def _error_row(name: str, some: Sequence[Check]) -> Row:
    return Row(
        experiment=EXPERIMENT,
        setting=f"errors/{name}",
        metric="median_absolute_error",
        value=100 * median_error(some),
        unit="%",
        n=len(some),
        provenance="modelled",
        note="n is the number of published rows",
    )


def _headline(found: Sequence[Check], factors: Factors) -> Iterator[Row]:
    """Peak, kernel, with quantisation and end to end, for the devices of the papers' claims."""
    recipe = speed_recipe("nvfp4")
    for name in HEADLINE_DEVICES:
        on = device(name)
        for base in BASELINES:
            operand = "bf16" if base == "bf16" else "fp8"
            common = {"experiment": EXPERIMENT, "device": name, "unit": f"x {base}"}
            yield Row(
                setting="headline/nvfp4",
                metric=f"{PEAK}_to_{base}",
                value=on.peak_ratio("fp4", operand),
                provenance="published",
                note="tensor-core rates of the data sheet, equal to arXiv:2509.25149, table 1: a bound",
                **common,
            )
            for model in HEADLINE_MODELS:
                s = speedups(model_config(model), recipe, speed_recipe(base), on, factors, HEADLINE_SETTING)
                for metric, value in (
                    (KERNEL, s.kernel),
                    (QUANTISED, s.quantised),
                    (END_TO_END, s.end_to_end),
                ):
                    yield Row(
                        setting=f"headline/{model}",
                        metric=f"{metric}_to_{base}",
                        value=value,
                        provenance="modelled",
                        note="nvfp4 with its BF16 layers; 16,384 tokens a microbatch",
                        **common,
                    )
            for metric in (KERNEL, QUANTISED, END_TO_END):
                yield Row(
                    setting="headline/measured here",
                    metric=f"{metric}_to_{base}",
                    value=None,
                    note=f"{NOT_RUN}no {name}",
                    **common,
                )
    yield from _published_speedups(found)


def _by_shape(factors: Factors) -> Iterator[Row]:
    """Speed-up of one square linear over BF16 by its width, for the figure."""
    recipe, base = speed_recipe("nvfp4"), speed_recipe("bf16")
    tokens = HEADLINE_SETTING.tokens
    for name in HEADLINE_DEVICES:
        on = device(name)
        for width in WIDTHS:
            linear = Linear("square", "linear", width, width)
            (ours, passes), (theirs, _) = (
                linear_seconds(linear, tokens, r, on, factors) for r in (recipe, base)
            )
            for metric, value in ((KERNEL, theirs / ours), (QUANTISED, theirs / (ours + passes))):
                yield Row(
                    experiment=EXPERIMENT,
                    setting=f"shape/{width}",
                    metric=f"{metric}_to_bf16",
                    value=value,
                    unit="x bf16",
                    provenance="modelled",
                    device=name,
                    note=f"three products of {width} x {width} features, {tokens} tokens",
                )


def _published_speedups(found: Sequence[Check]) -> Iterator[Row]:
    """NVFP4 over each baseline where both were published in one setting."""
    for check in found:
        entry = check.entry
        if entry.case["recipe"] != "nvfp4":
            continue
        for other in found:
            base, case = other.entry, other.entry.case
            same = case["recipe"] in BASELINES and base.unit == entry.unit and base.what == entry.what
            same &= base.setting == entry.setting and case.get("quantised") == entry.case.get("quantised")
            if not same or case.get("part") != entry.case.get("part"):
                continue
            faster = base.value / entry.value if entry.unit == "ms" else entry.value / base.value
            kind = END_TO_END if case["kind"] == STEP else QUANTISED if case["quantised"] else KERNEL
            yield Row(
                experiment=EXPERIMENT,
                setting=f"headline/{entry.id}",
                metric=f"{kind}_to_{case['recipe']}",
                value=faster,
                unit=f"x {case['recipe']}",
                provenance="published",
                device=case["device"],
                note=f"{entry.setting}; {entry.source}",
            )


def predictions(model: str, config: ModelConfig, on: Device, factors: Factors, tokens: int) -> Iterator[Row]:
    """Times of every product and quantisation pass of a model's linears, in the formats a device has."""
    linears = [linear for kind in sorted(config.kinds) for linear in block_linears(config, kind)]
    for name in ("bf16", "fp8-tensor", "fp8", "mxfp8", "nvfp4"):
        recipe = speed_recipe(name)
        missing = f"{NOT_RUN}{on.name} has no units for {name}" if _lacks(recipe, on) else ""
        for linear in linears:
            times = {} if missing else _times(linear, tokens, recipe, on, factors)
            label = f"{model}/{linear.kind}.{linear.name}"
            for what in (*PRODUCTS, *(f"quantise-{tensor}" for tensor in SLOTS_OF)):
                if what not in PRODUCTS and name == "bf16":
                    continue
                yield Row(
                    experiment="prediction",
                    setting=f"{label}/{what}/{name}",
                    metric="time",
                    value=times.get(what),
                    unit="ms",
                    provenance="modelled",
                    device=on.name,
                    note=missing or f"{tokens} tokens, {linear.fan_in} to {linear.fan_out} features",
                )


def _times(linear: Linear, tokens: int, recipe: Recipe, on: Device, factors: Factors) -> dict[str, float]:
    """Milliseconds by product, and by tensor for its quantisation."""
    times = {g.product: 1e3 * g.seconds(on, factors) for g in linear.gemms(tokens, recipe)}
    passes = seconds_by_tensor(recipe, linear.values(tokens), on, factors)
    return times | {f"quantise-{tensor}": 1e3 * seconds for tensor, seconds in passes.items()}


def _lacks(recipe: Recipe, on: Device) -> bool:
    """Whether a device has no units for a recipe; those for MX formats came with those for FP4."""
    fmt = recipe.x_fprop
    return fmt is not None and "fp4" not in on.peak and (fmt.element.bits == 4 or fmt == MXFP8)


def summary(found: Sequence[Check]) -> str:
    """Every row with its error, aligned, and the medians."""
    header = ["published row", "role", "published", "modelled", "unit", "error"]
    lines = [
        [
            c.entry.id,
            c.role,
            f"{c.entry.value:g}",
            f"{c.predicted:.4g}",
            c.entry.unit,
            f"{100 * c.error:+.1f} %",
        ]
        for c in found
    ]
    held = [c for c in found if c.role == HELD_OUT]
    tail = f"median absolute error of {len(held)} held-out rows: {100 * median_error(held):.1f} %"
    return "\n".join(aligned(header, lines)) + "\n" + tail
