"""The memory table: operands, the small models measured beside the account, and the paper's 12B."""

from collections.abc import Iterator, Sequence

import torch

from fp4repro.core.formats import FP8, FP8_TENSOR, MXFP8, NVFP4
from fp4repro.memory.account import ACTIVATIONS, STATES, WEIGHTS, Account, Assumptions, account
from fp4repro.memory.activations import FUSED
from fp4repro.memory.measure import measure
from fp4repro.memory.operands import measured_bytes
from fp4repro.report.published import Published
from fp4repro.report.schema import NOT_RUN, Row
from fp4repro.roofline.calibrate import model_config
from fp4repro.roofline.recipes import speed_recipe

EXPERIMENT = "memory"
FORMATS = {"nvfp4": NVFP4, "fp8-tensor": FP8_TENSOR, "fp8 (1x128)": FP8, "mxfp8": MXFP8}
ONE_ORIENTATION = "fp8-tensor"  # Blackwell's units take either orientation of it
SHAPES = ((1024, 1024), (32, 4096))  # a large one, and few tokens, whose scales are mostly padding
# Measured against the account: model, sequences and tokens of each.
SMALL = (("tiny", 8, 128), ("small", 2, 128))
LARGE, RECIPES, RANKS, TOKENS = "nemotron-12b", ("bf16", "fp8", "mxfp8", "nvfp4"), (1, 8, 64), 8192
AS_IN_FRAMEWORKS = f"{TOKENS} tokens a GPU; fused kernels, both orientations of weights, padded scales"


def rows(published: Sequence[Published], where: dict[str, str]) -> Iterator[Row]:
    """`where`: the columns that measured rows share."""
    yield from _operands(where)
    for model, batch, context in SMALL:
        for name in ("bf16", "nvfp4"):
            yield from _small(model, name, batch, context, where)
    for name in RECIPES:
        for ranks in RANKS:
            assumed = Assumptions(ranks, TOKENS, FUSED, orientations=2, padded=True)
            found = account(model_config(LARGE), speed_recipe(name), assumed)
            yield from account_rows(f"{LARGE}/{name}/ranks-{ranks}", found, AS_IN_FRAMEWORKS)
    yield _allocator(where)
    for entry in published:
        if entry.unit == "GiB":
            yield Row(
                experiment=EXPERIMENT,
                setting=entry.id,
                metric="peak",
                value=entry.value,
                unit="GiB",
                provenance="published",
                note=f"{entry.what}; {entry.setting}; {entry.source}",
            )


def account_rows(setting: str, found: Account, note: str) -> Iterator[Row]:
    """The groups and the total of one account."""
    amounts = {group: found.group(group) for group in (STATES, WEIGHTS, ACTIVATIONS)}
    for metric, nbytes in (amounts | {"total": found.total}).items():
        yield Row(
            experiment=EXPERIMENT,
            setting=setting,
            metric=metric,
            value=nbytes / 2**30,
            unit="GiB",
            provenance="modelled",
            note=note,
        )


def _operands(where: dict[str, str]) -> Iterator[Row]:
    for high, wide in SHAPES:
        sizes = {}
        for name, fmt in FORMATS.items():
            one = measured_bytes(fmt, high, wide, padded=True)
            # The second orientation is the transposed matrix, quantised along its own rows.
            other = 0 if name == ONE_ORIENTATION else measured_bytes(fmt, wide, high, padded=True)
            sizes[name] = {
                "one_orientation": measured_bytes(fmt, high, wide),
                "padded": one,
                "both_orientations": one + other,
            }
        for name, found in sizes.items():
            common = {"experiment": EXPERIMENT, "setting": f"operand {high} x {wide}/{name}", **where}
            for metric, nbytes in found.items():
                note = "packed codes, scales and amax of a real tensor"
                if metric == "both_orientations" and name == ONE_ORIENTATION:
                    note += "; one copy serves both where the units take either orientation"
                yield Row(metric=metric, value=nbytes / (high * wide), unit="B/value", note=note, **common)
                if name != "nvfp4":
                    ratio = sizes["nvfp4"][metric] / nbytes
                    yield Row(metric=f"nvfp4_share_{metric}", value=ratio, unit="1", note=note, **common)


def _allocator(where: dict[str, str]) -> Row:
    """The CUDA allocator's peak of a small model's step, where there is one."""
    model, batch, context = SMALL[-1]
    common = {
        "experiment": EXPERIMENT,
        "setting": f"{model}/nvfp4/allocator",
        "metric": "peak",
        "unit": "MiB",
    }
    if not torch.cuda.is_available():
        return Row(value=None, note=f"{NOT_RUN}no CUDA device", **common, **where)
    seen = measure(model_config(model), speed_recipe("nvfp4"), batch, context, "cuda")
    where = where | {"device": torch.cuda.get_device_name()}
    return Row(value=seen.allocator / 2**20, note=f"{batch} x {context} tokens", **common, **where)


def _small(model: str, name: str, batch: int, context: int, where: dict[str, str]) -> Iterator[Row]:
    config, recipe = model_config(model), speed_recipe(name)
    seen = measure(config, recipe, batch, context)
    assumed = Assumptions(tokens=batch * context)
    found = account(config, recipe, assumed)
    common = {"experiment": EXPERIMENT, "setting": f"{model}/{name}"}
    note = f"{batch} x {context} tokens"
    for metric, value in (("peak", seen.peak), ("saved_for_backward", seen.saved)):
        yield Row(metric=metric, value=value / 2**20, unit="MiB", note=note, **common, **where)
    yield Row(
        metric="account", value=found.total / 2**20, unit="MiB", provenance="modelled", note=note, **common
    )
    error = 100 * (found.total / seen.peak - 1)
    yield Row(metric="error", value=error, unit="%", provenance="modelled", note=note, **common)
