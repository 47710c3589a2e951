"""Backends: a probe believes results alone, and the native call site is what the FP4 units expect."""

import contextlib
import re
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import SwizzleType

from fp4repro import MXFP4, NVFP4, Fp4ReproError, RandomKey, hadamard, matmul, quantize
from fp4repro.backends import BACKENDS, Probe, native, native_matmul, probe, transformer_engine
from fp4repro.backends import __main__ as command
from fp4repro.backends.emulation import emulated_layer, linear
from fp4repro.core.layout import transpose

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, eager):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class FakeLinear(torch.nn.Module):
    """Stands for te.Linear: an emulated linear with random bits of its own, and faults on request."""

    fault = None

    def __init__(self, features_in, features_out, bias, params_dtype, device):
        super().__init__()
        assert not bias
        self.weight = torch.nn.Parameter(
            torch.empty(features_out, features_in, dtype=params_dtype, device=device)
        )

    def forward(self, x):
        assert FakeTransformerEngine.inside
        if self.fault == "unquantised":
            return x @ self.weight.T
        layer = emulated_layer(self.weight, seed=99)
        layer.weight = self.weight
        y = layer(x)
        if self.fault == "unquantised gradients":
            return y.detach() + (x @ self.weight.T) - (x @ self.weight.T).detach()
        if self.fault == "raises":
            raise RuntimeError("CUDA error: invalid argument\nsecond line")
        if self.fault == "raises in backward":
            y.register_hook(lambda g: 1 // 0)
        return y if self.fault is None else Faulty.apply(y, self.fault)


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, fault):
        ctx.fault = fault
        return y * 1.1 if fault == "wrong scale" else torch.full_like(y, torch.nan) if fault == "NaN" else y

    @staticmethod
    def backward(ctx, dy):
        if ctx.fault == "zero gradients":
            return torch.zeros_like(dy), None
        if ctx.fault == "infinite gradients":
            return torch.full_like(dy, torch.inf), None
        return (dy.flip(0) if ctx.fault == "rows mixed up" else dy), None


class FakeTransformerEngine:
    """The names of Transformer Engine that the adapter uses."""

    inside = False

    @staticmethod
    @contextlib.contextmanager
    def autocast(enabled, recipe):
        assert enabled and recipe == "NVFP4BlockScaling()"
        FakeTransformerEngine.inside = True
        yield
        FakeTransformerEngine.inside = False


@pytest.fixture
def fake_te(monkeypatch):
    """Installs a Transformer Engine that says NVFP4 is available; returns a setter of its fault."""
    pytorch = types.ModuleType("transformer_engine.pytorch")
    pytorch.Linear, pytorch.autocast = FakeLinear, FakeTransformerEngine.autocast
    pytorch.is_nvfp4_available = lambda return_reason: (True, "")
    recipe = types.ModuleType("transformer_engine.common.recipe")
    recipe.NVFP4BlockScaling = lambda: "NVFP4BlockScaling()"
    root, common = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.common")
    root.pytorch, root.common, common.recipe = pytorch, common, recipe
    for module in (root, pytorch, common, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return pytorch


def test_emulation_is_usable_and_close_but_not_equal_to_the_unquantised():
    answer = probe("emulation")
    assert answer.usable, answer.reason
    for name in ("y", "dx", "dw"):
        assert answer.details[f"{name}_from_emulation"] == 0
        assert 0.12 < answer.details[f"{name}_from_unquantised"] < 0.18


def test_transformer_engine_that_works_is_usable(fake_te):
    answer = probe("transformer_engine")
    assert answer.usable, answer.reason
    # Random bits of its own: the same y, gradients apart but alike.
    assert answer.details["y_from_emulation"] == 0
    for name in ("dx", "dw"):
        assert 0.05 < answer.details[f"{name}_from_emulation"] < 0.3
        assert 0.95 < answer.details[f"{name}_cosine"] < 0.99


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", "RuntimeError: CUDA error: invalid argument"),
        ("raises in backward", "ZeroDivisionError"),
        ("NaN", "output y has 98304 values that are NaN or infinite"),
        ("infinite gradients", "gradient dx has .* NaN or infinite"),
        ("zero gradients", "gradient dx is all zeros"),
        ("rows mixed up", "dx has cosine .* at least 0.95"),
        ("wrong scale", "y is 0.100 away .* at most 0.01"),
        ("unquantised", "y equals the product of unquantised operands"),
        ("unquantised gradients", "dx equals the product of unquantised operands"),
    ],
)
def test_transformer_engine_that_says_yes_and_fails_is_unusable(fake_te, monkeypatch, fault, reason):
    """Public fault E1: available, then an error, zeros or NaN."""
    monkeypatch.setattr(FakeLinear, "fault", fault)
    answer = probe("transformer_engine")
    assert not answer.usable
    assert re.search(reason, answer.reason), answer.reason
    assert "\n" not in answer.reason


