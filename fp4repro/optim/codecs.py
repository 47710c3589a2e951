"""Optimizer states in 4 bits: from values to stored fields and back, as functions of plain tensors.

    encode  y = map(x);  centre = BF16(mean or max of y's tile);  z = (y - centre) H;  codes, scales of z
    decode  y = z H + centre, at least floor * centre;  x = map's inverse of y

The order (root, centre, rotation) is that of arXiv 2607.04422; the floor is ours: without it an element
that comes back as zero gives an update of m / epsilon. States come flat, as float32 (blocks, 16), several
tensors one after the other; `owner` (blocks,) numbers the tensor of each block, whose amax scales it. The
arithmetic is the core's own (`core.kernels`), so that a state is what `fp4repro.quantize` would have stored.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp4repro.core import kernels
from fp4repro.core.rounding import nearest_bf16
from fp4repro.core.tensor import kernel_format, load_scales, store_scales
from fp4repro.optim.shards import largest_of
from fp4repro.recipes.optimizer import BLOCK, Linear4, StateCodec

TINY = 1e-38  # below it, what is divided or taken the logarithm of is as good as zero
EPS = 1e-8  # of the inverse square root


def exact_sqrt(x: Tensor) -> Tensor:
    """The float32 root, rounded once: torch's own on a CPU is off by one bit in a sixth of all numbers."""
    return x.double().sqrt().float()


_MAPS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "linear": (lambda x: x, lambda y: y),
    "sqrt": (exact_sqrt, torch.square),
    "fourth-root": (lambda x: exact_sqrt(exact_sqrt(x)), lambda y: y.square().square()),
    "log2": (lambda x: x.clamp_min(TINY).log2(), torch.exp2),
    "inverse-sqrt": (
        lambda x: 1 / (exact_sqrt(x) + EPS),
        lambda y: (1 / y.clamp_min(TINY) - EPS).clamp_min(0).square(),
    ),
}


def fields_of(codec: StateCodec | None) -> tuple[str, ...]:
    """Names of what is stored, in the order in which `encode` returns it."""
    if codec is None:
        return ("values",)
    if isinstance(codec.format, Linear4):
        return ("codes", "scales")
    return ("codes", "scales", "amax", *(("centre",) if codec.centre else ()))


def rotate(x: Tensor, size: int) -> Tensor:
    """Runs of `size` values, whatever x's shape, times the symmetric Hadamard matrix: its own inverse.

    By sums and differences in stages: their order, unlike a matrix product's, is the same everywhere."""
    if not size:
        return x
    half, t = 1, x
    while half < size:
        pairs = t.reshape(-1, size // (2 * half), 2, half)
        t = pairs.flip(2) + pairs * pairs.new_tensor([1.0, -1.0])[:, None]
        half *= 2
    return (t * size**-0.5).view(x.shape)


def transform(x: Tensor, codec: StateCodec) -> tuple[Tensor, Tensor | None]:
    """Values to what is coded, of the same shape, and the BF16 centres (tiles, 1)."""
    y = _MAPS[codec.map][0](x)
    if codec.hadamard_first:
        y = rotate(y, codec.hadamard)
    centre = None
    if codec.centre:
        tiles = y.reshape(-1, codec.tile)
        if codec.centre == "mean":
            near = nearest_bf16(kernels.pairwise_sum(tiles, 1) * (1 / codec.tile))
        else:
            near = _down_to_bf16(tiles.amax(1, keepdim=True))
        z, centre = tiles - near, near.bfloat16()
        y = (z.clamp_min(-codec.log_range) if codec.log_range else z).view(x.shape)
    return y if codec.hadamard_first else rotate(y, codec.hadamard), centre


def restore(z: Tensor, centre: Tensor | None, codec: StateCodec) -> Tensor:
    """The inverse of `transform`, with the bounds that keep a second moment safe."""
    y = z if codec.hadamard_first else rotate(z, codec.hadamard)
    if centre is not None:
        tiles, mean = y.reshape(-1, codec.tile), centre.float()
        if codec.centre == "max":
            tiles = tiles.clamp_max(0)
        tiles = tiles + mean
        if codec.floor:
            tiles = torch.maximum(tiles, mean * codec.floor)
        y = tiles.view(z.shape)
    if codec.hadamard_first:
        y = rotate(y, codec.hadamard)
    if not codec.signed and codec.map != "log2":
        y = y.clamp_min(0)
    return _MAPS[codec.map][1](y)


def _down_to_bf16(x: Tensor) -> Tensor:
    """The value of BF16 at or below x: a maximum that is rounded up would let a state grow from nothing."""
    near = nearest_bf16(x)
    step = torch.where(near > x, near.abs().clamp_min(TINY) * 2.0**-8, 0.0)
    return nearest_bf16(near - step)


def encode(
    x: Tensor,
    codec: StateCodec | None,
    owner: Tensor,
    lengths: Tensor,
    noise: Tensor | None = None,
    groups: Sequence = (),
) -> tuple[Tensor, ...]:
    """Fields of the values x (blocks, 16) of several tensors of `lengths` (tensors,) blocks each.

    noise   int32 (2,), the words of a RandomKey, where codes are rounded stochastically
    groups  process groups over which the tensors are sharded: amax is that of the whole tensor
    """
    if codec is None:
        return (x,)
    z, centre = transform(x, codec)
    if isinstance(codec.format, Linear4):
        return _encode_linear(z, codec.format)
    fmt = kernel_format(codec.format)
    block_amax = z.abs().amax(-1, keepdim=True)
    amax = torch.segment_reduce(block_amax.view(-1), "max", lengths=lengths, initial=0.0)
    amax = largest_of(amax, groups)
    s, e, _ = kernels.make_scales(fmt)(block_amax, amax[owner][:, None])
    random, bits = None, 0
    if codec.rounding == "stochastic":
        bits = 8
        like = torch.empty(z.numel() // 4, dtype=torch.int8, device=z.device)
        random = kernels.make_noise()(like, noise).view(torch.uint8).view(z.shape)
    one = kernels.make_apply(fmt, "codes", bits, False)(z, s, e, s, random)
    codes = kernels.make_pack()(one.view(torch.int16).view(-1)).view(-1, BLOCK // 2)
    stored = codes, store_scales(s, codec.format), amax
    return stored if centre is None else (*stored, centre)


def decode(stored: tuple[Tensor, ...], codec: StateCodec | None, owner: Tensor) -> Tensor:
    """Values (blocks, 16) of `encode`'s fields."""
    if codec is None:
        return stored[0]
    codes, scales = stored[:2]
    one = kernels.make_unpack()(codes.reshape(-1)).view(torch.uint8).view(-1, BLOCK)
    if isinstance(codec.format, Linear4):
        return _decode_linear(one, scales, codec.format)
    tensor_decode = kernels.tensor_scales(stored[2], codec.format)[1]
    values = kernels.make_decode(kernel_format(codec.format), torch.float32, True, False)
    z = values(one, load_scales(scales, codec.format), tensor_decode[owner][:, None])
    return restore(z, stored[3] if codec.centre else None, codec)


def encode_matrix(
    x: Tensor, codec: StateCodec | None, noise: Tensor | None = None, groups: Sequence = ()
) -> dict[str, Tensor]:
    """The fields, by name, of one tensor whose rows are whole blocks."""
    blocks = x.reshape(-1, BLOCK)
    owner = torch.zeros(len(blocks), dtype=torch.int64, device=x.device)
    lengths = torch.tensor([len(blocks)], device=x.device)
    stored = (t.clone() if t is blocks else t for t in encode(blocks, codec, owner, lengths, noise, groups))
    return dict(zip(fields_of(codec), stored, strict=True))


def decode_matrix(fields: dict[str, Tensor], codec: StateCodec | None, shape: Sequence[int]) -> Tensor:
    """The values of `encode_matrix`'s fields."""
    stored = tuple(fields[name] for name in fields_of(codec))
    owner = torch.zeros(len(stored[0]), dtype=torch.int64, device=stored[0].device)
    return decode(stored, codec, owner).view(*shape)


def _encode_linear(x: Tensor, fmt: Linear4) -> tuple[Tensor, Tensor]:
    blocks = x.reshape(-1, fmt.block)
    scales = blocks.amax(-1, keepdim=True)
    steps = (blocks / scales.clamp_min(TINY) * 16).round().clamp(1, 16) - 1
    one = steps.to(torch.uint8).view(-1, BLOCK)
    return kernels.make_pack()(one.view(torch.int16).view(-1)).view(-1, BLOCK // 2), scales


def _decode_linear(one: Tensor, scales: Tensor, fmt: Linear4) -> Tensor:
    steps = (one.to(torch.float32) + 1) * (1 / 16)
    return (steps.view(-1, fmt.block) * scales).view(-1, BLOCK)
