"""What the rules share: the scale files by name, settings as params, and the runs of an experiment.

A path's {scale} decides which scale file its rule reads. The settings that a result depends on are
its rule's params, so that editing one of them reruns what depends on it and nothing else.
"""

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

from fp4repro.ablations import load_entries
from fp4repro.config import SCHEMAS, check, load_scale, read_yaml
from fp4repro.data.files import VARIABLE
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.report.plan import plans
from fp4repro.train.launch import launcher
from fp4repro.train.protocols import scale_of

SCALE_FILES = Path("configs/scales")
SCALES = {}
ENTRIES = {}


def read_config():
    """Check the configuration and every scale file; a mistake ends Snakemake with a sentence."""
    schema = read_yaml(SCHEMAS / "config.schema.yaml")
    check(dict(config), schema, Path("configs/default.yaml (or --config)"))
    ENTRIES.update(
        load_entries(*(Path(f"configs/{n}.yaml") for n in ("ablations", "fullstack")))
    )
    for path in sorted(SCALE_FILES.glob("*.yaml")):
        SCALES[path.stem] = load_scale(path)
    if config["scale"] not in SCALES:
        raise Fp4ReproError(
            f"there is no scale {config['scale']!r}; {SCALE_FILES} has {', '.join(SCALES)}"
        )


def refuse_without_gpus():
    """A scale that names CUDA can be planned anywhere (snakemake -n) but not begun."""
    jobs = [job for job in workflow.dag.needrun_jobs() if job.resources.get("gpu")]
    if workflow.local_exec and jobs:
        from fp4repro.train.provenance import check_gpus  # seconds, for torch

        trained = {job.wildcards.scale for job in jobs if job.resources.get("launcher")}
        for scale in sorted(trained) or [None]:
            check_gpus(scale, SCALES[scale].cluster if scale else None)


def print_budget():
    """GPU hours and memory of a scale's trainings, above the plan of its jobs (snakemake -n)."""
    scale = SCALES[config["scale"]]
    if workflow.output_settings.dryrun and scale.device == "cuda":
        from fp4repro.budget import plan  # seconds, for torch

        print(plan(scale), end="\n\n", flush=True)


def threads_of_node(wildcards):
    """CPU threads of a training's ranks on one node."""
    scale = SCALES[wildcards.scale]
    return scale.threads * scale.cluster.ranks


def memory_of_node(wildcards):
    return 1000 * SCALES[wildcards.scale].cluster.memory_gb


def minutes_of_job(wildcards):
    return round(60 * SCALES[wildcards.scale].cluster.hours)


def gpus_of_training(wildcards):
    """GPUs of a training, on all of its nodes together."""
    scale = SCALES[wildcards.scale]
    return scale.cluster.size if scale.device == "cuda" else 0


def launcher_of(wildcards):
    """How a training's ranks are started. No param: on other nodes a run is the same run."""
    scale = SCALES[wildcards.scale]
    return launcher(scale.cluster, scale.threads)


def on_several_nodes(what):
    """A resource function of what Slurm is told where a training has several nodes, else nothing: to put one
    task on each node, not one on each GPU, and to let the job's shell start them (`mpi`).
    """

    def resource(wildcards):
        nodes = SCALES[wildcards.scale].cluster.nodes
        return {"nodes": nodes, "no": 0, "mpi": "srun"}[what] if nodes > 1 else None

    return resource


def data_settings(wildcards):
    """What the token files depend on, with the corpus that `default` stands for here."""
    scale = asdict(SCALES[wildcards.scale])
    settings = {key: scale[key] for key in ("corpus", "corpus_bytes", "tokenizer")}
    if settings["corpus"] == "default":
        books = os.environ.get(VARIABLE)
        settings["corpus"] = os.path.abspath(books) if books else "python-stdlib"
    return json.dumps(settings, sort_keys=True)


