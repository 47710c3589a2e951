"""LoRA-SVD: errors by rank against the law of captured energy, its options, and what the side path costs.

Everything goes through the layer that trains. The law: x - Q(x) is nearly white within a block, so the
error of x Q(R) and that of Q(x) (R - Q(R)) both scale with the norm of R, and with eta the share of W's
squared norm in the subspace, err(r) / err(0) = sqrt(1 - eta). Spectra sigma_i ~ i^-p of 512 x 512 stand
in for trained weights; with a run given, its own weights and activations follow.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import fp4repro
from fp4repro import KeepBF16, RandomKey, Recipe
from fp4repro.bench.timing import Ratio, interleaved, ratio
from fp4repro.config import Scale, load_scale
from fp4repro.errors import Fp4ReproError
from fp4repro.fidelity import tensors
from fp4repro.fidelity.subject import of_run
from fp4repro.layers.lora_svd import leading_directions
from fp4repro.recipes import LoraSVD
from fp4repro.report import projection_tables as names
from fp4repro.report.projection_tables import setting
from fp4repro.report.schema import Row, write_rows
from fp4repro.train import provenance

SIZE, TOKENS = 512, 1024
SPECTRA = {"gaussian": None, "i^-0.5": 0.5, "i^-0.7": 0.7}
RANKS = (4, 16, 32, 64)
TRAINED_RANKS = (4, 8, 16)
DRIFTS = (0.1, 0.3, 0.6, 1.0)
TYPICAL, RANK = "i^-0.5", 16  # where one setting varies alone
SKETCHES = 5  # means over so many draws
POWER_ITERATIONS, OVERSAMPLING = (0, 1, 2, 3), (0, 4, 16)
FP4_RATE = 4  # of BF16's: arXiv 2509.25149, table 1 has FP4 at twice FP8, which is twice BF16
ROUNDS = 7

Figures = Iterator[tuple[str, dict[str, float | dict]]]  # a setting, and values or fields of rows by metric
BASE = fp4repro.recipe("nvfp4").replace(keep=KeepBF16())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=Path, required=True, help="scale file, configs/scales/*.yaml")
    parser.add_argument("--run", dest="folder", type=Path, help="folder of a finished run, for its weights")
    parser.add_argument("--data", type=Path, help="folder of token files that the run was trained on")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")


def run(arguments: argparse.Namespace) -> None:
    if bool(arguments.folder) != bool(arguments.data):
        raise Fp4ReproError("--run and --data belong together: give both, or neither for synthetic data only")
    os.environ.setdefault("FP4REPRO_COMPILE", "0")  # a dozen kernels, each for a second's work in all
    scale = load_scale(arguments.scale)
    torch.set_num_threads(scale.threads)
    where = provenance.columns(scale.scale, torch.device("cpu"))
    figures = list(synthetic())
    if arguments.folder:
        figures += trained(arguments.folder, arguments.data, scale)
    write_rows(arguments.out, (row for name, of in figures for row in _rows(name, of, where)))


def synthetic() -> Figures:
    yield from ratio_law()
    yield from sketches()
    yield from stale_bases()
    yield from options()
    yield from costs()


def _rows(name: str, figures: dict[str, float | dict], where: dict[str, str]) -> Iterator[Row]:
    for metric, value in figures.items():
        more = value if isinstance(value, dict) else {"value": value, "n": 1}
        yield Row(
            experiment=names.EXPERIMENT,
            setting=name,
            metric=metric,
            unit=names.UNITS[metric],
            **(more | where),
        )


def weight(spectrum: str, size: int = SIZE) -> Tensor:
    """A matrix of that spectrum, of root mean square 1 / sqrt(size)."""
    w = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    if SPECTRA[spectrum] is not None:
        u, _, v = torch.linalg.svd(w)
        w = u * torch.arange(1, size + 1) ** -SPECTRA[spectrum] @ v
    return w * (size**0.5 / w.norm())


def operands(tokens: int = TOKENS, size: int = SIZE) -> tuple[Tensor, Tensor]:
    """x and dy, Gaussian."""
    return torch.randn(2, tokens, size, generator=torch.Generator().manual_seed(1)).unbind()


def layer_of(w: Tensor, side: LoraSVD | None, base: Recipe = BASE) -> nn.Linear:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
    fp4repro.convert(layer, base.replace(lora_svd=side))
    fp4repro.set_step(layer, 0)
    return layer


def errors(layer: nn.Linear, w: Tensor, x: Tensor, dy: Tensor) -> dict[str, float]:
    """Relative errors of the layer's three products to those of W."""
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(dy)
    pairs = {
        names.OUTPUT: (y.detach(), x.detach() @ w.T),
        names.GRADIENT: (x.grad, dy @ w),
        names.WGRAD: (layer.weight.grad, dy.T @ x.detach()),
    }
    return {name: ((got - want).norm() / want.norm()).item() for name, (got, want) in pairs.items()}


