"""Compiled equals eager to the bit, one compilation serves all shapes, and no compiler is no harm."""

import contextlib
import hashlib
import itertools
import os
import subprocess
import sys
import textwrap
import warnings

import cases
import numpy as np
import pytest
import torch

from fp4repro import FP8, MXFP4, NVFP4, BlockFormat, RandomKey, fake_quantize, quantize
from fp4repro.core import compiled as compiling
from fp4repro.core.quantize import quantize_operand

TILE, COLUMNS = NVFP4.with_block(16, 16), NVFP4.with_block(16, 1)
KEY = RandomKey(1, 2, 3, 4)
ALL = ("codes", "operand", "fake", "codes sr", "operand sr", "fake sr")


@pytest.fixture
def compiler():
    if not compiling.compiler_usable():
        pytest.skip("no C++ compiler for inductor")


def graphs() -> int:
    return compiling.counts["kernels"]


def results(x, fmt, outputs=ALL):
    """Bytes of what the outputs named hold; each output is a kernel of its own to compile."""
    for output in outputs:
        kind, _, sr = output.partition(" ")
        rounding = "stochastic" if sr else "nearest"
        if kind == "codes":
            q = quantize(x, fmt, rounding, KEY)
            values = q.codes, q.scales.view(torch.uint8), q.amax, q.dequantize()
        elif kind == "operand":
            values = quantize_operand(x, fmt, rounding, KEY)
        else:
            values = (fake_quantize(x, fmt, rounding, KEY),)
        yield from (v.reshape(-1).view(torch.uint8) for v in values)


def hard_inputs():
    """One matrix that holds ties, subnormals, zero blocks; others of huge and of tiny values."""
    names = ("gauss", "ties", "scaleties", "scaleunderflow", "zeroblock", "mixedsubnormal", "outlier")
    yield np.concatenate([cases.NAMED[n] for n in names])
    for name in ("huge", "fltmax", "subnormal", "zeros"):
        yield cases.NAMED[name]


