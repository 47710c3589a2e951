"""What a way to multiply NVFP4 is: a linear's forward and backward under the whole recipe."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

Results = tuple[Tensor, Tensor, Tensor]  # y, dx, dw


@dataclass(frozen=True)
class Backend:
    """A way to run a linear under the NVFP4 recipe.

    linear           x (T, K), weight (N, K), dy (T, N), all BF16, to y (T, N), dx (T, K), dw (N, K);
                     raises, saying why, where it cannot run
    own_random_bits  whether gradients are rounded with other random bits than the emulation's
    """

    name: str
    linear: Callable[[Tensor, Tensor, Tensor], Results]
    own_random_bits: bool = False


def forward_and_backward(
    layer: nn.Module, x: Tensor, dy: Tensor, around_forward: AbstractContextManager | None = None
) -> Results:
    """One forward, within `around_forward` if given, and one backward of a layer without bias."""
    x = x.clone().requires_grad_()
    with around_forward or nullcontext():
        y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad
