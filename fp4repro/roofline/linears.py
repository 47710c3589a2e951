"""A model's linears as products: which are quantised (by the rule that training uses), in which shapes.

Linears that read the same input are one product, as frameworks fuse them: q, k and v, and up and gate.
Tensor parallelism cuts the first linear of a block by its outputs and the last by its inputs.
"""

from dataclasses import dataclass
from functools import cache

from fp4repro.core.formats import BlockFormat
from fp4repro.errors import Fp4ReproError
from fp4repro.layers import convert
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.models.config import KINDS
from fp4repro.recipes import PRODUCTS, Recipe
from fp4repro.roofline.gemm import Gemm

FUSED = {"attention": {"qkv": ("q", "k", "v"), "o": ("o",)}, "ffn": {"up": ("up", "gate"), "down": ("down",)}}
TO_RESIDUAL = ("o", "down", "out_proj")


@dataclass(frozen=True)
class Linear:
    """One product of the forward pass, fused, on one GPU: (tokens, fan_in) to (tokens, fan_out)."""

    kind: str
    name: str
    fan_in: int
    fan_out: int

    def gemms(self, tokens: int, recipe: Recipe | None) -> list[Gemm]:
        """fprop, dgrad and wgrad; `recipe` None leaves them in BF16."""
        t, i, o = tokens, self.fan_in, self.fan_out
        sizes = {"fprop": (t, o, i), "dgrad": (t, i, o), "wgrad": (o, i, t)}
        label = f"{self.kind}.{self.name}"
        return [Gemm(label, product, *sizes[product], format_of(recipe, product)) for product in PRODUCTS]

    def values(self, tokens: int) -> dict[str, int]:
        """Numbers of its three tensors."""
        return {
            "x": tokens * self.fan_in,
            "dy": tokens * self.fan_out,
            "w": self.fan_in * self.fan_out,
        }


def format_of(recipe: Recipe | None, product: str) -> BlockFormat | None:
    """The format that decides which units take a product; None, BF16, unless both operands have one."""
    if recipe is None:
        return None
    formats = [getattr(recipe, slot) for slot in _slots(product)]
    return None if None in formats else max(formats, key=lambda fmt: fmt.element.bits)


def _slots(product: str) -> tuple[str, str]:
    return {
        "fprop": ("x_fprop", "w_fprop"),
        "dgrad": ("dy_dgrad", "w_dgrad"),
        "wgrad": ("dy_wgrad", "x_wgrad"),
    }[product]


def block_linears(config: ModelConfig, kind: str, tp: int = 1) -> list[Linear]:
    """The fused linears of a block, as one of `tp` tensor-parallel GPUs has them."""
    shapes = config.linears(kind)
    groups = FUSED.get(kind, {name: (name,) for name in shapes})
    found = []
    for name, members in groups.items():
        members = [shapes[m] for m in members if m in shapes]
        fan_in, fan_out = members[0][0], sum(out for _, out in members)
        cut = (fan_in, 1) if name in TO_RESIDUAL else (fan_out, 0)
        if cut[0] % tp:
            raise Fp4ReproError(f"{kind}.{name} of width {cut[0]} cannot be split over tp = {tp} GPUs")
        sizes = (fan_in // tp, fan_out) if name in TO_RESIDUAL else (fan_in, fan_out // tp)
        found.append(Linear(kind, name, *sizes))
    return found


@cache
def quantised_blocks(config: ModelConfig, recipe: Recipe) -> tuple[bool, ...]:
    """For each block whether its linears are quantised, as `convert` decides on the meta device."""
    swapped = convert(HybridModel(config, device="meta"), recipe).swapped
    found = []
    for index, letter in enumerate(config.pattern):
        names = config.linears(KINDS[letter])
        inside = [f"blocks.{index}.mixer.{name}" in swapped for name in names]
        if any(inside) != all(inside):
            raise Fp4ReproError(
                f"recipe {recipe.name} quantises some linears of block {index} and not others; the model "
                "of the step takes whole blocks: name blocks in the recipe's layer rule"
            )
        found.append(all(inside))
    return tuple(found)