def energy(w: Tensor, rank: int) -> float:
    """Of the exact leading directions."""
    square = torch.linalg.svdvals(w.double()) ** 2
    return (square[:rank].sum() / square.sum()).item()


def ratio_law() -> Figures:
    x, dy = operands()
    for spectrum in SPECTRA:
        w = weight(spectrum)
        none = errors(layer_of(w, None), w, x, dy)
        yield setting(names.RATIO_LAW, spectrum, "rank-0"), _law(none, none, 0.0)
        for rank in RANKS:
            some = errors(layer_of(w, LoraSVD(rank)), w, x, dy)
            yield setting(names.RATIO_LAW, spectrum, f"rank-{rank}"), _law(some, none, energy(w, rank))


def _law(some: dict[str, float], none: dict[str, float], eta: float) -> dict[str, float]:
    ratios = {
        names.OUTPUT_RATIO: some[names.OUTPUT] / none[names.OUTPUT],
        names.GRADIENT_RATIO: some[names.GRADIENT] / none[names.GRADIENT],
    }
    return {names.ENERGY: eta, **some, **ratios, names.LAW: (1 - eta) ** 0.5}


def trained(folder: Path, data_folder: Path, scale: Scale) -> Figures:
    """Weights and inputs of a trained model's linears; means over the linears that have the rank."""
    subject = of_run(folder, data_folder, scale, tensors.TOKENS)
    seen: dict[str, list[Tensor]] = {}
    tensors.visit_tensors(
        subject.linears, subject.loss, lambda kind, _, t: seen.setdefault(kind, []).append(t.float())
    )
    pairs = list(zip(seen[tensors.WEIGHTS], seen[tensors.ACTIVATIONS], strict=True))
    none = [_output_error(w, x, None) for w, x in pairs]
    for rank in TRAINED_RANKS:
        etas = [energy(w, rank) for w, _ in pairs]
        some = [_output_error(w, x, LoraSVD(rank)) for w, x in pairs]
        columns = {
            names.ENERGY: etas,
            names.OUTPUT: some,
            names.OUTPUT_RATIO: [a / b for a, b in zip(some, none, strict=True)],
            names.LAW: [(1 - eta) ** 0.5 for eta in etas],
        }
        note = f"{len(pairs)} linears of {subject.note}"
        means = {m: {"value": sum(v) / len(v), "n": 1, "note": note} for m, v in columns.items()}
        yield setting(names.TRAINED, f"rank-{rank}"), means


@torch.no_grad()
def _output_error(w: Tensor, x: Tensor, side: LoraSVD | None) -> float:
    want = x @ w.T
    return ((layer_of(w, side)(x) - want).norm() / want.norm()).item()


