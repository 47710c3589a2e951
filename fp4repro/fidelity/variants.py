"""The recipes of the gradient study: the published ones, the entries of `configs/ablations.yaml`, and a few
more that a measure of errors alone can tell apart.

Which blocks stay in BF16 makes no difference here (see `fp4repro.sensitivity`), nor does what an entry
changes in the run, so that entries which differ in nothing else are one.
"""

from collections.abc import Mapping

from fp4repro.ablations import load_ablations
from fp4repro.core.formats import NVFP4
from fp4repro.recipes import KeepBF16, Recipe, recipe

_HEADROOM = NVFP4.replace(target=6 * 16 / 17)  # nearest scales then clip nothing
_FURTHER: dict[str, dict[str, object]] = {
    "only_rht": {"stochastic": (), "w_fprop": NVFP4, "w_dgrad": NVFP4},
    "only_2d": {"stochastic": (), "hadamard": ()},
    "rht_all": {"hadamard": ("fprop", "dgrad", "wgrad")},
    "sr_headroom": {"dy_dgrad": _HEADROOM, "dy_wgrad": _HEADROOM},
}


def variants(more: Mapping[str, Recipe] | None = None) -> dict[str, Recipe]:
    """Recipes by name; those of `more` join where they quantise otherwise than all before them."""
    whole = recipe("nvfp4")
    found = {name: recipe(name) for name in ("bf16", "fp8", "nvfp4", "mxfp4", "four-over-six")}
    entries = {e.name: e.recipe for e in load_ablations().values() if not e.only_whole}
    further = {name: whole.replace(name=name, **changes) for name, changes in _FURTHER.items()}
    known = set(map(_bare, found.values()))
    for name, extra in [*further.items(), *entries.items(), *(more or {}).items()]:
        if _bare(extra) not in known:
            known.add(_bare(extra))
            found[name] = extra
    return found


def _bare(of: Recipe) -> Recipe:
    return of.replace(name="", keep=KeepBF16())
