"""State space duality: the recurrence of Mamba-2, a chunk of tokens at a time.

For each head, with a state S of (state, head_dim),

    S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T        y_t = C_t S_t + D x_t

so y_i = sum_{j<=i} exp(s_i - s_j) (C_i . B_j) u_j + D x_i with u = dt x and s the running sum of
dt A. Within a chunk that is a masked matrix product, as in attention; from chunk to chunk only S is
handed on (Dao and Gu 2024, arXiv 2405.21060, section 6).

The backward pass is written out, in a third of autograd's memory. It rests on s entering through
s_i - s_j alone, so that dL/ds_i = dL/dy_i . (y_i - D x_i) - dL/du_i . u_i; s starts anew in each
chunk, or rounding would build up in its sums.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# exp2 is three times as fast as exp on a CPU.
LOG2_E = math.log2(math.e)
# Both are far slower where the result is denormal; below 2^-64 a decay is nothing in any sum.
LEAST_EXPONENT = -64.0


def ssd_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk: int) -> Tensor:
    """Run the recurrence over all tokens; the result has the shape of x.

    x (batch, length, heads, head_dim); dt > 0 (batch, length, heads); A < 0 and D (heads,);
    B and C (batch, length, groups, state), each for the heads of its group. All of one dtype, in
    which everything is computed, also under autocast. `chunk` decides time and memory alone.
    """
    length = x.shape[1]
    chunk = min(chunk, length)
    missing = -length % chunk
    if not missing:
        return _Scan.apply(x, dt, A, B, C, D, chunk)
    x, B, C = (F.pad(t, (0, 0, 0, 0, 0, missing)) for t in (x, B, C))
    dt = F.pad(dt, (0, 0, 0, missing))  # tokens of dt = 0 change no state
    return _Scan.apply(x, dt, A, B, C, D, chunk)[:, :length]


class _Scan(Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, D, chunk):
        with torch.autocast(x.device.type, enabled=False):
            cut = _Chunks(x, dt, A, B, C, chunk)
            inside = cut.decayed(cut.CB) @ cut.u.transpose(1, 2)  # c h q p
            states = cut.B.mT @ cut.by_group(cut.u * cut.to_end)  # c g n k
            before = cut.carry(states)
            y = cut.by_head(cut.C @ before).mul_(cut.from_start).add_(inside.transpose(1, 2))
            y = y.reshape(x.shape).addcmul_(x, D[:, None])
        ctx.save_for_backward(x, dt, A, B, C, D, before, y)
        ctx.chunk = chunk
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, dt, A, B, C, D, before, y = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            cut = _Chunks(x, dt, A, B, C, ctx.chunk)
            dy_chunks = dy.reshape(cut.u.shape)
            dy_heads = dy_chunks.transpose(1, 2).contiguous()  # c h q p
            du_inside = cut.decayed(cut.CB).mT @ dy_heads  # c h q p
            dCB = cut.undecayed(dy_heads @ cut.u.transpose(1, 2).mT)  # c g q q
            dy_states = cut.by_group(dy_chunks * cut.from_start)  # c g q k
            after = cut.carry(cut.C.mT @ dy_states, reverse=True)  # dL/dstates, c g n k
            u_states = cut.by_group(cut.u * cut.to_end)  # c g q k
            # Transposed, since a batched product with few columns is slow.
            dB = (after @ u_states.mT).mT + dCB.mT @ cut.C  # c g q n
            dC = (before @ dy_states.mT).mT + dCB @ cut.B
            du = cut.by_head(cut.B @ after).mul_(cut.to_end).add_(du_inside.transpose(1, 2))
            du = du.reshape(x.shape)
            x_dy, x_du = torch.linalg.vecdot(x, dy), torch.linalg.vecdot(x, du)  # batch length h
            ds = torch.linalg.vecdot(y, dy) - D * x_dy - dt * x_du
            da = cut.sum_of_later(ds, cut.state_gradient(before, after))
            dx = du.mul_(dt[..., None]).addcmul_(dy, D[:, None])
            dB, dC = (t.transpose(1, 2).reshape(B.shape) for t in (dB, dC))
            return dx, x_du + da * A, (da * dt).sum((0, 1)), dB, dC, x_dy.sum((0, 1)), None


class _Chunks:
    """The inputs cut in chunks, with the decays between tokens.

    In shapes, c counts the chunks of all sequences, q the tokens of one chunk, h heads, p channels
    of a head, g groups, k channels of a group (of all its heads), n the state.
    """

    def __init__(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, q: int) -> None:
        self.batch, length, h, p = x.shape
        g, n = B.shape[2:]
        c = self.batch * length // q
        self.by_heads = (c, q, h, p)
        self.by_groups = (c, q, g, h // g * p)
        self.u = (x * dt[..., None]).reshape(c, q, h, p)
        self.B, self.C = (t.reshape(c, q, g, n).transpose(1, 2) for t in (B, C))  # c g q n
        self.CB = (self.C @ self.B.mT).tril_()  # c g q q
        s = (dt * (A * LOG2_E)).reshape(c, q, h).cumsum(1)
        self.from_start = _decay(s.clone())[..., None]  # c q h 1: to a token
        self.to_end = _decay(s[:, -1:] - s)[..., None]  # c q h 1: from a token
        self.whole = _decay(s[:, -1].clone())  # c h
        s = s.transpose(1, 2).contiguous()  # c h q
        within = _decay(s[..., :, None] - s[..., None, :])  # c h q q, of use where j <= i
        self.within = within.view(c, g, h // g, q, q)

    def decayed(self, CB: Tensor) -> Tensor:
        """A group's products of tokens with each head's decays: c g q q to c h q q."""
        return (self.within * CB[:, :, None]).flatten(1, 2)

    def undecayed(self, gradient: Tensor) -> Tensor:
        """The gradient of what `decayed` takes, from that of its result (which is overwritten)."""
        return gradient.view(self.within.shape).mul_(self.within).sum(2).tril_()

    def by_group(self, t: Tensor) -> Tensor:
        """c q h p to c g q k."""
        return t.reshape(self.by_groups).transpose(1, 2)

    def by_head(self, t: Tensor) -> Tensor:
        """c g q k to c q h p."""
        return t.transpose(1, 2).reshape(self.by_heads)

    def carry(self, states: Tensor, reverse: bool = False) -> Tensor:
        """What reaches each chunk from those before it, or after it: c g n k to the same."""
        c, g, n, _ = states.shape
        h, p = self.by_heads[2:]
        states = states.view(self.batch, -1, g, n, h // g, p)
        whole = self.whole.view(self.batch, -1, g, 1, h // g, 1)
        order = range(states.shape[1])[:: -1 if reverse else 1]
        carried = torch.empty_like(states)
        carried[:, order[0]] = 0
        for here, there in pairwise(order):
            torch.addcmul(states[:, here], carried[:, here], whole[:, here], out=carried[:, there])
        return carried.view(c, g, n, -1)

    def state_gradient(self, before: Tensor, after: Tensor) -> Tensor:
        """dL/ds_end through the state at each chunk's end, which is the next one's start."""
        before, after = (t.unflatten(0, (self.batch, -1)) for t in (before, after))
        per_channel = torch.linalg.vecdot(before[:, 1:], after[:, :-1], dim=-2)  # batch c-1 g k
        return per_channel.reshape(*per_channel.shape[:2], *self.by_heads[2:]).sum(-1)

    def sum_of_later(self, ds: Tensor, of_state: Tensor) -> Tensor:
        """dL/d(dt A) from dL/ds, (batch, length, h) both: s has it from its token on."""
        ds = ds.reshape(self.batch, -1, *self.by_heads[1:3])
        ds[:, :-1, -1] += of_state
        return ds.flip(2).cumsum(2).flip(2).flatten(1, 2)


def _decay(exponent: Tensor) -> Tensor:
    """2^exponent, in place."""
    return exponent.clamp_(LEAST_EXPONENT, 0).exp2_()
