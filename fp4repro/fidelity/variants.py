"""The recipes of the gradient study: the whole recipe of arXiv 2509.25149 and, one by one, what its
section 4 and appendix E take away, add or move.

Which blocks stay in BF16 is no part of this list: see `fp4repro.sensitivity`.
"""

from collections.abc import Mapping

from fp4repro.core.formats import NVFP4
from fp4repro.recipes import KeepBF16, Recipe, recipe

_ROWS = NVFP4  # 1x16 along the contraction of each product
_FLAT = {"w_fprop": _ROWS, "w_dgrad": _ROWS}
_HEADROOM = NVFP4.replace(target=6 * 16 / 17)  # nearest scales then clip nothing
_FOUR_OVER_SIX = NVFP4.replace(four_over_six="mse", scale_target=256.0)
_GRADIENTS = ("dy_dgrad", "dy_wgrad")

_CHANGES: dict[str, dict[str, object]] = {
    # one part removed
    "no_sr": {"stochastic": ()},
    "no_rht": {"hadamard": ()},
    "no_2d": _FLAT,
    # one part alone
    "plain": {"stochastic": (), "hadamard": (), **_FLAT},
    "add_sr": {"hadamard": (), **_FLAT},
    "only_rht": {"stochastic": (), **_FLAT},
    "only_2d": {"stochastic": (), "hadamard": ()},
    # stochastic rounding of other operands
    "sr_dgrad": {"stochastic": ("dy_dgrad",)},
    "sr_wgrad": {"stochastic": ("dy_wgrad",)},
    "sr_backward": {"stochastic": (*_GRADIENTS, "w_dgrad", "x_wgrad")},
    "sr_activations": {"stochastic": (*_GRADIENTS, "x_fprop", "x_wgrad")},
    "sr_weights": {"stochastic": (*_GRADIENTS, "w_fprop", "w_dgrad")},
    "sr_headroom": {"dy_dgrad": _HEADROOM, "dy_wgrad": _HEADROOM},
    # the Hadamard transform: of other products, of other sizes, with other signs
    "rht_dgrad": {"hadamard": ("dgrad",)},
    "rht_fprop": {"hadamard": ("fprop",)},
    "rht_all": {"hadamard": ("fprop", "dgrad", "wgrad")},
    "rht_2": {"hadamard_size": 2},
    "rht_4": {"hadamard_size": 4},
    "rht_128": {"hadamard_size": 128},
    "signs_none": {"hadamard_signs": "none"},
    "signs_drawn": {"hadamard_signs": "drawn"},
    # weights in 1x16 blocks of which dgrad sees the very values of fprop
    "one_dim": {"w_fprop": _ROWS, "w_dgrad": _ROWS.transposed},
    "four_over_six": {"x_fprop": _FOUR_OVER_SIX, "x_wgrad": _FOUR_OVER_SIX},
}


def variants(more: Mapping[str, Recipe] | None = None) -> dict[str, Recipe]:
    """Recipes by name: the published ones, the variants of `nvfp4`, and those of `more` that quantise
    otherwise than all before them. Which blocks stay in BF16 makes no difference here."""
    whole = recipe("nvfp4")
    named = {name: recipe(name) for name in ("bf16", "fp8", "nvfp4", "mxfp4")}
    named |= {name: whole.replace(name=name, **changes) for name, changes in _CHANGES.items()}
    known = set(map(_bare, named.values()))
    for name, extra in (more or {}).items():
        if _bare(extra) not in known:
            known.add(_bare(extra))
            named[name] = extra
    return named


def _bare(of: Recipe) -> Recipe:
    return of.replace(name="", keep=KeepBF16())
