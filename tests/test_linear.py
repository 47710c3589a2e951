"""The quantised linear against float64 products of operands quantised one by one."""

import copy

import pytest
import torch

import fp4repro
from fp4repro import FP8, MXFP4, NVFP4, RandomKey, fake_quantize, hadamard
from fp4repro.recipes import SLOTS

TOKENS, IN, OUT = 256, 128, 192


def operands(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, IN, generator=generator).bfloat16().to(dtype)
    w = (torch.randn(OUT, IN, generator=generator) / 8).bfloat16().to(dtype)
    dy = (torch.randn(TOKENS, OUT, generator=generator) * 1e-3).bfloat16().to(dtype)
    return x, w, dy


def run(recipe, x, w, dy, step=7):
    layer = torch.nn.Linear(IN, OUT, bias=False, dtype=w.dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    report = fp4repro.convert(layer, recipe)
    assert report.swapped == {"": (OUT, IN)}
    fp4repro.set_step(layer, step)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def close(got, want, bound):
    """Largest difference in units of the largest value; the reference must not be trivial."""
    want = want.double()
    assert want.abs().max() > 0
    return ((got.double() - want).abs().max() / want.abs().max()).item() < bound


def product64(a, b):
    return a.double() @ b.double()


def test_equals_float64_product_of_dequantised_operands():
    """The layer's arithmetic is the recipe's table, operand by operand (nearest rounding)."""
    recipe = fp4repro.recipe("nvfp4").replace(stochastic=(), wgrad_dtype="fp32")
    x, w, dy = operands()
    y, dx, dw = run(recipe, x, w, dy)
    tiles = fake_quantize(w, NVFP4.with_block(16, 16))
    assert close(y, product64(fake_quantize(x, NVFP4), tiles.T), 1e-6)
    assert close(dx, product64(fake_quantize(dy, NVFP4), tiles), 1e-6)
    dy_t, x_t = (
        fake_quantize(hadamard(t.T.contiguous().bfloat16()).float(), NVFP4) for t in (dy, x)
    )  # (features, tokens)
    assert close(dw, product64(dy_t, x_t.T), 1e-6)
    # From the other side: without the transform it is another product.
    plain = product64(fake_quantize(dy.T.contiguous(), NVFP4), fake_quantize(x.T.contiguous(), NVFP4).T)
    assert not close(dw, plain, 1e-2)


def stream(step, slot, x, operand):
    """The key that a slot's operand draws under: its amax and that of x as kept are part of it."""
    x = hadamard(x.bfloat16(), axis=0)
    use, own = (int(t.abs().max().float().view(torch.int32)) for t in (x, operand))
    return RandomKey(step=step, role=SLOTS.index(slot), salt=use << 32 | own)


def test_stochastic_streams_are_the_recipes():
    """dgrad's and wgrad's copies of dy draw the streams of their own roles, x and W none."""
    recipe = fp4repro.recipe("nvfp4").replace(wgrad_dtype="fp32")
    x, w, dy = operands()
    y, dx, dw = run(recipe, x, w, dy, step=7)
    tiles = fake_quantize(w, NVFP4.with_block(16, 16))
    assert close(y, product64(fake_quantize(x, NVFP4), tiles.T), 1e-6)
    key = stream(7, "dy_dgrad", x, dy)
    assert close(dx, product64(fake_quantize(dy, NVFP4, "stochastic", key), tiles), 1e-6)
    assert not close(dx, product64(fake_quantize(dy, NVFP4), tiles), 1e-2)
    upright = NVFP4.with_block(16, 1)
    dy_t = hadamard(dy.bfloat16(), axis=0).float()
    dy_t = fake_quantize(dy_t, upright, "stochastic", stream(7, "dy_wgrad", x, dy_t))
    x_t = fake_quantize(hadamard(x.bfloat16(), axis=0).float(), upright)
    assert close(dw, product64(dy_t.T, x_t), 1e-6)


@pytest.mark.parametrize("name, fmt, tile", [("fp8", FP8, 128), ("mxfp4", MXFP4, 32)])
def test_other_recipes(name, fmt, tile):
    recipe = fp4repro.recipe(name).replace(stochastic=(), hadamard=(), wgrad_dtype="fp32")
    x, w, dy = operands()
    y, dx, dw = run(recipe, x, w, dy)
    tiles = fake_quantize(w, fmt.with_block(tile, tile))
    assert close(y, product64(fake_quantize(x, fmt), tiles.T), 1e-6)
    assert close(dx, product64(fake_quantize(dy, fmt), tiles), 1e-6)
    dy_t, x_t = (fake_quantize(t.T.contiguous(), fmt) for t in (dy, x))
    assert close(dw, product64(dy_t, x_t.T), 1e-6)


def test_bf16_output_is_rounded_once():
    """The tensor scales meet the FP32 accumulator: almost every output is the exact one rounded."""
    recipe = fp4repro.recipe("nvfp4").replace(stochastic=())
    x, w, dy = operands(torch.bfloat16)
    y, _, _ = run(recipe, x, w, dy)
    assert y.dtype == torch.bfloat16
    exact = product64(fake_quantize(x.float(), NVFP4), fake_quantize(w.float(), NVFP4.with_block(16, 16)).T)
    assert (y == exact.bfloat16()).double().mean() > 0.999


def test_expected_errors_against_the_unquantised_product():
    """Two-sided: as large as the format makes them, no larger (figures of the golden README)."""
    x, w, dy = operands()
    y, dx, dw = run(fp4repro.recipe("nvfp4"), x, w, dy)
    for got, want, low, high in (
        (y, x @ w.T, 0.135, 0.155),
        (dx, dy @ w, 0.165, 0.195),
        (dw, dy.T @ x, 0.155, 0.180),
    ):
        assert low < (got - want).norm() / want.norm() < high


def test_bf16_recipe_leaves_the_layer_alone():
    x, w, dy = operands(torch.bfloat16)
    layer = torch.nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    report = fp4repro.convert(layer, fp4repro.recipe("bf16"))
    assert not report.swapped and type(layer) is torch.nn.Linear and list(report.kept) == [""]
    del x, w, dy


def test_call_counts_by_slot():
    layer = torch.nn.Linear(IN, OUT)
    report = fp4repro.convert(layer, fp4repro.recipe("nvfp4"))
    for _ in range(2):  # two microbatches, the weight unchanged: quantised once
        layer(torch.randn(32, IN, requires_grad=True)).sum().backward()
    assert report.calls() == {"x_fprop": 2, "w_fprop": 1, "x_wgrad": 2, "dy_dgrad": 2, "dy_wgrad": 2}
    with torch.no_grad():
        layer(torch.randn(32, IN))
    assert report.calls()["x_wgrad"] == 2  # nothing is kept when no gradient will be asked for


@pytest.mark.parametrize("change", ["optimizer", "copy_", "load_state_dict", "data", "replace"])
def test_changed_weight_is_seen(change):
    """Public fault F2: a cache of quantised weights must never be stale."""
    layer = torch.nn.Linear(IN, OUT, bias=False)
    fp4repro.convert(layer, fp4repro.recipe("nvfp4"))
    x = torch.randn(32, IN)
    before = layer(x).detach()
    assert torch.equal(before, layer(x))
    new = layer.weight.detach() * 1.5 + 0.01
    if change == "optimizer":
        layer(x).sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
    elif change == "copy_":
        with torch.no_grad():
            layer.weight.copy_(new)
    elif change == "load_state_dict":
        layer.load_state_dict({"weight": new})
    elif change == "data":
        layer.weight.data.mul_(1.5)
    else:
        layer.weight = torch.nn.Parameter(new)
    assert not torch.equal(before, layer(x))
    fresh = copy.deepcopy(layer)
    assert torch.equal(layer(x), fresh(x))


def test_weight_changed_between_forward_and_backward():
    """dgrad multiplies the weight that fprop saw."""
    x, w, dy = operands()
    recipe = fp4repro.recipe("nvfp4").replace(stochastic=())
    _, want, _ = run(recipe, x, w, dy)
    layer = torch.nn.Linear(IN, OUT, bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
    fp4repro.convert(layer, recipe)
    fp4repro.set_step(layer, 7)
    x = x.clone().requires_grad_()
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(-1)
    y.backward(dy)
    assert torch.equal(x.grad, want)


def test_accumulated_gradients_are_sums():
    """Public fault F3: microbatches, and a layer used twice in one forward."""
    recipe = fp4repro.recipe("nvfp4")
    x, w, dy = operands()
    parts = []
    for i in range(2):
        layer = torch.nn.Linear(IN, OUT, bias=False)
        with torch.no_grad():
            layer.weight.copy_(w)
        fp4repro.convert(layer, recipe)
        fp4repro.set_step(layer, 3, microbatch=i)
        layer(x[i * 128 : i * 128 + 128]).backward(dy[i * 128 : i * 128 + 128])
        parts.append(layer.weight.grad.clone())
    layer.weight.grad = None
    for i in range(2):
        fp4repro.set_step(layer, 3, microbatch=i)
        layer(x[i * 128 : i * 128 + 128]).backward(dy[i * 128 : i * 128 + 128])
    assert torch.equal(layer.weight.grad, parts[0] + parts[1])
    assert parts[0].abs().max() > 0 and not torch.equal(parts[0], parts[1])

    # Used twice in one forward: the streams differ by their data.
    layer.weight.grad = None
    fp4repro.set_step(layer, 3)
    ((layer(x[:128]) + 2 * layer(x[:128])) * dy[:128]).sum().backward()
    both = layer.weight.grad.clone()
    uses = []
    for factor in (1, 2):
        layer.weight.grad = None
        (factor * layer(x[:128]) * dy[:128]).sum().backward()
        uses.append(layer.weight.grad.clone())
    assert torch.equal(both, uses[0] + uses[1]) and not torch.equal(2 * uses[0], uses[1])


def test_without_steps_the_data_keeps_streams_apart():
    """A user who never calls set_step must not get one random stream for ever (public fault B3)."""
    layer = torch.nn.Linear(IN, OUT, bias=False)
    fp4repro.convert(layer, fp4repro.recipe("nvfp4"))
    gradients = []
    for scale in (1.0, 1.01, 1.02):
        x = torch.ones(128, IN, requires_grad=True)
        dy = torch.full((128, OUT), 0.3)
        dy[:, ::16] = scale
        layer(x).backward(dy)
        gradients.append(x.grad)
    up = [(g[:, :1] > 0).flatten() for g in gradients]
    assert not torch.equal(gradients[0], gradients[1]) and len(up) == 3
    layer.zero_grad()
    again = torch.ones(128, IN, requires_grad=True)
    layer(again).backward(dy)
    assert torch.equal(again.grad, gradients[-1])  # the same data, the same bits


def test_saved_for_backward_is_packed():
    """4.5 bits a value: at most 0.30 of what a BF16 linear keeps."""

    def saved(layer, x):
        sizes = {}

        def note(tensor):
            if tensor.data_ptr() != layer.weight.data_ptr():
                sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            layer(x)
        return sum(sizes.values())

    layer = torch.nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    x = torch.randn(1024, IN, dtype=torch.bfloat16)
    plain = saved(layer, x)
    assert plain == 1024 * IN * 2
    fp4repro.convert(layer, fp4repro.recipe("nvfp4"))
    assert 0.28 * plain < saved(layer, x) < 0.30 * plain


@pytest.mark.parametrize("tokens", [1, 7, 16, 24, 100])
def test_any_number_of_tokens(tokens):
    """Tokens that do not fill a block are padded with zeros, which add nothing."""
    x, w, dy = (t[:tokens] if t.shape[0] == TOKENS else t for t in operands())
    recipe = fp4repro.recipe("nvfp4").replace(stochastic=(), wgrad_dtype="fp32")
    y, dx, dw = run(recipe, x, w, dy)
    fill = torch.zeros(128 - tokens, IN), torch.zeros(128 - tokens, OUT)
    y2, dx2, dw2 = run(recipe, torch.cat([x, fill[0]]), w, torch.cat([dy, fill[1]]))
    assert close(y, y2[:tokens], 1e-6) and close(dx, dx2[:tokens], 1e-6) and close(dw, dw2, 1e-6)


def test_shapes_and_empty_batches():
    layer = torch.nn.Linear(IN, OUT)
    fp4repro.convert(layer, fp4repro.recipe("nvfp4"))
    x = torch.randn(2, 8, IN)
    assert torch.equal(layer(x).view(16, OUT), layer(x.view(16, IN)))
    empty = torch.randn(0, IN, requires_grad=True)
    y = layer(empty)
    y.sum().backward()
    assert y.shape == (0, OUT) and empty.grad.shape == (0, IN)
    assert layer.weight.grad.abs().max() == 0


def test_zero_and_nan_operands():
    layer = torch.nn.Linear(IN, OUT, bias=False)
    fp4repro.convert(layer, fp4repro.recipe("nvfp4"))
    x = torch.zeros(32, IN, requires_grad=True)
    y = layer(x)
    y.backward(torch.zeros(32, OUT))
    assert not y.any() and not x.grad.any() and not layer.weight.grad.any()
    bad = torch.randn(32, IN)
    bad[3, 5] = torch.nan
    assert layer(bad).isnan().all()  # poisoned as a whole, never hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_its_own_type(dtype):
    layer = torch.nn.Linear(IN, OUT)
    fp4repro.convert(layer, fp4repro.recipe("nvfp4"))
    x = torch.randn(32, IN, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = layer(x)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32 and x.grad.dtype == torch.float32
    assert layer.weight.grad.abs().max() > 0
