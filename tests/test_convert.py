"""convert: what it swaps, what it keeps and why, and that a model stays the model it was."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4repro
from fp4repro import Fp4ReproError, KeepBF16, QuantLinear


class Block(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(128).view(4, 32) % 32


def test_swaps_blocks_and_keeps_by_rule():
    model = Model(8)
    report = fp4repro.convert(model, fp4repro.recipe("nvfp4"))
    assert set(report.swapped) == {f"blocks.{i}.{n}" for i in range(7) for n in ("up", "down")}
    assert set(report.kept) == {"blocks.7.up", "blocks.7.down", "head"}
    assert "block 7 of 8" in report.kept["blocks.7.up"] and "outside" in report.kept["head"]
    assert type(model.blocks[0].up) is QuantLinear and type(model.head) is nn.Linear


@pytest.mark.parametrize(
    "name, count, kept",
    [
        ("nvfp4", 62, {0, 1, *range(54, 62)}),  # the paper's 12B model: first 2, last 8
        ("fp8", 62, {0, 60, 61}),
        ("nvfp4", 8, {7}),
        ("nvfp4", 6, {5}),
        ("fp8", 8, set()),
        ("bf16", 62, set()),
    ],
)
def test_layer_rule(name, count, kept):
    assert fp4repro.recipe(name).keep.blocks(count) == kept


def test_exact_numbers_of_blocks():
    assert KeepBF16(last=4).blocks(20) == {16, 17, 18, 19}
    assert KeepBF16(first=2, last=2).blocks(5) == {0, 1, 3, 4}
    assert KeepBF16(first=9).blocks(4) == {0, 1, 2, 3}
    with pytest.raises(Fp4ReproError, match="must not be negative"):
        KeepBF16(first=-1)


def test_by_name_and_misfits():
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    recipe = fp4repro.recipe("nvfp4").replace(keep=KeepBF16(names=("3",)))
    report = fp4repro.convert(model, recipe)
    assert list(report.swapped) == ["2"]
    assert "out_features 40 is not a multiple of 16" in report.kept["0"]
    assert "in_features 40 is not a multiple of 16" in report.kept["1"]
    assert report.kept["3"] == "named by the recipe's rule"
    model(torch.randn(8, 64)).sum().backward()


def test_foreign_linears_stay():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    report = fp4repro.convert(nn.ModuleList([Own(64, 64), nn.Linear(64, 64)]), fp4repro.recipe("nvfp4"))
    assert list(report.swapped) == ["1"] and "forward of its own" in report.kept["0"]


def test_refusals():
    with pytest.raises(Fp4ReproError, match=r"no nn\.Linear"):
        fp4repro.convert(nn.ReLU(), fp4repro.recipe("nvfp4"))
    with pytest.raises(Fp4ReproError, match=r"'nvpf4' \(did you mean 'nvfp4'\?\)"):
        fp4repro.recipe("nvpf4")
    with pytest.raises(Fp4ReproError, match="no field 'stochastc'"):
        fp4repro.recipe("nvfp4").replace(stochastc=())
    with pytest.raises(Fp4ReproError, match="'dy_fprop'"):
        fp4repro.recipe("nvfp4").replace(stochastic=("dy_fprop",))


def test_names_ties_and_state_survive():
    model = Model(8)
    model.blocks[1].up.weight = model.blocks[0].up.weight  # tied
    names = [n for n, _ in model.named_parameters()]
    state = copy.deepcopy(model.state_dict())
    report = fp4repro.convert(model, fp4repro.recipe("nvfp4"))
    assert report.swapped and [n for n, _ in model.named_parameters()] == names
    assert model.blocks[1].up.weight is model.blocks[0].up.weight
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    model.load_state_dict(state)
    plain = Model(8)
    plain.load_state_dict(model.state_dict())


def test_back_to_bf16():
    model = Model(8)
    want = model(TOKENS)
    fp4repro.convert(model, fp4repro.recipe("nvfp4"))
    assert not torch.equal(model(TOKENS), want)
    fp4repro.convert(model, fp4repro.recipe("bf16"))
    assert torch.equal(model(TOKENS), want)
    assert not any(isinstance(m, QuantLinear) for m in model.modules())


def gradients(model, run=lambda model: model(TOKENS)):
    model.zero_grad()
    run(model).float().logsumexp(-1).mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert max(v.abs().max() for v in a.values()) > 0


def test_recomputed_activations_draw_the_same_bits():
    model = Model(4)
    fp4repro.convert(model, fp4repro.recipe("nvfp4"))
    fp4repro.set_step(model, 5)

    def recomputing(model):
        x = model.embedding(TOKENS)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return model.head(x)

    plain = gradients(model)
    assert_equal(plain, gradients(model, recomputing))
    fp4repro.set_step(model, 6)
    assert not torch.equal(gradients(model)["blocks.0.up.weight"], plain["blocks.0.up.weight"])


def test_deepcopy_and_whole_model_compile_agree():
    model = Model(4)
    fp4repro.convert(model, fp4repro.recipe("nvfp4"))
    fp4repro.set_step(model, 5)
    want = gradients(model)
    twin = copy.deepcopy(model)
    assert_equal(want, gradients(twin))
    with torch.no_grad():
        twin.blocks[0].up.weight.add_(1)
    assert_equal(want, gradients(model))  # the twin shares nothing
    assert_equal(want, gradients(model, torch.compile(lambda m: m(TOKENS), backend="eager")))


def test_streams_differ_between_layers_and_seeds():
    first, second = Model(4), Model(4)
    fp4repro.convert(first, fp4repro.recipe("nvfp4"), seed=1)
    fp4repro.convert(second, fp4repro.recipe("nvfp4"), seed=2)
    for model in (first, second):
        fp4repro.set_step(model, 0)
    a, b = gradients(first), gradients(second)
    assert not torch.equal(a["blocks.0.up.weight"], b["blocks.0.up.weight"])
    layer, other = first.blocks[0].up, first.blocks[1].up
    assert layer.plan.key != other.plan.key


def test_hugging_face_model():
    """Any transformers model: here a two-layer Llama."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    report = fp4repro.convert(model, fp4repro.recipe("nvfp4").replace(keep=KeepBF16()))
    assert len(report.swapped) == 2 * 7 and list(report.kept) == ["lm_head"]
    fp4repro.set_step(model, 0)
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert report.calls()["dy_wgrad"] == 14