def test_transformer_engine_that_says_no(fake_te):
    fake_te.is_nvfp4_available = lambda return_reason: (False, "device compute capability 9.0")
    answer = probe("transformer_engine")
    assert (answer.usable, answer.reason) == (
        False,
        "Transformer Engine says no: device compute capability 9.0",
    )


def test_transformer_engine_that_does_not_import(monkeypatch):
    """The package without its libraries raises RuntimeError, not ImportError."""

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.startswith("transformer_engine"):
                raise RuntimeError("found empty meta package")

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert probe("transformer_engine") == Probe(
        "transformer_engine", False, "RuntimeError: found empty meta package"
    )


def test_native_refuses_devices_without_fp4_units(monkeypatch):
    assert probe("native") == Probe("native", False, "no CUDA device")
    x = types.SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(Fp4ReproError, match=r"9\.0 has no FP4 units, which came with 10\.0"):
        native.linear(x, None, None)


def operands(m: int, n: int, k: int, device: str = "cpu") -> tuple:
    g = torch.Generator().manual_seed(m + n)
    a = quantize(torch.randn(m, k, generator=g), NVFP4)
    b = quantize(3 * torch.randn(n, k, generator=g), NVFP4.with_block(16, 16))
    return tuple(
        replace(q, codes=q.codes.to(device), scales=q.scales.to(device), amax=q.amax.to(device))
        for q in (a, b)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(128, 64, 128), (17, 48, 96), (1, 16, 32), (256, 384, 256)])
def test_torch_accepts_the_native_call_on_the_meta_device(m, n, k, dtype):
    out = native_matmul(*operands(m, n, k, "meta"), dtype)
    assert (out.shape, out.dtype, out.device.type) == ((m, n), dtype, "meta")


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("swizzle_scales", lambda scales: scales.flatten(), "for NV scaling"),  # padding forgotten
        ("_SWIZZLE", [SwizzleType.NO_SWIZZLE] * 2, "swizzle"),
    ],
)
def test_the_meta_device_would_tell(monkeypatch, attribute, value, message):
    monkeypatch.setattr(native, attribute, value)
    with pytest.raises((RuntimeError, ValueError), match=message):
        native_matmul(*operands(17, 48, 96, "meta"))


