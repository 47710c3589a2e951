"""The layout of transformers' nemotron_h, there and back; that outputs agree is in test_models.py."""

import json
from pathlib import Path

import pytest
import torch

from fp4repro.errors import Fp4ReproError
from fp4repro.models import HybridModel, ModelConfig
from fp4repro.models.nemotron_h import from_nemotron_h, save_nemotron_h, to_nemotron_h

TINY = ModelConfig.from_yaml(Path(__file__).parents[1] / "configs" / "models" / "tiny.yaml")


@pytest.fixture
def model():
    return HybridModel(TINY, generator=torch.Generator().manual_seed(0))


def test_there_and_back_is_the_same_model(model):
    config, weights = from_nemotron_h(*to_nemotron_h(TINY, model.state_dict()))
    assert config == TINY
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], w) for name, w in model.state_dict().items())


def test_names_and_shapes_are_those_of_transformers(model):
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    settings, weights = to_nemotron_h(TINY, model.state_dict())
    with torch.device("meta"):
        theirs = modeling.NemotronHForCausalLM(modeling.NemotronHConfig(**settings))
    assert {n: p.shape for n, p in theirs.named_parameters()} == {n: w.shape for n, w in weights.items()}


def test_the_published_12b_has_the_names_of_its_release():
    """On the meta device, with the release's 128 Mamba heads of 80 (public config of Nano-12B-v2)."""
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    path = Path(__file__).parents[1] / "configs" / "models" / "nemotron-12b.yaml"
    config = ModelConfig.from_yaml(path).replace(mamba_heads=128, mamba_head_dim=80)
    settings, weights = to_nemotron_h(config, HybridModel(config, device="meta").state_dict())
    with torch.device("meta"):
        theirs = modeling.NemotronHForCausalLM(modeling.NemotronHConfig(**settings))
    assert {n: p.shape for n, p in theirs.named_parameters()} == {n: w.shape for n, w in weights.items()}


def test_a_saved_folder_is_read_by_transformers(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_nemotron_h(TINY, model.state_dict(), tmp_path)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    tokens = torch.randint(TINY.vocabulary, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = theirs.eval()(input_ids=tokens).logits, model(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_settings_of_older_releases_are_read(model):
    settings, weights = to_nemotron_h(TINY, model.state_dict())
    kinds = settings.pop("layers_block_type")
    older = settings | {"hybrid_override_pattern": TINY.pattern}
    assert from_nemotron_h(older, weights)[0] == TINY
    words = ["mamba" if kind == "linear_attention" else kind for kind in kinds]
    assert from_nemotron_h(settings | {"layers_block_type": words}, weights)[0] == TINY


def test_what_has_no_twin_is_refused(model):
    settings, weights = to_nemotron_h(TINY, model.state_dict())
    bias = {"model.layers.0.mixer.conv1d.bias": torch.zeros(4)}
    assert from_nemotron_h(settings, weights | bias)[0] == TINY
    bias["model.layers.0.mixer.conv1d.bias"][2] = 1
    with pytest.raises(Fp4ReproError, match=r"conv1d\.bias is not zero"):
        from_nemotron_h(settings, weights | bias)
    with pytest.raises(Fp4ReproError, match="blocks of kind moe"):
        from_nemotron_h(settings | {"layers_block_type": ["moe"]}, weights)
    with pytest.raises(Fp4ReproError, match=r"'mixer\.gate'"):
        from_nemotron_h(settings, {"mixer.gate": torch.zeros(1)})
    with pytest.raises(Fp4ReproError, match="no positional embedding"):
        to_nemotron_h(TINY.replace(positions="rope"), {})


def test_the_written_settings_are_plain_json(model, tmp_path):
    save_nemotron_h(TINY, model.state_dict(), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["model_type"] == "nemotron_h"
    assert about["layers_block_type"][:2] == ["linear_attention", "mlp"]