def assert_compiled_equals_eager(inputs, fmt, outputs, request):
    got = [list(results(x, fmt, outputs)) for x in inputs]
    request.getfixturevalue("eager")
    for ours, x in zip(got, inputs, strict=True):
        for a, b in zip(ours, results(x, fmt, outputs), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "fmt, outputs",
    [
        (NVFP4, ("codes", "fake", "fake sr", "operand sr")),
        (TILE, ("codes", "fake")),
        (COLUMNS, ("codes", "operand sr")),
    ],
    ids=lambda v: str(v.block) if isinstance(v, BlockFormat) else "",
)
def test_compiled_equals_eager(fmt, outputs, compiler, request):
    inputs = [torch.from_numpy(x) for x in hard_inputs()]
    assert_compiled_equals_eager(inputs, fmt, outputs, request)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fmt",
    [
        NVFP4,
        TILE,
        COLUMNS,
        MXFP4,
        FP8,
        FP8.with_block(128, 128),
        NVFP4.replace(order="te-2.13"),
        NVFP4.replace(order="paper"),
        NVFP4.replace(scale_rounding="up"),
        NVFP4.replace(four_over_six="mse", scale_target=256.0),
        TILE.replace(four_over_six="mae", scale_target=256.0),
    ],
    ids=lambda f: f"{f.name} {f.block} {f.order} {f.scale_rounding} {f.four_over_six}",
)
def test_compiled_equals_eager_in_every_output(fmt, compiler, request):
    inputs = [torch.from_numpy(np.concatenate([x, x], 1)[: len(x) // 32 * 32]) for x in hard_inputs()]
    inputs += [x.clamp(-3e38, 3e38).bfloat16() for x in inputs]
    assert_compiled_equals_eager(inputs, fmt, ALL, request)


@pytest.mark.parametrize("fmt", [NVFP4, TILE, COLUMNS], ids=lambda f: str(f.block))
def test_no_recompilation_as_shapes_change(fmt, compiler):
    def use(*shape):
        list(results(torch.zeros(shape), fmt, ("codes",)))

    use(64, 96)
    before = graphs()
    for shape in (
        (32, 32),
        (128, 256),
        (2, 16, 64),
        (1008, 32),
        (48, 48),
        (32, 4096),
        (4, 4, 32, 80),
    ):
        use(*shape)
    for rows in (17, 100, 333) if fmt is NVFP4 else ():
        use(rows, 48)
    assert graphs() == before


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [TILE, COLUMNS], ids=lambda f: str(f.block))
def test_a_single_block_costs_one_compilation_more_at_most(fmt, compiler):
    list(results(torch.zeros(64, 96), fmt, ("codes",)))
    before = graphs()
    for shape in ((16, 16), (16, 32), (32, 16), (16, 16), (1, 16, 16), (48, 16), (16, 160)):
        list(results(torch.zeros(shape), fmt, ("codes",)))
    kernels = 6  # amax, scales, apply, pack, unpack, decode
    assert graphs() - before <= kernels


def test_surroundings_do_not_use_up_the_compiler_s_patience(compiler):
    """Dynamo counts each combination of gradient mode, autocast and type as a compilation, and turns
    to eager without a word after eight of one function."""
    x = torch.from_numpy(cases.normal(1, (64, 96)))
    grads = (contextlib.nullcontext, torch.no_grad, torch.inference_mode)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for grad, autocast, dtype in itertools.product(grads, (0, 1), (torch.float32, torch.bfloat16)):
            with grad(), torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
                fake_quantize(x.to(dtype), NVFP4)


def make_turned():
    matrix = torch.arange(256.0).view(16, 16)
    return lambda x: (x @ matrix).relu()


def test_a_kernel_may_hold_a_constant(compiler):
    """As the step of an optimizer holds its Hadamard matrix."""
    for rows in (3, 5):
        x = torch.randint(-4, 5, (rows, 16)).float()
        found = compiling.compiled(make_turned)(x)
        assert torch.equal(found, make_turned()(x)) and found.any()


def test_a_caller_s_graph_takes_the_functions_in_without_a_word():
    """As one graph; dynamo warns of every `functools.cache` that it meets."""
    x = torch.from_numpy(cases.normal(1, (64, 96)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = torch.compile(
            lambda t: fake_quantize(t, NVFP4, nonfinite="poison"), backend="eager", fullgraph=True
        )
        assert torch.equal(whole(x).view(torch.int32), fake_quantize(x, NVFP4).view(torch.int32))


def test_denormals_survive_in_this_thread_and_in_kernels(compiler):
    """A shared library built with fast maths may set flush-to-zero where it is loaded."""
    fake_quantize(torch.ones(32, 32), NVFP4)
    tiny = np.float32(1e-39)
    assert tiny * np.float32(0.5) > 0
    assert (torch.full((64,), 1e-39) * 0.5 > 0).all()
    x = torch.from_numpy(cases.normal(2, (64, 64), scale=1e-37))
    error = ((fake_quantize(x, NVFP4).double() - x.double()).norm() / x.double().norm()).item()
    assert error < 0.12
    flushed = x.clone()
    flushed[flushed.abs() < 2.0**-126] = 0
    assert not torch.equal(fake_quantize(x, NVFP4), fake_quantize(flushed, NVFP4))


def test_pairs_of_columns_equal_single_columns(compiler):
    """BF16 is stored two columns at a time, the same values in FP32 one at a time."""
    for x in hard_inputs():
        x = torch.from_numpy(x).clamp(-3e38, 3e38).bfloat16()
        pairs, single = quantize(x, COLUMNS), quantize(x.float(), COLUMNS)
        assert torch.equal(pairs.codes, single.codes)
        assert torch.equal(pairs.scales.view(torch.uint8), single.scales.view(torch.uint8))


@pytest.mark.slow
def test_threads_do_not_matter_compiled(compiler):
    x = torch.from_numpy(cases.normal(3, (512, 512)))
    before, got = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            got.append(fake_quantize(x, NVFP4, "stochastic", KEY))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*got)


SCRIPT = """
    import hashlib, sys, warnings
    import torch
    sys.path.insert(0, {tests!r})
    from test_compiled import NVFP4, TILE, COLUMNS, digest
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        print(digest([NVFP4, TILE, COLUMNS]))
    ours = [str(w.message) for w in caught if "fp4repro" in str(w.message)]
    print(len(ours), *ours)
"""


def digest(formats) -> str:
    total = hashlib.sha256()
    for x, fmt in itertools.product(hard_inputs(), formats):
        for part in results(torch.from_numpy(x), fmt):
            total.update(part.numpy().tobytes())
    return total.hexdigest()


def test_without_a_compiler_one_warning_and_the_same_bits(tmp_path, request):
    script = textwrap.dedent(SCRIPT.format(tests=os.path.dirname(__file__)))
    environment = {k: v for k, v in os.environ.items() if k != "FP4REPRO_COMPILE"} | {
        "CXX": str(tmp_path / "no-such-compiler"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    pipe = subprocess.PIPE
    run = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=pipe, stderr=pipe)
    request.getfixturevalue("eager")
    expected = digest([NVFP4, TILE, COLUMNS])
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err.decode()
    bits, said = out.decode().strip().split("\n")
    assert bits == expected
    count, _, words = said.partition(" ")
    assert count == "1", said
    assert "no usable C++ compiler" in words and "same results" in words


def test_compilation_can_be_switched_off(monkeypatch, recwarn):
    monkeypatch.setenv("FP4REPRO_COMPILE", "0")
    monkeypatch.setitem(compiling._state, "usable", None)
    assert compiling.compiler_usable() is False
    assert compiling._state["usable"] is False
    assert not recwarn.list


NARROWER = """
import sys, torch
from torch._inductor import cpu_vec_isa
real = cpu_vec_isa.valid_vec_isa_list()
if sys.argv[1] == "narrower":  # as on another machine, or where the probe of the widest vectors timed out
    cpu_vec_isa.valid_vec_isa_list = lambda: [i for i in real if i.bit_width() < real[0].bit_width()]
print(cpu_vec_isa.pick_vec_isa().bit_width())
from fp4repro import NVFP4, fake_quantize
from fp4repro.core import compiled
x = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
with compiled.without_compiler():
    expected = fake_quantize(x, NVFP4)
sys.exit(0 if torch.equal(fake_quantize(x, NVFP4), expected) else "wrong values")
"""


@pytest.mark.slow
def test_processes_with_other_vectors_may_share_a_cache(compiler, tmp_path):
    """Inductor's key does not tell them apart, and code for one, built for the other, runs and is wrong."""
    found = []
    for which in ("widest", "narrower"):
        command = [sys.executable, "-c", NARROWER, which]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(int(done.stdout))
    if found[0] == found[1]:
        pytest.skip("this processor has one width of vectors")
    assert found[0] > found[1]


@pytest.mark.parametrize(
    ("found", "narrow", "told"), [(512, False, 512), (512, True, 256), (256, True, 256), (0, False, 1)]
)
def test_inductor_is_told_the_width_of_vectors(monkeypatch, found, narrow, told):
    """What the slow test above needs: the width is then part of the key of inductor's cache."""
    from torch._inductor import config, cpu_vec_isa

    class Stop(Exception):
        pass

    def compile_nothing(*_, **__):
        raise Stop(config.cpp.simdlen)

    isa = type("Isa", (), {"bit_width": lambda self: found})()
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: isa)
    monkeypatch.setattr(torch._inductor, "standalone_compile", compile_nothing)
    assert compiling._width(narrow) == told
    with pytest.raises(Stop, match=f"^{told}$"):
        compiling._without_wrappers(None, [], told)
