"""The emulated linear: what every other backend is judged by."""

from torch import Tensor, nn

from fp4repro.backends.backend import Backend, Results, forward_and_backward
from fp4repro.layers import QuantLinear, convert, set_step
from fp4repro.recipes import KeepBF16, recipe


def emulated_layer(weight: Tensor, seed: int = 0) -> QuantLinear:
    """A linear (out, in) without bias under the whole NVFP4 recipe, at step 0."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    convert(layer, recipe("nvfp4").replace(keep=KeepBF16()), seed)
    set_step(layer, 0)
    return layer


def linear(x: Tensor, weight: Tensor, dy: Tensor) -> Results:
    """y, dx and dw of the emulated linear, on the device of `x`."""
    return forward_and_backward(emulated_layer(weight), x, dy)


EMULATION = Backend("emulation", linear)
