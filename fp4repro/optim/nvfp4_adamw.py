"""AdamW (arXiv 1711.05101) whose moments are stored in 4 bits, after Full-Stack FP4 (arXiv 2607.04422).

A parameter's states are coded where it has two axes, 4,096 elements or more, and rows of whole tiles; the
others keep FP32 states in torch's own fused step, and `kept` says why. Sharded parameters (FSDP2's DTensor)
are stepped on each rank's shard where they are cut along their first axis, which leaves tiles whole; amax
is that of the whole parameter, so that a shard's states are the bits that an unsharded one would have.
"""

import math
from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from fp4repro.core.random import RandomKey
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.errors import Fp4ReproError
from fp4repro.optim.buckets import MOMENTS, Bucket, grouped
from fp4repro.optim.codecs import encode_matrix
from fp4repro.optim.shards import local, sharded_axes
from fp4repro.recipes.optimizer import FIRST_MOMENT, SECOND_MOMENT, Linear4, StateCodec

SMALLEST = 4096  # elements


def why_fp32(p: Tensor, codecs: Iterable[StateCodec | None]) -> str:
    """Why a parameter's states stay FP32; empty where they are coded."""
    multiple = math.lcm(*(codec.multiple for codec in codecs if codec is not None))
    if not any(codecs):
        return "no state is coded"
    if p.ndim != 2:
        return f"has {p.ndim} axes, not 2"
    if p.dtype != torch.float32:
        return f"is {p.dtype}, not float32"
    if p.numel() < SMALLEST:
        return f"has {p.numel()} elements, fewer than {SMALLEST}"
    if p.shape[1] % multiple:
        return f"has rows of {p.shape[1]}, not a multiple of {multiple}"
    if any(sharded_axes(p)):
        return f"is sharded along axis {max(sharded_axes(p))}, which cuts its tiles"
    return ""


