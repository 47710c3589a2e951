"""Export: what the compressed-tensors package and transformers read back is what training multiplied."""

import json

import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file
from torch import nn

import fp4repro
from fp4repro import MXFP4, NVFP4, Fp4ReproError, KeepBF16, convert, fake_quantize
from fp4repro.export import FUSED, export_compressed_tensors

torch.set_num_threads(1)

NVFP4_ALL = fp4repro.recipe("nvfp4").replace(keep=KeepBF16())


@pytest.fixture(autouse=True)
def eagerly(eager):
    pass


def attention(maxima=(1.0, 10.0, 100.0)) -> nn.Module:
    """A block with q, k, v of given largest weights, an output with bias, and a head outside."""
    g = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Module()])
    for name, largest in zip(("q_proj", "k_proj", "v_proj", "o_proj"), (*maxima, 1.0), strict=True):
        layer = nn.Linear(64, 48, bias=name == "o_proj")
        w = torch.randn(48, 64, generator=g)
        layer.weight.data = w * (largest / w.abs().max())
        model.blocks[0].add_module(name, layer)
    model.head = nn.Linear(64, 32)
    return model


def read_back(folder, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A layer's weight as the package dequantises it: its own decompressor, or in FP32 by its parts."""
    config = json.loads((folder / "config.json").read_text())
    scheme = QuantizationConfig.model_validate(config["quantization_config"]).config_groups["group_0"]
    tensors = load_file(folder / "model.safetensors")
    state = {k: tensors[f"{name}.{k}"] for k in ("weight_packed", "weight_scale", "weight_global_scale")}
    if dtype == torch.bfloat16:
        return NVFP4PackedCompressor.decompress(state, scheme)["weight"]
    rows, half = state["weight_packed"].shape
    return dequantize(
        unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * half, torch.float32),
        scale=state["weight_scale"].float(),
        args=scheme.weights,
        global_scale=state["weight_global_scale"],
        dtype=torch.float32,
    )


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_the_package_reads_the_weights_of_the_trained_forward(tmp_path, block):
    model = attention()
    fmt = NVFP4.with_block(*block)
    report = convert(model, NVFP4_ALL.replace(w_fprop=fmt))
    exported = export_compressed_tensors(model, report, tmp_path, fused=())
    assert exported.quantised == [f"blocks.0.{n}_proj" for n in "qkvo"] and not exported.rescaled
    for name in exported.quantised:
        want = fake_quantize(model.get_submodule(name).weight, fmt)
        # The package divides the block scale by 2688 / amax first, we multiply by the inverse last:
        # two roundings to FP32 each.
        got = read_back(tmp_path, name, torch.float32)
        torch.testing.assert_close(got, want, rtol=2.0**-22, atol=0)
        assert got.count_nonzero() == want.count_nonzero() > 0.8 * want.numel()
        got = read_back(tmp_path, name, torch.bfloat16)
        assert (got == want.bfloat16()).float().mean() > 0.99
        torch.testing.assert_close(got, want.bfloat16(), rtol=2.0**-8, atol=0)


