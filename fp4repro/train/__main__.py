"""`python -m fp4repro.train --scale FILE --recipe NAME --seed N --data DIR --out DIR`: one run.

`--protocol` says how it is made (`fp4repro.train.protocols`); without it, from scratch.

Killed and started again with the same options, it goes on from its last checkpoint and ends with
the same bytes in `metrics.csv`, `curve.csv` and `model.safetensors` as a run left alone.
"""

import argparse
import os
import time
from pathlib import Path

import torch

from fp4repro.ablations import load_entries, recipe_or_ablation
from fp4repro.config import load_scale
from fp4repro.core.compiled import compile_nothing
from fp4repro.data.tokens import open_tokens
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.models.scan import choose_scan
from fp4repro.train import provenance
from fp4repro.train.checkpoint import save_checkpoint
from fp4repro.train.checkpoints import checkpoints_of
from fp4repro.train.evaluate import held_out
from fp4repro.train.job import Job, Trunk, model_of
from fp4repro.train.memory import keep_freed_memory
from fp4repro.train.monitor import Monitor
from fp4repro.train.outputs import write_outputs
from fp4repro.train.progress import Progress
from fp4repro.train.protocols import BRANCHES, PRETRAIN, PROTOCOLS, TRUNK, scale_of
from fp4repro.train.world import World


def main() -> None:
    parser = argparse.ArgumentParser(prog="fp4repro.train", description="Train one model.")
    parser.add_argument("--scale", type=Path, required=True, help="a file of configs/scales")
    parser.add_argument(
        "--recipe",
        required=True,
        help="a recipe, such as nvfp4, or an entry of configs/ablations.yaml or configs/fullstack.yaml",
    )
    parser.add_argument(
        "--protocol", choices=PROTOCOLS, default=PRETRAIN, help="see fp4repro.train.protocols"
    )
    parser.add_argument("--trunk", type=Path, help="checkpoint that a run of the protocol branches leaves")
    parser.add_argument("--seed", type=int, required=True, help="of weights, data and rounding")
    parser.add_argument("--data", type=Path, required=True, help="folder that fp4repro.data wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the run's files")
    arguments = parser.parse_args()
    if not 0 <= arguments.seed < 2**32:
        raise Fp4ReproError(f"the seed is {arguments.seed}, but must be from 0 to {2**32 - 1}")
    if (arguments.protocol == BRANCHES) != bool(arguments.trunk):
        raise Fp4ReproError("--protocol branches and --trunk FILE belong together: give both or neither")
    train(job_of(arguments), arguments.out)


def job_of(arguments: argparse.Namespace) -> Job:
    """The run that the command line names."""
    scale, entries = load_scale(arguments.scale), load_entries()
    device = provenance.choose_device(scale.device)
    data = open_tokens(arguments.data, scale)

    def job(protocol: str, name: str, trunk: Trunk | None = None) -> Job:
        entry = entries.get(name)
        if protocol == BRANCHES and entry and entry.only_whole:
            raise Fp4ReproError(f"{name} {entry.only_whole}: train it from scratch, by another --protocol")
        taken = scale_of(scale, protocol, entry)
        recipe = recipe_or_ablation(name, entries)
        return Job(taken, model_of(taken), recipe, arguments.seed, data, device, protocol, trunk)

    trunk = Trunk(job(TRUNK, "bf16"), arguments.trunk) if arguments.trunk else None
    return job(arguments.protocol, arguments.recipe, trunk)


def train(job: Job, out: Path) -> None:
    """Train one run, from its checkpoint where there is one, and write its files."""
    began = time.perf_counter()
    world = World.join(job.device, job.scale.training.parallel)
    world.check(job.scale.training.accumulate)
    set_up_torch(job)
    run = job.begin(world)
    settings = job.settings()
    checkpoints = checkpoints_of(out, settings, run)
    sessions = checkpoints.restore()  # one for each process that has trained on this run
    resumed = bool(sessions)
    session = {"from_step": run.step, "commit": provenance.commit(), "ranks": world.size}
    sessions.append(session)

    progress = Progress(
        job.label, run.step, run.settings.steps, run.settings.tokens_per_step, job.scale.log_every
    )
    if world.leads:
        progress.say(str(choose_scan(job.device.type)))
        if resumed:
            progress.say(f"goes on from step {run.step}")

    monitor = Monitor(run, job.scale, out) if world.leads else None

    def after_step() -> None:
        if world.leads:
            monitor.after_step()
            progress.update(run.step, run.last("train_loss"))
        session["wall_seconds"] = time.perf_counter() - began
        if run.step % run.settings.checkpoint_every == 0 and not run.finished:
            checkpoints.save(sessions)

    held = held_out(job.data, run.settings)
    run.train(job.batches, held, after_step)
    if world.leads:
        session["tokens_per_second"] = progress.tokens_per_second(run.step)
        session["operands_quantised"] = run.phases.calls()
        if run.diverged:
            progress.say(run.diverged)
        if job.protocol == TRUNK and not run.diverged:
            save_checkpoint(out / "trunk.pt", settings, run.state())
        monitor.finish()
    write_outputs(out, job, run, run.phases.conversion, held, sessions)
    checkpoints.clear()
    progress.close()
    world.leave()


def set_up_torch(job: Job) -> None:
    """Threads, and kernels that give the same bits each time."""
    torch.set_num_threads(job.scale.threads)
    if not job.scale.compile:
        compile_nothing()
    keep_freed_memory()
    if job.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # The mode also fills new memory, which only helps to find reads of it.
        torch.utils.deterministic.fill_uninitialized_memory = False


if __name__ == "__main__":
    run_stage("fp4repro.train", main)