class NVFP4AdamW(torch.optim.Optimizer):
    """AdamW with coded states; arguments as of `torch.optim.AdamW`, and

    first, second  codecs of the moments, None for FP32
    seed           of stochastic rounding, where a codec asks for it
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        first: StateCodec | None = FIRST_MOMENT,
        second: StateCodec | None = SECOND_MOMENT,
        seed: int = 0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise Fp4ReproError(
                f"AdamW needs lr {lr}, eps {eps} and weight_decay {weight_decay} of 0 or more and betas "
                f"{betas} in [0, 1)"
            )
        self.codecs = (first, second)
        self.seed = seed
        self._buckets: dict[int, tuple[tuple, list[Bucket]]] = {}
        self._split: dict[int, tuple[tuple, list[Tensor], list[Tensor]]] = {}
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @property
    def kept(self) -> dict[str, str]:
        """Parameters whose states stay FP32, by name (or number), and why."""
        reasons = {name: why_fp32(p, self.codecs) for name, p in self.named()}
        return {name: why for name, why in reasons.items() if why}

    def named(self) -> Iterable[tuple[str, Tensor]]:
        """All parameters with the names they were given, or numbers."""
        number = 0
        for group in self.param_groups:
            names = group.get("param_names") or [
                f"parameter {number + i}" for i in range(len(group["params"]))
            ]
            yield from zip(names, group["params"], strict=True)
            number += len(names)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            self._step_group(number, group)
        return loss

    def _step_group(self, number: int, group: dict) -> None:
        self._step_adamw(number, group, with_gradients(group))

    def _step_adamw(self, number: int, group: dict, params: list[Tensor]) -> None:
        whole, coded = self._sorted(number, params)
        if whole:
            self._step_fp32(group, whole)
        for bucket in self._buckets_of(number, coded):
            states = [self.state[p] for p in bucket.params]
            step = states[0]["step"] + 1
            for state in states:
                state["step"] = step
            bucket.step(hyper_of(group, step), RandomKey(self.seed, step))

    def _sorted(self, number: int, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Those with FP32 states and those with coded ones, remembered while they are the same."""
        key, found = tuple(id(p) for p in params), self._split.get(number)
        if found is None or found[0] != key:
            whole = [p for p in params if why_fp32(p, self.codecs)]
            coded = [p for p in params if not why_fp32(p, self.codecs)]
            found = self._split[number] = key, whole, coded
        return found[1], found[2]

    def _buckets_of(self, number: int, params: list[Tensor]) -> list[Bucket]:
        """The group's buckets; made anew where other parameters have gradients than the step before."""
        for p in params:
            self.state[p].setdefault("step", 0)
        steps = [self.state[p]["step"] for p in params]
        known, buckets = self._buckets.get(number, ((), []))
        if known != (key := tuple(id(p) for p in params)) or len(set(steps)) > 1:
            buckets = []
            for step in dict.fromkeys(steps):
                together = [p for p, s in zip(params, steps, strict=True) if s == step]
                for members in grouped(together):
                    states = [self.state[p] for p in members]
                    buckets.append(Bucket(members, states, self.codecs, 1000 * number + len(buckets)))
            self._buckets[number] = key, buckets
        return buckets

    def _fp32_states(self, params: list[Tensor]) -> list[dict]:
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32)
                for moment in MOMENTS:
                    self.state[p][moment] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [self.state[p] for p in params]

    @torch.no_grad()
    def begin(self) -> None:
        """Give every parameter that has no state the one before its first step, to read a saved one into."""
        for number, group in enumerate(self.param_groups):
            self._begin_group(number, group)

    def _begin_group(self, number: int, group: dict) -> None:
        whole, coded = self._sorted(number, group["params"])
        self._fp32_states(whole)
        self._buckets_of(number, coded)

    def row(self, p: Tensor, moment: str, field: str) -> int:
        """Entries of one row of a coded moment's field; 0 for amax, of which a parameter has one."""
        codec = self.codecs[MOMENTS.index(moment)]
        one = encode_matrix(torch.zeros(1, p.shape[1]), codec, torch.zeros(2, dtype=torch.int32))
        return 0 if field == "amax" else one[field].numel()

    def _step_fp32(self, group: dict, params: list[Tensor]) -> None:
        states = self._fp32_states(params)
        steps = [state["step"].to(local(p).device) for p, state in zip(params, states, strict=True)]
        torch_adamw(
            [local(p) for p in params],
            [local(p.grad) for p in params],
            *([local(s[moment]) for s in states] for moment in MOMENTS),
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for state, step in zip(states, steps, strict=True):
            state["step"] = step

    def stored(self, p: Tensor, moment: str) -> QuantizedTensor:
        """A coded moment ("exp_avg" or "exp_avg_sq") as the core's tensor: of the transformed values,
        where its codec transforms them."""
        codec = self.codecs[MOMENTS.index(moment)]
        if codec is None or isinstance(codec.format, Linear4) or why_fp32(p, self.codecs):
            raise Fp4ReproError(f"this parameter's {moment} is not stored in NVFP4")
        fields, shape = self.state[p][moment], local(p).shape
        codes = fields["codes"].view(shape[0], -1)
        scales = fields["scales"].view(shape[0], -1)
        return QuantizedTensor(codes, scales, fields["amax"][0], codec.format, shape)

    def state_bits(self) -> dict[str, float]:
        """Stored bits an element of each moment, over the parameters whose states are coded."""
        bits = dict.fromkeys(MOMENTS, 0)
        elements = 0
        for _, p in self.named():
            if self.state.get(p) and not why_fp32(p, self.codecs):
                elements += local(p).numel()
                for moment in MOMENTS:
                    bits[moment] += sum(8 * t.nbytes for t in self.state[p][moment].values())
        return {moment: total / elements for moment, total in bits.items()} if elements else {}

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, which would turn codes and scales into floats: these are kept as they were saved."""
        super().load_state_dict(state_dict)
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        theirs = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for p, number in zip(ours, theirs, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, dict):
                    device = local(p).device
                    self.state[p][name] = {k: t.detach().clone().to(device) for k, t in value.items()}
        self.forget_buckets()

    def forget_buckets(self) -> None:
        """To be called by whoever puts other tensors into `state`: the next step takes these over."""
        self._buckets, self._split = {}, {}

    def __getstate__(self) -> dict:
        own = {name: value for name, value in self.__dict__.items() if name in self._pickled}
        return super().__getstate__() | own | {"_buckets": {}, "_split": {}}

    _pickled = ("codecs", "seed")


def with_gradients(group: dict) -> list[Tensor]:
    """The group's parameters that have a gradient; sparse and complex ones are refused."""
    params = [p for p in group["params"] if p.grad is not None]
    for p in params:
        if p.grad.is_sparse:
            raise Fp4ReproError(
                f"a gradient of shape {tuple(p.shape)} is sparse, which 4-bit states cannot follow: use "
                "nn.Embedding(sparse=False), or torch.optim.SparseAdam for this parameter"
            )
        if p.is_complex():
            raise Fp4ReproError(f"a parameter of shape {tuple(p.shape)} is complex: its states have no codec")
    return params


def hyper_of(group: dict, step: int) -> tuple[float, ...]:
    """`buckets.make_step`'s numbers for step `step`, counted from 1."""
    beta1, beta2 = group["betas"]
    rate, decay = float(group["lr"]), group["weight_decay"]
    unbias = 1 / math.sqrt(1 - beta2**step)
    return 1 - rate * decay, 1 - beta1, beta2, 1 - beta2, rate / (1 - beta1**step), unbias, group["eps"]