def sketches() -> Figures:
    w = weight(TYPICAL)
    yield setting(names.SKETCH, "exact"), {names.ENERGY: energy(w, RANK)}
    for iterations in POWER_ITERATIONS:
        for columns in OVERSAMPLING:
            side = LoraSVD(RANK, oversampling=columns, power_iterations=iterations)
            shares = [
                ((w @ leading_directions(w, RANK, side, RandomKey(seed))).norm() / w.norm()).item() ** 2
                for seed in range(SKETCHES)
            ]
            value = {"value": sum(shares) / SKETCHES, "n": SKETCHES, "note": f"means of {SKETCHES} sketches"}
            yield setting(names.SKETCH, f"{iterations}-iterations", f"{columns}-more"), {names.ENERGY: value}


def stale_bases() -> Figures:
    w, (x, dy) = weight(TYPICAL), operands()
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(2))
    noise *= w.norm() / noise.norm()
    for drift in DRIFTS:
        moved = w + drift * noise
        stale = layer_of(w, LoraSVD(RANK))
        stale(x)  # finds its basis
        with torch.no_grad():
            stale.weight.copy_(moved)
        kinds = {"none": layer_of(moved, None), "stale": stale, "fresh": layer_of(moved, LoraSVD(RANK))}
        for kind, layer in kinds.items():
            yield setting(names.STALE, drift, kind), errors(layer, moved, x, dy)


def options() -> Figures:
    w, (x, dy) = weight(TYPICAL), operands()
    cases = {
        "none": (BASE, None),
        f"rank-{RANK}": (BASE, LoraSVD(RANK)),
        "quantised-side-input": (BASE, LoraSVD(RANK, side_input="quantised")),
        "protected-wgrad": (BASE, LoraSVD(RANK, protect_wgrad=True)),
        "trainable-factors": (BASE, LoraSVD(RANK, trainable_factors=True)),
    }
    four = fp4repro.recipe("four-over-six").replace(keep=KeepBF16())
    cases |= {"four-over-six": (four, None), f"four-over-six-rank-{RANK}": (four, LoraSVD(RANK))}
    for name, (base, side) in cases.items():
        layer = layer_of(w, side, base)
        got = errors(layer, w, x, dy)
        if name == "trainable-factors":
            del got[names.WGRAD]  # its three parameters have a gradient each
        yield setting(names.OPTIONS, name), got


def side_path_flops(tokens: int, out: int, into: int, rank: int) -> float:
    """x V, W V and (x V) L^T over x W^T."""
    return rank * (tokens * into + out * into + tokens * out) / (tokens * out * into)


def costs() -> Figures:
    for tokens, size, rank in ((8192, 2048, 32), (TOKENS, SIZE, RANK)):
        share = side_path_flops(tokens, size, size, rank)
        counts = {names.FLOPS: share, names.RATE_SHARE: FP4_RATE * share}
        modelled = {m: {"value": v, "provenance": "modelled"} for m, v in counts.items()}
        yield setting(names.COST, f"{tokens}-tokens", f"{size}-wide", f"rank-{rank}"), modelled
    w, (x, dy) = weight(TYPICAL), operands()
    base, side = layer_of(w, None), layer_of(w, LoraSVD(RANK))
    work = {name: _step(layer, x, dy) for name, layer in (("base", base), ("side", side))}
    work["refresh"] = lambda: leading_directions(w, RANK, LoraSVD(RANK), RandomKey())
    times = interleaved(work, ROUNDS)
    case = setting(names.COST, "emulated", f"{TOKENS}-tokens", f"{SIZE}-wide", f"rank-{RANK}")
    timed = {metric: _timed(ratio(times[name], times["base"])) for metric, name in _TIMES.items()}
    yield case, timed


_TIMES = {names.TIME: "side", names.REFRESH: "refresh"}


def _step(layer: nn.Linear, x: Tensor, dy: Tensor) -> Callable[[], None]:
    x = x.clone().requires_grad_()

    def step() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(dy)

    return step


def _timed(of: Ratio) -> dict:
    note = f"best of {ROUNDS} rounds; interval: 20th and 80th percentile of the rounds"
    return {"value": of.value, "ci_low": of.low, "ci_high": of.high, "n": ROUNDS, "note": note}