def fp4_units(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, output_dtype):
    """What the units compute of a call's arguments, in float64, each scale sought at its offset."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = []
    for codes, (scales, tensor) in ((a, scale_a), (b.T, scale_b)):
        packed = codes.view(torch.uint8).long()
        nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        x = grid[nibbles & 7] * (1 - 2 * (nibbles >> 3))
        r = torch.arange(x.shape[0])[:, None]
        c = torch.arange(x.shape[1] // 16)[None]
        offset = (r // 128 * -(-c.shape[1] // 4) + c // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + c % 4
        values.append(x * scales.double()[offset].repeat_interleave(16, 1) * tensor.double())
    return (values[0] @ values[1].T).to(output_dtype)


@pytest.mark.parametrize(("m", "n", "k"), [(17, 48, 96), (200, 144, 160)])
def test_the_native_call_means_the_emulated_product(monkeypatch, m, n, k):
    monkeypatch.setattr(native, "scaled_mm", fp4_units)
    a, b = operands(m, n, k)
    got, want = native_matmul(a, b, torch.float32), matmul(a, b)
    assert want.abs().max() > 1
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())


def test_the_native_linear_multiplies_the_emulated_layers_operands(monkeypatch):
    """All three products, transposes and random bits included."""
    monkeypatch.setattr(native, "scaled_mm", fp4_units)
    g = torch.Generator().manual_seed(5)
    x, w, dy = (torch.randn(*s, generator=g).bfloat16() for s in ((128, 64), (96, 64), (128, 96)))
    for got, want in zip(native.three_products(native_matmul, x, w, dy), linear(x, w, dy), strict=True):
        assert got.shape == want.shape
        assert (got != want).float().mean() < 0.01  # a tie of the rounding to BF16, now and then
        assert (got - want).float().norm() < 1e-3 * want.float().norm()


@pytest.mark.parametrize(
    ("a", "format_a", "b", "format_b", "message"),
    [
        ((32, 48), NVFP4, (32, 48), NVFP4, "K to be a multiple of 32, got 48"),
        ((8, 32), NVFP4, (8, 32), NVFP4, "N to be a multiple of 16, got 8"),
        ((8, 32), NVFP4, (16, 64), NVFP4, r"\(8, 32\) and \(16, 64\)"),
        ((8, 32), MXFP4, (16, 32), NVFP4, "not mxfp4 with 1x32"),
        ((16, 32), NVFP4.transposed, (16, 32), NVFP4, "not nvfp4 with 16x1: transpose"),
        ((2, 4, 32), NVFP4, (16, 32), NVFP4, r"matrices.*\(2, 4, 32\)"),
    ],
)
def test_native_refuses_what_the_units_would(a, format_a, b, format_b, message):
    with pytest.raises(Fp4ReproError, match=message):
        native_matmul(quantize(torch.ones(a), format_a), quantize(torch.ones(b), format_b))


class FakeQuantizer:
    """Stands for te.NVFP4Quantizer: the private fields, scales padded with rubbish to 128 x 4."""

    def __init__(self, rowwise, columnwise, with_rht, with_post_rht_amax, with_2d_quantization, **_):
        assert rowwise != columnwise and with_rht == with_post_rht_amax
        self.columnwise, self.rht = columnwise, with_rht
        self.format = NVFP4.with_block(16, 16) if with_2d_quantization else NVFP4

    def __call__(self, x):
        if self.columnwise:
            x = x.T.contiguous()
        q = quantize(hadamard(x) if self.rht else x, self.format)
        rows, columns = q.scales.shape
        scales = torch.full((-(-rows // 128) * 128, -(-columns // 4) * 4), 0x7F, dtype=torch.uint8)
        scales[:rows, :columns] = q.scales.view(torch.uint8)
        name = "columnwise" if self.columnwise else "rowwise"
        fields = {"data": q.codes, "scale_inv": scales}
        return types.SimpleNamespace(
            **{f"_{name}_{field}": value for field, value in fields.items()},
            **{f"_amax_{name}": q.amax.view(1)},
        )


def check_te_operands(device: str) -> None:
    x = torch.randn(128, 192, generator=torch.Generator().manual_seed(8)).bfloat16().to(device)
    cases = {
        "rowwise": (transformer_engine.quantize(x), quantize(x, NVFP4)),
        "tiles": (transformer_engine.quantize(x, tiles=True), quantize(x, NVFP4.with_block(16, 16))),
        "columnwise": (
            transformer_engine.quantize(x, columnwise=True, rht=True),
            transpose(quantize(hadamard(x, axis=0), NVFP4.transposed)),
        ),
    }
    for name, (theirs, ours) in cases.items():
        assert (theirs.format, theirs.shape) == (ours.format, ours.shape), name
        assert torch.equal(theirs.scales.view(torch.uint8), ours.scales.view(torch.uint8)), name
        assert torch.equal(theirs.amax, ours.amax), name
        assert torch.equal(theirs.dequantize(), ours.dequantize()), name  # -0 and 0 are equal


def test_transformer_engines_fields_are_read_as_ours(fake_te):
    fake_te.NVFP4Quantizer = FakeQuantizer
    check_te_operands("cpu")


@pytest.mark.gpu
def test_transformer_engine_quantises_to_the_same_bits(monkeypatch):
    monkeypatch.undo()
    answer = probe("transformer_engine")
    if not answer.usable:
        pytest.skip(f"not run: {answer.reason}")
    check_te_operands("cuda")


def test_an_unknown_backend_is_refused():
    with pytest.raises(Fp4ReproError, match="'cutlass'; known: emulation, native, transformer_engine"):
        probe("cutlass")


def test_the_table_has_a_line_for_each(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fp4repro.backends"])
    monkeypatch.setattr(transformer_engine, "version", lambda: "2.20.2")
    monkeypatch.setattr(command, "compiler_usable", lambda: False)  # asking compiles, for seconds
    command.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["emulation", "yes"],
        ["native", "no"],
        ["transformer_engine", "no"],
    ]
    assert lines[2].endswith("no CUDA device")
    assert len(lines[1:4]) == len(BACKENDS)
    facts = {line.split("  ")[0]: line for line in lines[5:]}
    assert list(facts) == ["device", "torch", "CUDA", "Transformer Engine", "compiler"]
    assert torch.__version__ in facts["torch"] and "2.20.2" in facts["Transformer Engine"]
    assert "eagerly" in facts["compiler"]


def test_random_bits_of_its_own_excuse_gradients_alone(monkeypatch):
    """A y that is as far off as stochastic gradients may be is a fault."""
    off = BACKENDS["transformer_engine"]

    def noisy(x, w, dy):
        y, dx, dw = linear(x, w, dy)
        y = quantize(y, NVFP4, "stochastic", RandomKey()).dequantize(y.dtype)
        return y, dx, dw

    monkeypatch.setitem(BACKENDS, "transformer_engine", type(off)(off.name, noisy, True))
    answer = probe("transformer_engine")
    assert not answer.usable and answer.reason.startswith("y is 0.1"), answer.reason
