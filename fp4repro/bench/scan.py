"""The selective scan's benchmark: ours beside the one in plain torch that transformers falls back to.

Forward and backward in float32, in interleaved rounds: the scan alone, and the whole Mamba-2 mixer of the
tiny hybrid with the same weights. A rival whose output is another is not run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4repro.bench.core import Bar, Measured
from fp4repro.bench.timing import interleaved, ratio
from fp4repro.config import MODELS
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.models.nemotron_h import to_nemotron_h
from fp4repro.models.scan import choose_scan

EXPERIMENT = "bench_scan"
SCAN, MIXER = "scan", "mamba-mixer"
THEIRS = "transformers"
SEED = 0
TOLERANCE = 1e-3  # of the greatest value


@dataclass(frozen=True)
class Sizes:
    """The laptop's micro-batch."""

    batch: int = 8
    context: int = 128


BARS = tuple(
    Bar(
        f"{what}-{THEIRS}",
        f"{words}: transformers' fallback against ours",
        what,
        "ratio_to_ours",
        1.0,
        at_least=True,
    )
    for what, words in ((SCAN, "selective scan"), (MIXER, "Mamba-2 mixer"))
)

Pairs = dict[str, Callable[[], Tensor]]


def workloads(sizes: Sizes) -> tuple[Pairs, dict[str, Tensor]]:
    """Ours and theirs, which give an output; and the inputs whose gradients are asked for. Raises
    ImportError where transformers is not there or has moved its scan."""
    from transformers.models.nemotron_h import modeling_nemotron_h as theirs

    config = ModelConfig.from_yaml(MODELS / "tiny.yaml")
    model = HybridModel(config, generator=torch.Generator().manual_seed(SEED))
    ours = next(block.mixer for block in model.blocks if block.kind == "mamba")
    settings, weights = to_nemotron_h(config, model.state_dict())
    rival = theirs.NemotronHMamba2Mixer(theirs.NemotronHConfig(**settings), layer_idx=0)
    prefix = "model.layers.0.mixer."
    rival.load_state_dict({n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)})
    draw = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(sizes.batch, sizes.context, *shape, generator=draw)

    x = {
        "hidden": normal(config.width),
        "x": normal(config.mamba_heads, config.mamba_head_dim),
        "dt": normal(config.mamba_heads).sigmoid() / 10,
        "B": normal(config.groups, config.state),
        "C": normal(config.groups, config.state),
        "A": -torch.linspace(1, 16, config.mamba_heads),
        "D": torch.ones(config.mamba_heads),
    }
    x = {name: tensor.requires_grad_() for name, tensor in x.items()}
    scan = choose_scan("cpu").scan
    seen = [x[name] for name in ("x", "dt", "A", "B", "C")]
    pairs = {
        SCAN: lambda: scan(*seen, x["D"], config.chunk),
        f"{SCAN}-{THEIRS}": lambda: theirs.mamba2_chunk_scan(*seen, config.chunk, D=x["D"]),
        MIXER: lambda: ours(x["hidden"]),
        f"{MIXER}-{THEIRS}": lambda: rival(x["hidden"]),
    }
    return pairs, x


def with_backward(forward: Callable[[], Tensor], inputs: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    gradient = torch.ones_like(forward())

    def run() -> Tensor:
        for tensor in inputs.values():
            tensor.grad = None
        y = forward()
        y.backward(gradient)
        return y.detach()

    return run


def measure(sizes: Sizes, rounds: int) -> list[Measured]:
    """Every bar, in the table's order."""
    try:
        pairs, inputs = workloads(sizes)
    except (ImportError, AttributeError) as error:
        return [Measured(bar, None, why_not=f"no fallback in transformers: {error}") for bar in BARS]
    functions = {name: with_backward(forward, inputs) for name, forward in pairs.items()}
    wrong = {bar.setting: _apart(functions[bar.setting](), functions[bar.against]()) for bar in BARS}
    timings = interleaved(functions, rounds)
    return [
        Measured(bar, None, why_not=f"its output is off by {wrong[bar.setting]:.2g} of the greatest value")
        if wrong[bar.setting] > TOLERANCE
        else Measured(bar, ratio(timings[bar.setting], timings[bar.against]), timings[bar.setting].best)
        for bar in BARS
    ]


def _apart(theirs: Tensor, ours: Tensor) -> float:
    return float((theirs - ours).abs().max() / ours.abs().max())


def conditions(sizes: Sizes, threads: int, rounds: int) -> str:
    """How the figures were taken, for the notes."""
    return (
        f"tiny hybrid, {sizes.batch} x {sizes.context} tokens, float32, forward and backward; {threads} "
        f"threads; best of {rounds} interleaved rounds; ours: {choose_scan('cpu').name}"
    )