def kept_blocks(report, prefix):
    return {int(n.removeprefix(prefix).split(".")[0]) for n in report.kept if n.startswith(prefix)}


def test_encoder_and_decoder_are_counted_each():
    model = nn.ModuleDict(
        {side: nn.ModuleList(Block() for _ in range(n)) for side, n in (("encoder", 8), ("decoder", 10))}
    )
    report = fp4repro.convert(model, fp4repro.recipe("nvfp4"))
    assert kept_blocks(report, "encoder.") == {7} and kept_blocks(report, "decoder.") == {8, 9}
    assert len(report.swapped) == 2 * (7 + 8)


def test_a_model_beside_its_head_is_no_list_of_blocks():
    report = fp4repro.convert(
        nn.Sequential(nn.Sequential(*(Block() for _ in range(8))), nn.Linear(64, 32)),
        fp4repro.recipe("nvfp4"),
    )
    assert set(report.kept) == {"0.7.up", "0.7.down", "1"} and "outside" in report.kept["1"]


def test_experts_lie_within_their_block():
    block = lambda: nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(64, 64) for _ in range(32))})  # noqa: E731
    report = fp4repro.convert(nn.ModuleList(block() for _ in range(6)), fp4repro.recipe("nvfp4"))
    assert kept_blocks(report, "") == {5} and len(report.swapped) == 5 * 32


def test_layers_that_torch_reads_itself_stay():
    """Their forward is skipped by the fused path, so that a swap would be one in name only."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    model = nn.ModuleList([layer, nn.Linear(64, 64), nn.Linear(64, 64)])
    report = fp4repro.convert(model, fp4repro.recipe("nvfp4"))
    assert "fused" in report.kept["0.linear1"] and set(report.swapped) == {"1", "2"}
    assert "fused" in fp4repro.convert(layer, fp4repro.recipe("nvfp4")).kept["linear1"]


def test_wrong_arguments_get_a_sentence():
    model = Model(4)
    fp4repro.convert(model, fp4repro.recipe("nvfp4"))
    for bad in (1.5, "3", None, -1, 2**64, True):
        with pytest.raises(Fp4ReproError, match="step must be an integer"):
            fp4repro.set_step(model, bad)
    with pytest.raises(Fp4ReproError, match="seed must be an integer"):
        fp4repro.convert(model, fp4repro.recipe("nvfp4"), seed="a")
    with pytest.raises(Fp4ReproError, match="takes a recipe"):
        fp4repro.convert(model, "nvfp4")
    with pytest.raises(Fp4ReproError, match="takes the converted model"):
        fp4repro.set_step(object(), 0)
    with pytest.raises(Fp4ReproError, match="must be a BlockFormat"):
        fp4repro.quantize(torch.ones(16, 16), "nvfp4")
    with pytest.raises(Fp4ReproError, match="must be a torch tensor"):
        fp4repro.quantize([1.0], fp4repro.NVFP4)
    with pytest.raises(Fp4ReproError, match="two quantised tensors"):
        fp4repro.matmul(torch.ones(2, 2), torch.ones(2, 2))


def test_the_quantiser_inside_a_compiled_function():
    x = torch.randn(32, 64)
    run = torch.compile(lambda t: fp4repro.fake_quantize(t, fp4repro.NVFP4), backend="eager")
    assert torch.equal(run(x), fp4repro.fake_quantize(x, fp4repro.NVFP4))


def test_a_model_of_one_block():
    model = Model(1)
    report = fp4repro.convert(model, fp4repro.recipe("nvfp4"))
    assert set(report.swapped) == {"blocks.0.up", "blocks.0.down"} and list(report.kept) == ["head"]
    wrapped = fp4repro.convert(nn.Sequential(Model(8)), fp4repro.recipe("nvfp4"))
    assert kept_blocks(wrapped, "0.blocks.") == {7} and "0.head" in wrapped.kept
