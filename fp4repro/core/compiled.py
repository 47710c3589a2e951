"""One definition in torch, compiled where there is a compiler, run as it stands where there is none.

`compiled(make, *options)` turns the function that `make(*options)` returns into one that inductor has
compiled for any shape. The graph is traced and compiled without dynamo, whose guards cost more than a
small tensor's kernel: each side of each tensor gets a symbol of its own, what tracing finds out about
them (equal sides, a side of 16) is kept as one expression, and a shape seen for the first time is held
against it. What one process of the suite has compiled, the next one loads (`fp4repro.core.kept`). Without
a C++ compiler (or with FP4REPRO_COMPILE=0) the same function runs eagerly, with one warning; the bits are
equal in both.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fp4repro.core import kept

_state = {"usable": None, "eager": False, "chunk": None}
counts = {"kernels": 0}  # compiled so far in this process
AVX2_BITS = 256
CHUNK = 1 << 17  # elements that run at a time where there is no compiler


def compiler_usable() -> bool:
    """Whether inductor can build for this machine; probed once, by compiling a trifle."""
    if _state["usable"] is None:
        _state["usable"] = os.environ.get("FP4REPRO_COMPILE", "1") != "0" and _probe()
    return _state["usable"]


def compiling() -> bool:
    """Whether `compiled` compiles here and now."""
    return not _state["eager"] and compiler_usable()


def compile_nothing() -> None:
    """Run all that is asked for from now on as it stands, as FP4REPRO_COMPILE=0 does."""
    _state["usable"] = False


def _probe() -> bool:
    try:
        return bool(_Compiled(lambda x: torch.where(x > 1, x * 2, x), "probe")(torch.ones(64))[0] == 1)
    except Exception as error:  # whatever a missing or broken compiler raises: it differs by version
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        warnings.warn(
            f"fp4repro: no usable C++ compiler ({reason}); quantisation runs eagerly, several times "
            "slower with the same results. Install g++ to speed it up.",
            stacklevel=3,
        )
        return False


@dataclass(frozen=True)
class _Kernel:
    """What came of one compilation."""

    types: tuple  # of the arguments
    holds: Callable[[list[int]], bool]  # whether it serves tensors of these sides
    run: Callable[..., Tensor | tuple[Tensor, ...]]


class _Compiled:
    """One function of plain tensors, compiled once for each combination of types and for all shapes;
    anew only where sides of one turn up, which broadcast, or where tracing had to assume otherwise."""

    def __init__(self, function: Callable, *name: object) -> None:
        self._function = function
        self._name = name  # what tells it from other functions in other processes
        self._kernels: list[_Kernel] = []
        self._runs: dict[tuple, Callable] = {}  # by the types and shapes that were seen

    def __call__(self, *args: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        # A caller's graph takes the function in as it is; so does whatever stands in for a tensor.
        if torch.compiler.is_compiling():
            return self._function(*args)
        tensors, key = [], []
        for a in args:
            if a is None:
                key.append(None)
                continue
            if type(a) is not Tensor:
                return self._function(*args)
            tensors.append(a if a.is_contiguous() else a.contiguous())
            key += a.dtype, a.shape
        key = tensors[0].device, *key
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._serving(args, tensors)
        return run(*tensors)

    def _serving(self, args: Sequence[Tensor | None], tensors: list[Tensor]) -> Callable:
        types = tensors[0].device, *(a if a is None else (a.dtype, a.dim()) for a in args)
        sides = [side for t in tensors for side in t.shape]
        for kernel in self._kernels:
            if kernel.types == types and kernel.holds(sides):
                return kernel.run
        # Whatever modes the caller is in, they are none of the kernel's business.
        with (
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(types[0].type, enabled=False),
        ):
            key = kept.key(self._name, types, tensors)
            record = kept.find(key, sides)
            if record is None:
                record, run = _compile(self._function, [a is None for a in args], tensors)
                kept.keep(key, record)
                counts["kernels"] += 1
            else:
                run = kept.load(record)
        alone = record.alone
        self._kernels.append(
            _Kernel(
                types, record.holds, lambda *tensors: run(list(tensors))[0] if alone else run(list(tensors))
            )
        )
        return self._kernels[-1].run


def _compile(
    function: Callable, absent: list[bool], tensors: list[Tensor]
) -> tuple[kept.Record, Callable[[list], Sequence]]:
    """The kernel, from tensors that are examples of type and shape, and what to know of it."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv(duck_shape=False)  # sides that are equal by chance stay apart
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)  # a constant of the function
    fakes = [
        mode.from_tensor(
            torch.empty(t.shape, dtype=t.dtype, device=t.device),
            source=ConstantSource(f"input{i}"),
            symbolic_context=StatelessSymbolicContext(
                [DimDynamic.DYNAMIC if side > 1 else DimDynamic.STATIC for side in t.shape]
            ),
        )
        for i, t in enumerate(tensors)
    ]
    alone = []

    def flat(*given: Tensor) -> list[Tensor]:
        rest = iter(given)
        found = function(*(None if missing else next(rest) for missing in absent))
        alone.append(isinstance(found, Tensor))
        return [found] if alone[-1] else list(found)

    graph = make_fx(flat, tracing_mode="symbolic")(*fakes)
    for node in graph.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")  # where the compiler looks for `mode`
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    width = _width(getattr(function, "across_vectors", False))
    run, source = _without_wrappers(graph, inputs, width)
    # The check of sides: what tracing and compiling assumed, and which sides are one.
    symbols = [side for t in fakes for side in t.shape]
    free = [i for i, side in enumerate(symbols) if isinstance(side, torch.SymInt)]
    assumed = env.produce_guards_expression([symbols[i] for i in free]) or "True"
    fixed = {i: side for i, side in enumerate(symbols) if i not in free}
    return kept.Record(source, width, assumed, free, fixed, alone[0]), run


def _width(narrow: bool) -> int:
    """Bits of the vectors to compile for. The key of inductor's cache does not name them, unless they are
    set: a process that finds others (a machine with the same cache, a probe that timed out) would get
    nonsense."""
    from torch._inductor import cpu_vec_isa

    width = cpu_vec_isa.pick_vec_isa().bit_width() or 1  # 1: no vectors
    return min(width, AVX2_BITS) if narrow else width


def _without_wrappers(
    graph: torch.fx.GraphModule, inputs: list, width: int
) -> tuple[Callable[[list], Sequence], str | None]:
    """The code that inductor generates, called with a list, and its text where that is all there is to it.
    Autograd's wrappers around it, of no use to kernels that have no gradient, take 11 us in place of 3."""
    from torch._inductor import compile_fx, config

    made = []

    def keep(*args: object, **kwargs: object) -> object:
        made.append(compile_fx.compile_fx_inner(*args, **kwargs))
        return made[-1]

    with (
        config.patch({"cpp.simdlen": width}),
        torch._functorch.config.patch(enable_autograd_cache=False),  # a hit there would not call `keep`
    ):
        whole = torch._inductor.standalone_compile(
            graph, inputs, dynamic_shapes="from_graph", options={"inner_compile": keep}
        )
    if any(node.op == "get_attr" for node in graph.graph.nodes):  # a constant, which the wrappers hand over
        return lambda tensors: whole(*tensors), None
    return made[0].current_callable, made[0].source_code


class _InChunks:
    """A function marked `by_rows`, run eagerly on runs of rows whose intermediate results stay in the
    processor's cache and in memory that the allocator has at hand: a fifth to a half of the time."""

    def __init__(self, function: Callable) -> None:
        self._function = function

    def __call__(self, *args: Tensor | None) -> Tensor:
        rows, elements = args[0].shape[0], args[0].numel()
        step = max(1, rows * (_state["chunk"] or CHUNK) // elements)
        if step >= rows or args[0].device.type != "cpu" or torch.compiler.is_compiling():
            return self._function(*args)
        out = None
        for start in range(0, rows, step):
            run = slice(start, start + step)
            part = self._function(*(a if a is None or a.dim() == 0 else a[run] for a in args))
            if out is None:
                out = part.new_empty(rows, *part.shape[1:])
            out[run] = part
        return out


def outside_graphs(function: Callable) -> Callable:
    """`torch.compiler.disable`, which takes three seconds to import, put off until there is a compiler that
    could trace the function."""

    @wraps(function)
    def outside(*args: object, **kwargs: object) -> object:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    disabled: list[Callable] = []
    return outside


def by_rows(function: Callable) -> Callable:
    """Marks a function whose tensors, but for scalars, share their first axis with the result, and whose
    every row comes from the same row of the arguments."""
    function.by_rows = True
    return function


def across_vectors(function: Callable) -> Callable:
    """Marks a function that reduces over 16 lanes, a whole vector of AVX-512. Vectors of AVX2 take a step
    less across lanes and a cheaper maximum: FP32 takes three quarters of the time, BF16 half."""
    function.across_vectors = True
    return function


@contextmanager
def without_compiler(chunk: int | None = None) -> Iterator[None]:
    """Within, everything runs as on a machine that has none, `chunk` elements at a time."""
    before = dict(_state)
    _state.update(eager=True, chunk=chunk)
    try:
        yield
    finally:
        _state.update(eager=before["eager"], chunk=before["chunk"])


@cache
def eager(make: Callable[..., Callable], *options: object) -> Callable:
    """The function `make(*options)` without a compiler."""
    function = make(*options)
    return _InChunks(function) if getattr(function, "by_rows", False) else function


def compiled(make: Callable[..., Callable], *options: object) -> Callable:
    """The function `make(*options)`, compiled for dynamic shapes where a compiler is usable."""
    if torch.compiler.is_compiling():  # a caller's graph takes the function in as it is
        return make(*options)
    if not compiling():
        return eager(make, *options)
    return _compiled(make, *options)


@cache
def _compiled(make: Callable[..., Callable], *options: object) -> Callable:
    return _Compiled(make(*options), make.__module__, make.__qualname__, *options)
