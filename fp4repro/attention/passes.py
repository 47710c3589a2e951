"""The two passes of attention, over chunks of heads and tiles of query rows.

Rows of dS sum to zero where D and P belong together: D_i = sum_j P_ij dP_ij, which is dO_i . O_i for
the P in use. That is all that alignment of forward and backward means here. Where the forward's Q K^T
is lowered and the backward's is not, and no views tie them, P is another one than O came from, rows do
not sum to zero, and training suffers (`fullstack/attention_control.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp4repro.attention.operands import HEAD_DIM, SEQUENCE, Kept, Operand, operand, product
from fp4repro.attention.tiles import Shape
from fp4repro.core.compiled import compiled
from fp4repro.core.random import RandomKey
from fp4repro.core.rounding import nearest_bf16
from fp4repro.recipes.attention import AttentionRecipe

# Numbers of dS's two roundings in random keys; those of a linear's slots are below.
ROLES = {"ds_k": 200, "ds_q": 201}


@dataclass(frozen=True)
class Work:
    """One call. Tensors are (heads, group, positions, head_dim); K and V have a group of one."""

    recipe: AttentionRecipe
    shape: Shape
    scale: float  # of scores
    key: RandomKey | None
    dtype: torch.dtype  # of inputs and outputs

    @property
    def sums(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def forward(self, q: Kept, k: Kept, v: Kept, mean: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """O, the log-sum-exp of each row, and the output that D is made from, if any.

        `mean` (heads, 1, head_dim) is what was taken off V, and comes back in O alone.
        """
        recipe, shape = self.recipe, self.shape
        size = shape.heads, shape.group, shape.padded(shape.queries)
        out = q.data.new_empty if isinstance(q.data, Tensor) else q.data.codes.new_empty
        lse = out(size, dtype=self.sums)
        out = out((*size, v.data.shape[-1]), dtype=self.dtype)
        high = recipe.row_term == "high_output"
        term = torch.empty_like(out) if high or (recipe.row_term == "output" and mean is not None) else None
        for heads in shape.chunks(recipe.tile):
            q_op, k_op = (x.operand(recipe, self._lowered("qk"), HEAD_DIM, heads) for x in (q, k))
            v_op = v.operand(recipe, self._lowered("pv"), SEQUENCE, heads)
            v_high = v.operand(recipe, False, SEQUENCE, heads) if high else v_op
            for rows, seen in shape.tiles(recipe.tile):
                keys = slice(seen)
                s = self._scores(q_op, k_op, rows, seen)
                p, row = _softmax(s)
                o = self._product(self._tile(p, "pv", HEAD_DIM), _rows(v_op, keys))
                lse[heads, :, rows] = row.view(-1, shape.group, row.shape[1] // shape.group)
                _put(out, heads, rows, o if mean is None else o + mean[heads])
                if high:
                    o = self._product(operand(p, recipe, False, HEAD_DIM), _rows(v_high, keys))
                if term is not None:
                    _put(term, heads, rows, o)
                del s, p, o
            del q_op, k_op, v_op, v_high
        return out, lse, out if recipe.row_term == "output" and term is None else term

    def backward(
        self, q: Kept, k: Kept, v: Kept, do: Kept, lse: Tensor, term: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV; `do` is the gradient of O, `lse` and `term` what the forward gave."""
        recipe, shape = self.recipe, self.shape
        dq = torch.empty(*do.data.shape[:-1], q.data.shape[-1], dtype=self.dtype, device=do.data.device)
        dk, dv = (do.data.new_empty(x.data.shape) for x in (k, v))
        use = 0  # number of the tile, for random bits
        for heads in shape.chunks(recipe.tile):
            q_again, q_op = q.operands(recipe, self._lowered("qk_again", "ds_q"), heads)
            do_v, do_p = do.operands(recipe, self._lowered("do_v", "p_do"), heads)
            k_again, k_op = k.operands(recipe, self._lowered("qk_again", "ds_k"), heads)
            v_op = v.operand(recipe, self._lowered("do_v"), HEAD_DIM, heads)
            dk_sum, dv_sum = (torch.zeros_like(x[0][:, 0], dtype=self.sums) for x in (k_op, v_op))
            for rows, seen in shape.tiles(recipe.tile):
                keys = slice(seen)
                p = self._probabilities(self._scores(q_again, k_again, rows, seen), lse[heads, :, rows])
                self._product(_t(self._tile(p, "p_do", SEQUENCE)), _rows(do_p, rows), add_to=dv_sum[:, keys])
                dp = self._product(_rows(do_v, rows), _t(_rows(v_op, keys)))
                ds = dp.sub_(self._row_term(p, dp, do, term, heads, rows)).mul_(p)
                del p, dp  # what a tile no longer needs is not held while dS is quantised
                k_part, q_part = _rows(k_op, keys), _rows(q_op, rows)
                _put(
                    dq, heads, rows, self._product(self._tile(ds, "ds_k", HEAD_DIM, use), k_part, self.scale)
                )
                self._product(
                    _t(self._tile(ds, "ds_q", SEQUENCE, use)), q_part, self.scale, add_to=dk_sum[:, keys]
                )
                use += 1
                del ds, k_part, q_part
            dk[heads], dv[heads] = dk_sum[:, None], dv_sum[:, None]
            del q_again, q_op, do_v, do_p, k_again, k_op, v_op, dk_sum, dv_sum
        return dq, dk, dv

    def _lowered(self, *names: str) -> bool | tuple[bool, ...]:
        lowered = tuple(name in self.recipe.lowered for name in names)
        return lowered if len(names) > 1 else lowered[0]

    def _tile(self, x: Tensor, name: str, axis: int, use: int = 0) -> Operand:
        """The operand that was made in a tile: P, or dS, whose rounding may be stochastic."""
        key = None
        if name in ROLES and self.recipe.ds_rounding == "stochastic":
            key = replace(self.key, role=ROLES[name], salt=self.key.salt << 32 | use)
        if not self._lowered(name) and self.recipe.high == "bf16" and x.dtype == torch.float32:
            return compiled(_rounding)(x), 1.0  # in one pass, with nothing held between
        values, factor = operand(x, self.recipe, self._lowered(name), axis, key=key)
        return values.to(self.sums), factor  # here, so that only one of the two is held

    def _product(self, a: Operand, b: Operand, factor: float = 1.0, add_to: Tensor | None = None) -> Tensor:
        return product(a, b, self.sums, factor, add_to)

    def _scores(self, q: Operand, k: Operand, rows: slice, seen: int) -> Tensor:
        """Masked scores of a tile, (heads, group x rows, keys)."""
        s = self._product(_rows(q, rows), _t(_rows(k, slice(seen))), self.scale)
        self.shape.mask(s.view(s.shape[0], self.shape.group, -1, seen), rows)
        return s

    def _probabilities(self, s: Tensor, lse: Tensor) -> Tensor:
        """P from the backward's scores, in place. Scores that are not the forward's need a sum of their
        own: the forward's would leave rows that do not sum to one."""
        if self.recipe.same_p:
            return s.sub_(lse.flatten(1, 2)[..., None]).exp_()
        return s.softmax(-1)

    def _row_term(
        self, p: Tensor, dp: Tensor, do: Kept, term: Tensor | None, heads: slice, rows: slice
    ) -> Tensor:
        """D, (heads, group x rows, 1)."""
        if term is None:
            return compiled(_row_sums)(p, dp)
        o, d = (x[heads, :, rows].flatten(1, 2).to(self.sums) for x in (term, do.data))
        return (o * d).sum(-1, keepdim=True)


def _rounding() -> Callable[[Tensor], Tensor]:
    return nearest_bf16


def _row_sums() -> Callable[[Tensor, Tensor], Tensor]:
    """Of products, (..., rows, 1), without the products in memory."""
    return lambda a, b: (a * b).sum(-1, keepdim=True)


def _softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """P in place of the scores, and the log-sum-exp (heads, rows, 1), with one exponential each."""
    largest = s.amax(-1, keepdim=True)
    total = s.sub_(largest).exp_().sum(-1, keepdim=True)
    return s.div_(total), total.log().add_(largest)


def _rows(x: Operand, positions: slice) -> Operand:
    """Some positions of every head of the group, (heads, group x positions, head_dim)."""
    return x[0][:, :, positions].flatten(1, 2), x[1]


def _put(whole: Tensor, heads: slice, rows: slice, tile: Tensor) -> None:
    place = whole[heads, :, rows]
    place.copy_(tile.view(place.shape))


def _t(x: Operand) -> Operand:
    return x[0].transpose(1, 2), x[1]
