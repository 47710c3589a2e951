"""Where a result comes from: the device and the commit."""

import platform
import re
import subprocess
from pathlib import Path

import torch

from fp4repro.errors import Fp4ReproError
from fp4repro.plans import Cluster


def choose_device(wanted: str) -> torch.device:
    """The device of a scale's entry (auto, cpu, cuda)."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise Fp4ReproError(
            "the scale asks for device cuda and torch finds none: set device to cpu or auto, or "
            "install a CUDA build of torch on a machine with an NVIDIA GPU"
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def check_gpus(scale: str | None = None, cluster: Cluster | None = None) -> None:
    """Whether this machine has the GPUs that a scale's trainings run on; one sentence where it has not."""
    choose_device("cuda")
    if cluster is None:
        return
    if cluster.nodes > 1:
        raise Fp4ReproError(
            f"scale {scale} trains on {cluster.nodes} nodes, and this start is on one machine: start it "
            "through Slurm (--workflow-profile profiles/slurm), or set cluster.nodes to 1"
        )
    if cluster.ranks > torch.cuda.device_count():
        raise Fp4ReproError(
            f"scale {scale} trains on {cluster.ranks} GPUs, and torch finds {torch.cuda.device_count()}: set "
            "cluster.ranks, or start it where there are as many"
        )


def device_name(device: torch.device) -> str:
    """The device as results name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    text = information.read_text(encoding="utf-8") if information.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"CPU {model[1].strip() if model else platform.machine()}"


def columns(scale: str, device: torch.device) -> dict[str, str]:
    """The columns of the results schema that all rows of one process share."""
    where = {"scale": scale, "device": device_name(device)}
    return where | {"torch": str(torch.__version__), "commit": commit()}


def commit() -> str:
    """The commit of the code, with `-dirty` where files besides results differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    code = (":/", ":(top,exclude)results")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *code)
    return f"{head.strip()}{'-dirty' if changed else ''}"


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