def test_what_is_written(tmp_path):
    model = attention()
    report = convert(model, NVFP4_ALL)
    exported = export_compressed_tensors(model, report, tmp_path)
    assert list(exported.ignored) == ["head"]
    tensors = load_file(tmp_path / "model.safetensors")
    o = {k: v for k, v in tensors.items() if k.startswith("blocks.0.o_proj.")}
    assert {k.rsplit(".", 1)[1]: (v.dtype, tuple(v.shape)) for k, v in o.items()} == {
        "bias": (torch.float32, (48,)),
        "weight_packed": (torch.uint8, (48, 32)),
        "weight_scale": (torch.float8_e4m3fn, (48, 4)),
        "weight_global_scale": (torch.float32, (1,)),
    }
    largest = model.blocks[0].o_proj.weight.abs().max()
    assert o["blocks.0.o_proj.weight_global_scale"] == torch.tensor([2688.0]) / largest.detach()
    assert torch.equal(tensors["head.weight"], model.head.weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_the_package_understands_the_configuration(tmp_path):
    model = attention()
    export_compressed_tensors(model, convert(model, NVFP4_ALL), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    scheme = parsed.config_groups["group_0"]
    assert (parsed.quant_method, parsed.format) == ("compressed-tensors", "nvfp4-pack-quantized")
    assert parsed.ignore == ["head"] and scheme.input_activations is None
    assert NVFP4PackedCompressor.can_compress(nn.Linear, scheme)
    assert set(NVFP4PackedCompressor.compression_param_names(scheme)) == {
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
    }
    preset = QuantizationConfig(config_groups={"NVFP4A16": ["Linear"]}).config_groups["NVFP4A16"]
    assert scheme.weights == preset.weights


def test_fused_layers_share_one_tensor_scale(tmp_path):
    """Public fault D7: q, k, v with maxima 1, 10, 100 are loaded as one weight with one scale."""
    model = attention()
    report = convert(model, NVFP4_ALL)
    exported = export_compressed_tensors(model, report, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    scales = [tensors[f"blocks.0.{n}_proj.weight_global_scale"].item() for n in "qkvo"]
    assert scales[0] == scales[1] == scales[2] != scales[3]
    assert set(exported.rescaled) == {"blocks.0.q_proj", "blocks.0.k_proj"}
    for n in "qkv":
        want = fake_quantize(getattr(model.blocks[0], f"{n}_proj").weight, NVFP4.with_block(16, 16))
        got = read_back(tmp_path, f"blocks.0.{n}_proj", torch.float32)
        change = ((got - want).abs() / want.abs())[want != 0].max().item()
        if n == "v":  # the largest keeps its own
            assert change < 2.0**-22
        else:
            assert 0.001 < change <= 1 / 16
            assert change == pytest.approx(exported.rescaled[f"blocks.0.{n}_proj"], rel=1e-4)


def test_fused_layers_apart_by_a_power_of_two_do_not_change(tmp_path):
    model = attention((1.0, 4.0, 0.25))
    exported = export_compressed_tensors(model, convert(model, NVFP4_ALL), tmp_path)
    assert exported.rescaled == {"blocks.0.q_proj": 0.0, "blocks.0.v_proj": 0.0}


def test_scales_that_vanish_are_reported(tmp_path):
    model = attention((1e-6, 1.0, 1.0))
    exported = export_compressed_tensors(model, convert(model, NVFP4_ALL), tmp_path)
    assert exported.rescaled["blocks.0.q_proj"] == 1.0


def test_half_a_fused_group_is_refused(tmp_path):
    model = attention()
    recipe = NVFP4_ALL.replace(keep=KeepBF16(names=("*.v_proj",)))
    report = convert(model, recipe)
    with pytest.raises(Fp4ReproError, match=r"blocks\.0\.v_proj stays in BF16 .* joins? it with"):
        export_compressed_tensors(model, report, tmp_path)
    assert not list(tmp_path.iterdir())
    export_compressed_tensors(model, report, tmp_path, fused=())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_fprop": MXFP4}, "mxfp4 in blocks of 1x32"),
        ({"w_fprop": None}, "weights in BF16"),
        ({"stochastic": ("w_fprop",)}, "rounded stochastically"),
        ({"hadamard": ("fprop",)}, "Hadamard"),
    ],
)
def test_what_the_format_cannot_say_is_refused(tmp_path, changes, message):
    model = attention()
    report = convert(model, NVFP4_ALL.replace(**changes))
    with pytest.raises(Fp4ReproError, match=message):
        export_compressed_tensors(model, report, tmp_path)
    assert not list(tmp_path.iterdir())


def test_other_mistakes_are_sentences(tmp_path):
    model = attention()
    with pytest.raises(Fp4ReproError, match="recipe bf16 left no linear quantised"):
        export_compressed_tensors(model, convert(model, fp4repro.recipe("bf16")), tmp_path)
    report = convert(model, NVFP4_ALL)
    model.blocks[0].q_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(Fp4ReproError, match="q_proj has weights that are NaN"):
        export_compressed_tensors(model, report, tmp_path)
    convert(model, fp4repro.recipe("bf16"))
    with pytest.raises(Fp4ReproError, match="no longer a converted linear"):
        export_compressed_tensors(model, report, tmp_path)


def test_a_failed_export_leaves_the_old_one(tmp_path, monkeypatch):
    model = attention()
    report = convert(model, NVFP4_ALL)
    export_compressed_tensors(model, report, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    model.blocks[0].o_proj.weight.data.mul_(3)

    def full(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("fp4repro.export.save_file", full)
    with pytest.raises(OSError, match="no space"):
        export_compressed_tensors(model, report, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def llama(**changes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads, dtype="bfloat16", **changes)).bfloat16()


@pytest.mark.parametrize(("tied", "fused", "least", "most"), [(False, FUSED, 0.02, 0.1), (True, (), 0, 0.02)])
def test_transformers_loads_it_and_computes_the_same(tmp_path, tied, fused, least, most):
    """Apart by the rounding of weights to BF16, and where scales are shared by theirs."""
    from transformers import AutoModelForCausalLM

    model = llama(tie_word_embeddings=tied)
    # Activations in BF16, as in a weights-only checkpoint.
    report = convert(model, NVFP4_ALL.replace(x_fprop=None))
    exported = export_compressed_tensors(model, report, tmp_path, fused)
    assert len(exported.quantised) == 14 and "lm_head" in exported.ignored
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, want = loaded(tokens).logits.float(), model(tokens).logits.float()
        unquantised = llama(tie_word_embeddings=tied)(tokens).logits.float()
    assert least <= (got - want).norm() / want.norm() < most
    assert (unquantised - want).norm() / want.norm() > 0.2
    o = loaded.model.layers[1].self_attn.o_proj.weight
    want = fake_quantize(model.model.layers[1].self_attn.o_proj.weight.float(), NVFP4.with_block(16, 16))
    torch.testing.assert_close(o.float(), want, rtol=2.0**-8, atol=0)


def test_our_own_model_exports_with_its_configuration(tmp_path):
    from fp4repro.models import HybridModel, ModelConfig

    fields = {"pattern": "--", "vocabulary": 64, "width": 64, "ffn_width": 96}
    model = HybridModel(ModelConfig.from_dict(fields), torch.Generator().manual_seed(0))
    export_compressed_tensors(model, convert(model, NVFP4_ALL), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["HybridModel"] and config["width"] == 64
