"""A whole training step of one model under one recipe, part by part, on one GPU of several.

Every block's linears (three products each, and the passes that quantise their operands), attention,
the SSD scan, norms and activations, the output head with its loss, and the optimizer. What is
quantised is decided by `layers.convert`, as in training. W is quantised once a step, activations and
gradients in each microbatch. Parallelism: tensor (linears cut), pipeline (a bubble of
(pp - 1) / (vp x microbatches)), context (tokens cut), and data. Communication counts where
`exposed` says what share of it is not hidden; published recipes overlap it, so the default is 0.
"""

from collections import Counter
from dataclasses import dataclass, field, fields

from fp4repro.errors import Fp4ReproError
from fp4repro.models import ModelConfig
from fp4repro.models.config import KINDS
from fp4repro.recipes import Recipe
from fp4repro.roofline.devices import Device
from fp4repro.roofline.elementwise import (
    attention_flops,
    block_bytes,
    head_bytes,
    model_flops,
    parameters,
    scan_flops,
)
from fp4repro.roofline.factors import Factors
from fp4repro.roofline.gemm import Gemm
from fp4repro.roofline.linears import block_linears, quantised_blocks
from fp4repro.roofline.passes import seconds_by_tensor

# Bytes of a parameter that AdamW moves: FP32 gradient, master and two states, read and written, BF16 copy.
OPTIMIZER_BYTES = 4 + 3 * 8 + 2


@dataclass(frozen=True)
class Setting:
    """How a step is spread: sizes of a sequence and a microbatch, sequences a step, and GPUs."""

    sequence: int = 8192
    microbatch: int = 1
    batch: int = 1
    gpus: int = 1
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    exposed: float = 0.0  # share of the communication that nothing hides

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name != "exposed" and getattr(self, f.name) < 1:
                raise Fp4ReproError(f"{f.name} must be 1 or more, but is {getattr(self, f.name)}")
        groups = self.tp * self.pp * self.cp
        if self.gpus % groups:
            raise Fp4ReproError(f"{self.gpus} GPUs cannot be split into groups of tp x pp x cp = {groups}")
        if self.batch % (self.microbatch * self.dp):
            raise Fp4ReproError(
                f"a batch of {self.batch} sequences cannot be split into microbatches of {self.microbatch} "
                f"on {self.dp} data-parallel groups"
            )

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def microbatches(self) -> int:
        return self.batch // (self.microbatch * self.dp)

    @property
    def tokens(self) -> int:
        """Of one microbatch on one GPU."""
        return self.microbatch * self.sequence // self.cp


@dataclass
class Step:
    """Seconds of one step by part, and what it did."""

    setting: Setting
    seconds_of: Counter = field(default_factory=Counter)
    model_flops: float = 0.0  # of all GPUs together

    @property
    def seconds(self) -> float:
        return sum(self.seconds_of.values())

    @property
    def tokens_per_second(self) -> float:
        """Per GPU."""
        s = self.setting
        return s.batch * s.sequence / (self.seconds * s.gpus)

    @property
    def tflops(self) -> float:
        """Model TFLOP/s per GPU."""
        return self.model_flops / (self.seconds * self.setting.gpus) / 1e12


def step(config: ModelConfig, recipe: Recipe, device: Device, factors: Factors, setting: Setting) -> Step:
    """Predict one training step."""
    quantised = quantised_blocks(config, recipe)
    blocks = Counter((KINDS[letter], q) for letter, q in zip(config.pattern, quantised, strict=True))
    microbatch, once = Counter(), Counter()  # of all stages together; once: of a step
    for (kind, in_recipe), count in blocks.items():
        found = _block(config, kind, recipe if in_recipe else None, device, factors, setting)
        for total, seconds in zip((microbatch, once), found, strict=True):
            total.update({part: count * value for part, value in seconds.items()})
    stream = factors.stream * device.bytes_per_second
    head = Gemm("head", "fprop", setting.tokens, config.vocabulary // setting.tp, config.width)
    microbatch["head and loss"] += 3 * head.seconds(device, factors)
    microbatch["head and loss"] += head_bytes(config, setting.tokens) / setting.tp / stream

    flops = model_flops(config, setting.sequence) * setting.batch * setting.sequence
    result = Step(setting, model_flops=flops)
    for part, seconds in microbatch.items():
        result.seconds_of[part] = seconds * setting.microbatches / setting.pp
    bubble = (setting.pp - 1) / (setting.vp * setting.microbatches)
    result.seconds_of["pipeline bubble"] = result.seconds * bubble
    for part, seconds in once.items():
        result.seconds_of[part] += seconds / setting.pp
    held = parameters(config) / (setting.tp * setting.pp)
    result.seconds_of["optimizer"] = OPTIMIZER_BYTES * held / (setting.dp * setting.cp) / stream
    hidden = _communication(config, setting, held, device)
    result.seconds_of["communication"] = setting.exposed * hidden
    result.seconds_of["all else"] = result.seconds * (1 / factors.step - 1)
    return result


def _block(
    config: ModelConfig, kind: str, recipe: Recipe | None, device: Device, factors: Factors, setting: Setting
) -> tuple[Counter, Counter]:
    """Seconds of a microbatch in one block, and of what is done once a step."""
    t, tp = setting.tokens, setting.tp
    parts, once = Counter(), Counter()
    for linear in block_linears(config, kind, tp):
        products = "quantised products" if recipe else "BF16 products"
        parts[products] += sum(g.seconds(device, factors) for g in linear.gemms(t, recipe))
        if recipe is not None:
            seconds = seconds_by_tensor(recipe, linear.values(t), device, factors)
            once["quantisation"] += seconds.pop("w")
            parts["quantisation"] += sum(seconds.values())
    rate = factors.attention * device.flops("bf16")
    if kind == "attention":
        parts["attention"] += attention_flops(config, setting.sequence) * t / tp / rate
    if kind == "mamba":
        parts["SSD scan"] += scan_flops(config) * t / tp / rate
    moved = block_bytes(config, kind, t, tp)
    parts["norms and activations"] += moved / (factors.stream * device.bytes_per_second)
    return parts, once


def _communication(config: ModelConfig, setting: Setting, held: float, device: Device) -> float:
    """Seconds of a step's collectives if nothing hid them: gathers and scatters of activations between
    tensor-parallel GPUs (four a block, in BF16), and of weights and gradients between data-parallel
    ones (BF16 and FP32), all at the link's rate."""
    link = 1e9 * device.link
    share = (setting.tp - 1) / setting.tp
    activations = 4 * 2 * setting.tokens * config.width * share
    tensor = activations * len(config.pattern) / setting.pp * setting.microbatches / link
    group = setting.dp * setting.cp
    data = (2 + 4) * held * (group - 1) / group / link
    return tensor + data
