"""The account of a model's training memory on one GPU, item by item, from shapes on the meta device.

States: FP32 master weights, gradients and two moments, all split over `ranks` (FSDP). Weights as
products take them: packed where the recipe quantises the linear (one copy where fprop and dgrad share
16x16 tiles, as here, or both orientations, as hardware wants them), BF16 elsewhere. With more than one
rank a shard of them is kept, and two blocks at a time are gathered. Activations: `activations`.
Every state is bits a parameter: an optimizer whose moments take 10 bits changes `moment_bits`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fp4repro.core.formats import BlockFormat
from fp4repro.errors import Fp4ReproError
from fp4repro.memory.activations import FP32, HERE, IMPLEMENTATIONS, outside, saved_per_token
from fp4repro.memory.operands import operand_bytes
from fp4repro.models import ModelConfig, parameter_count
from fp4repro.models.config import KINDS
from fp4repro.recipes import Recipe
from fp4repro.roofline.linears import quantised_blocks

STATES, WEIGHTS, ACTIVATIONS = "states", "weights", "activations"


@dataclass(frozen=True)
class Assumptions:
    """What the account depends on beside model and recipe.

    orientations    packed copies of a weight: 1 as this project keeps it, 2 as hardware wants it
    padded          whether its scales are padded to 128 x 4
    attention_bits  of Q, K, V and the output as attention keeps them: 32 on a CPU, 16 on a GPU
    activation_bits bits of kept items by name (`activations`), for modules that pack them
    """

    ranks: int = 1
    tokens: int = 8192  # of a microbatch
    implementation: str = HERE
    orientations: int = 1
    padded: bool = False
    attention_bits: float = FP32
    master_bits: float = 32.0
    gradient_bits: float = 32.0
    moment_bits: tuple[float, float] = (32.0, 32.0)
    activation_bits: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens"):
            if getattr(self, name) < 1:
                raise Fp4ReproError(f"{name} must be 1 or more, but is {getattr(self, name)}")
        if self.orientations not in (1, 2):
            raise Fp4ReproError(f"orientations must be 1 or 2, but is {self.orientations}")
        if self.implementation not in IMPLEMENTATIONS:
            raise Fp4ReproError(f"implementation is {self.implementation!r}, none of {IMPLEMENTATIONS}")


@dataclass
class Account:
    """Bytes of one GPU by group and item."""

    bytes_of: Counter = field(default_factory=Counter)  # (group, item) -> bytes

    def group(self, name: str) -> float:
        return sum(n for (group, _), n in self.bytes_of.items() if group == name)

    @property
    def total(self) -> float:
        return sum(self.bytes_of.values())


def account(config: ModelConfig, recipe: Recipe, assumed: Assumptions) -> Account:
    """What one GPU holds at the peak of a step, in the loss."""
    result = Account()
    parameters = sum(parameter_count(config).values())
    for item, bits in (
        ("master weights", assumed.master_bits),
        ("gradients", assumed.gradient_bits),
        ("first moment", assumed.moment_bits[0]),
        ("second moment", assumed.moment_bits[1]),
    ):
        result.bytes_of[STATES, item] = parameters * bits / 8 / assumed.ranks
    _weights(config, recipe, assumed, result)
    for letter, quantised in zip(config.pattern, quantised_blocks(config, recipe), strict=True):
        kind = KINDS[letter]
        items = saved_per_token(
            config,
            kind,
            recipe if quantised else None,
            assumed.implementation,
            assumed.attention_bits,
            assumed.activation_bits,
        )
        for item, per_token in items.items():
            result.bytes_of[ACTIVATIONS, f"{kind}: {item}"] += per_token * assumed.tokens
    for item, nbytes in outside(config, assumed.tokens, assumed.implementation).items():
        result.bytes_of[ACTIVATIONS, f"outside: {item}"] += nbytes
    return result


def _weights(config: ModelConfig, recipe: Recipe, assumed: Assumptions, result: Account) -> None:
    blocks = [
        (q, block_weights(config, KINDS[letter], recipe if q else None, assumed))
        for letter, q in zip(config.pattern, quantised_blocks(config, recipe), strict=True)
    ]
    head = 2 * config.width * config.vocabulary
    for quantised, of_block in blocks:
        item = "packed weights" if quantised else "BF16 weights"
        result.bytes_of[WEIGHTS, item] += of_block / assumed.ranks
    result.bytes_of[WEIGHTS, "BF16 head"] = head / assumed.ranks
    if assumed.ranks > 1:
        gathered = max(2 * max(n for _, n in blocks), head)
        result.bytes_of[WEIGHTS, "gathered"] = gathered * (1 - 1 / assumed.ranks)


def block_weights(config: ModelConfig, kind: str, recipe: Recipe | None, assumed: Assumptions) -> float:
    """Bytes of a block's weights as products take them."""
    total = 0
    for fan_in, fan_out in config.linears(kind).values():
        fprop, dgrad = (None, None) if recipe is None else (recipe.w_fprop, recipe.w_dgrad)
        total += _weight(fprop, fan_out, fan_in, assumed)
        shared = fprop == dgrad and (fprop is None or _square(fprop))
        if not shared or (assumed.orientations == 2 and fprop is not None):
            total += _weight(dgrad, fan_in, fan_out, assumed)
    return total


def _weight(fmt: BlockFormat | None, rows: int, columns: int, assumed: Assumptions) -> int:
    return operand_bytes(fmt, rows, columns, assumed.padded)


def _square(fmt: BlockFormat) -> bool:
    """Whether both orientations hold the same values."""
    return fmt.block[0] == fmt.block[1]