def run_settings(protocol):
    """An input function: what a run's bits depend on beside its data and seed, and for pretraining
    beside its recipe, which is code. An ablation's are its entry's alone."""

    def settings(wildcards):
        entry = ENTRIES.get(wildcards.get("recipe"))
        taken = scale_of(SCALES[wildcards.scale], protocol, entry)
        scale = asdict(taken)
        found = {
            key: scale[key]
            for key in ("model_overrides", "training", "device", "threads")
        }
        found["model"] = read_yaml(taken.model_path)
        del found["training"]["checkpoint_every"]
        if entry and protocol != "pretrain":
            found["recipe"] = repr(entry.recipe)
        return json.dumps(found, sort_keys=True)

    return settings


def pretrain_runs(scale, name):
    """The file of that name of every run that the scale plans."""
    plan = SCALES[scale].pretrain
    return expand(
        "results/{scale}/pretrain/{recipe}/seed-{seed}/{name}",
        scale=scale,
        recipe=plan.recipes,
        seed=plan.seeds,
        name=name,
    )


def results_of(experiment, scale):
    """The tables and figures of an experiment."""
    results = [f"tables/{experiment}.{suffix}" for suffix in ("csv", "md")]
    results += [f"figures/{experiment}.{suffix}" for suffix in ("png", "svg", "pdf")]
    return [f"results/{scale}/{name}" for name in results]


def pretrain_results(scale):
    """What the pretraining experiment gives.

    Tables and figures may come with a clone; weights never do, so that asking for them trains there.
    """
    return [*pretrain_runs(scale, "model.safetensors"), *results_of("pretrain", scale)]


def entry_runs(name, experiment):
    """An input function: the file of that name of every run that the scale's ablations, or full-stack
    entries, need."""

    def files(wildcards):
        return [
            f"results/{wildcards.scale}/{folder}/{name}"
            for plan in plans(SCALES[wildcards.scale], ENTRIES, experiment)
            for folder in plan.folders()
        ]

    return files


def ablation_results(scale):
    """Tables and figures of the ablations; nothing where the scale plans none."""
    protocols = [plan.protocol for plan in plans(SCALES[scale], ENTRIES)]
    names = [f"tables/ablations.{suffix}" for suffix in ("csv", "md")]
    names += [
        f"figures/ablations_{protocol}.{suffix}"
        for protocol in protocols
        for suffix in ("png", "svg", "pdf")
    ]
    return [f"results/{scale}/{name}" for name in names if protocols]


def fullstack_results(scale):
    """Table and figure of the full stack's entries; nothing where the scale plans none."""
    planned = plans(SCALES[scale], ENTRIES, "fullstack")
    return results_of("fullstack", scale) if planned else []


def folders(wildcards, input):
    """The folders of the runs that a rule's input names."""
    return [os.path.dirname(path) for path in input.metrics]


def studied_run(name):
    """An input function: the file of that name of the run whose tensors are studied, BF16 where the
    scale trains it."""

    def file(wildcards):
        plan = SCALES[wildcards.scale].pretrain
        recipe = "bf16" if "bf16" in plan.recipes else plan.recipes[0]
        return (
            f"results/{wildcards.scale}/pretrain/{recipe}/seed-{plan.seeds[0]}/{name}"
        )

    return file


run_stage("snakemake", read_config)
run_stage("snakemake", print_budget)

# The rules call `python`: that of this Snakemake, also where its environment is not activated.
os.environ.update(
    PATH=os.pathsep.join([os.path.dirname(sys.executable), *os.get_exec_path()])
)


onstart:
    run_stage("snakemake", refuse_without_gpus)


wildcard_constraints:
    scale="|".join(SCALES),
    protocol="scratch|branches",
    recipe="[^/]+",
    device="[A-Z0-9-]+",
    model="[a-z][a-z0-9.-]*",
    seed="0|[1-9][0-9]*",
    subject="[^/]+",
