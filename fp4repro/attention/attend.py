"""The public function: what may be asked of it, in one sentence where it may not."""

import math

import torch
from torch import Tensor

from fp4repro.attention.function import TiledAttention
from fp4repro.core.compiled import outside_graphs
from fp4repro.core.random import RandomKey
from fp4repro.errors import Fp4ReproError
from fp4repro.recipes import AttentionRecipe, Recipe


@outside_graphs
def fp4_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: AttentionRecipe | Recipe,
    causal: bool = True,
    key: RandomKey | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T scale) v under a recipe of attention, (batch, heads, queries, head_dim).

    q          (batch, heads, queries, head_dim), after positions and norms
    k, v       (batch, key heads, keys, head_dim); each key head serves heads / key heads query heads
    recipe     an AttentionRecipe, or a Recipe with one as its `attention`
    causal     query i sees keys 0 to i; False: all of them. There are no other masks: those of padding
               and of windows would have to be cut into the tiles.
    key        names the random bits, where dS is rounded stochastically
    scale      of scores, 1 / sqrt(head_dim) if None

    Takes any shape of sequence; head_dim must be whole blocks. Under autocast it works in autocast's
    type, as torch's own does. Memory grows with the length, not with its square.
    """
    recipe = _attention_recipe(recipe)
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    _check(q, k, v, recipe, causal, key)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    with torch.autocast(device, enabled=False):
        return TiledAttention.apply(q, k, v, recipe, causal, scale, key)


def _attention_recipe(recipe: AttentionRecipe | Recipe) -> AttentionRecipe:
    own = recipe.attention if isinstance(recipe, Recipe) else recipe
    if not isinstance(own, AttentionRecipe):
        what = f"recipe {recipe.name}, which has none" if isinstance(recipe, Recipe) else repr(recipe)
        raise Fp4ReproError(f"fp4_attention takes an AttentionRecipe, got {what}")
    return own


def _check(
    q: Tensor, k: Tensor, v: Tensor, recipe: AttentionRecipe, causal: bool, key: RandomKey | None
) -> None:
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if not (q.dim() == k.dim() == v.dim() == 4 and all(x.numel() for x in (q, k, v))):
        raise Fp4ReproError(
            f"fp4_attention takes q, k and v as (batch, heads, length, head_dim), none empty; got {shapes}"
        )
    fits = (
        q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1] and k.shape[:-1] == v.shape[:-1],
        q.shape[1] % k.shape[1] == 0,
    )
    if not all(fits):
        raise Fp4ReproError(
            f"q, k and v do not belong together: {shapes}; k and v need q's batch and its head_dim, the same "
            "length, and a number of heads that divides q's"
        )
    block = recipe.format.block[1]
    for name, x in (("q and k", k), ("v", v)):
        if x.shape[-1] % block:
            raise Fp4ReproError(
                f"the head_dim of {name} is {x.shape[-1]}, but must be a multiple of {block}, the block of "
                f"{recipe.format.name}: use torch's attention here"
            )
    if not isinstance(causal, bool):
        raise Fp4ReproError(
            f"causal must be True or False, not {type(causal).__name__}: attention in tiles has no other mask"
        )
    if causal and q.shape[-2] != k.shape[-2]:
        raise Fp4ReproError(
            f"causal attention needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}: which key "
            "the first query stands at is not known"
        )
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise Fp4ReproError(
            f"q, k and v must be of one floating-point type, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if recipe.ds_rounding == "stochastic" and key is None:
        raise Fp4ReproError(
            "ds_rounding is stochastic and there is no key: pass key=RandomKey(seed, step, layer)"
        )
