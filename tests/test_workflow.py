"""The Snakemake rules, run for real on a stand-in for training, and as plans on the real scales."""

import multiprocessing
import os
import re
import shutil
from pathlib import Path

import pytest
import snakemake.cli
import yaml

from fp4repro.ablations import FULLSTACK, load_ablations
from fp4repro.config import load_scale
from fp4repro.fullstack import optimizer_studies
from fp4repro.report.plan import plans
from fp4repro.report.registry import planned_tables

ROOT = Path(__file__).parents[1]
KEYS = ["input", "output", "log", "benchmark", "wildcard_constraints", "conda"]
KEYS += ["threads", "resources", "params", "message", "shell"]
RECIPES, SEEDS = ("bf16", "nvfp4"), (1,)
SEEDED = {"scratch_seeds": list(SEEDS), "branch_seeds": list(SEEDS)}
# What is run here: the other targets have no stand-in, and their stages have tests of their own.
TARGETS = ("pretrain", "formats")
# What follows the trainings of a scale, with the targets themselves.
TABLES = {"pretrain_table": 1, "pretrain_figure": 1, "formats_table": 1, "formats_figure": 1}
REPORTS = TABLES | dict.fromkeys(TARGETS, 1)
# What `fidelity` and `sensitivity` want beside the run that they study.
STUDIES = {"gradients": 1, "sensitivity": 1, "fidelity_table": 1, "sensitivity_table": 1, "fidelity": 1}

# Jobs of the whole plan that are one each, whatever the scale.
ONCE = ["data", "ablations_table", "fullstack_projections_table", "fullstack_projections_figure"]
ONCE += ["attention_sensitivity_table", "attention_sensitivity_figure", "gemm_benchmark", "cast_benchmark"]
ONCE += ["fullstack_table", "attention_control_table", "attention_control_figure"]
ONCE += ["roofline_table", "memory_table", "predictions", "kernels_report", "evals_tables", "all"]

# Writes what fp4repro.train writes, at once. It counts its steps in checkpoint.pt and, where a file
# `kill-it` lies in the working folder, dies half way by SIGKILL.
TRAIN = """
import argparse, os, signal
from pathlib import Path
from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.report import schema

def main():
    parser = argparse.ArgumentParser()
    for name in ("scale", "recipe", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--protocol", required=True)
    parser.add_argument("--trunk", type=Path)
    a = parser.parse_args()
    assert bool(a.trunk and a.trunk.exists()) == (a.protocol == "branches")
    if str(a.recipe) == "nvfp5":
        raise Fp4ReproError("there is no recipe 'nvfp5'")
    a.out.mkdir(parents=True, exist_ok=True)
    checkpoint = a.out / "checkpoint.pt"
    start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    print(f"{a.recipe}/seed-{a.seed}: from step {start}")
    more = ["trunk.pt"] if a.protocol == "trunk" else []
    for name in ("layers.csv", "model.safetensors", "run.json", *more):
        (a.out / name).write_text(f"{start}")
    if Path("kill-it").exists():
        checkpoint.write_text("5")
        Path("kill-it").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    loss = 4 + a.seed / 10 + (str(a.recipe) == "nvfp4") * (1 + a.seed / 4) / 20
    curve = ["step,tokens,train_loss,validation_loss", "1,1024,5.5,5.0", f"2,2048,{loss},{loss}", ""]
    (a.out / "curve.csv").write_text("\\n".join(curve))
    values = {"validation_loss": loss, "bits_per_byte": 1.5, "tokens": 2048, "parameters": 10,
              "diverged": 0}
    schema.write_rows(a.out / "metrics.csv", [
        schema.Row(experiment=a.protocol, setting=schema.run_setting(str(a.recipe), a.seed),
                   metric=metric, value=value, unit=schema.UNITS[metric], n=1, scale=a.scale.stem)
        for metric, value in values.items()])
    checkpoint.unlink(missing_ok=True)

run_stage("fp4repro.train", main)
"""

# Writes what fp4repro.fidelity writes, without a model to look into.
FIDELITY = """
import argparse
from pathlib import Path
from fp4repro.report import formats, schema

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["formats"])
parser.add_argument("--if-available", action="store_true")
for name in ("scale", "run", "data", "out"):
    parser.add_argument(f"--{name}", type=Path, required=True)
a = parser.parse_args()
assert (a.run / "model.safetensors").exists() and (a.data / "data.json").exists()
schema.write_rows(a.out, [
    schema.Row(experiment=formats.EXPERIMENT, setting=formats.setting("nvfp4-1x16", data),
               metric=metric, value=0.5, unit=unit, n=1, scale=a.scale.stem, note=a.run.as_posix())
    for data in ("gaussian", "weights") for metric, unit in formats.UNITS.items()])
"""


# Processes forked from one that has Snakemake imported: seconds saved a run.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["snakemake.cli", "snakemake.report", "pandas", "fp4repro.config"])


def _snakemake(arguments: tuple, folder: Path, environment: dict) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    Path("output.txt").unlink(missing_ok=True)
    # Appending, since the jobs of a run write to it side by side: else one may overwrite another's line.
    with open("output.txt", "a", encoding="utf-8") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    snakemake.cli.main(list(arguments))


class Workflow:
    """The workflow copied to a folder, with scales `one` and `two` and a shelf of books."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("workflow", "profiles", "configs"):
            shutil.copytree(ROOT / name, folder / name)
        for name in ("Snakefile", "environment.yml"):
            shutil.copy(ROOT / name, folder)
        scale = yaml.safe_load((ROOT / "configs" / "scales" / "smoke.yaml").read_text())
        scale |= {
            "pretrain": {"recipes": list(RECIPES), "seeds": list(SEEDS)},
            "ablations": {"scratch": ["late_end"], "branches": ["no_sr", "no_rht"], **SEEDED},
        }
        for name in ("one", "two"):
            self.write_scale(scale | {"scale": name})
        (folder / "shelf" / "standard_ebooks").mkdir(parents=True)
        for name in ("a", "b"):
            lines = (f"{name} {number} {number**2}\n" for number in range(4000))
            (folder / "shelf" / "standard_ebooks" / f"{name}.txt").write_text("".join(lines))

    def write_scale(self, scale: dict) -> None:
        path = self.folder / "configs" / "scales" / f"{scale['scale']}.yaml"
        path.write_text(yaml.safe_dump(scale))

    def edit(self, name: str, *keys: str, value) -> None:
        """Change one entry of a scale file."""
        path = self.folder / "configs" / "scales" / f"{name}.yaml"
        scale = inner = yaml.safe_load(path.read_text())
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        path.write_text(yaml.safe_dump(scale))

    def fake_training(self) -> None:
        """`python -m` looks into the working folder first: the stand-in hides the real stage."""
        package = self.folder / "fp4repro"
        package.mkdir()
        (package / "__init__.py").write_text(f"__path__.append({str(ROOT / 'fp4repro')!r})\n")
        for stage, text in (("train", TRAIN), ("fidelity", FIDELITY)):
            (package / stage).mkdir()
            (package / stage / "__init__.py").touch()
            (package / stage / "__main__.py").write_text(text)

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Exit code and output of `snakemake ARGUMENTS`."""
        environment = {"FP4REPRO_DATA": "shelf"} | environment
        process = PROCESSES.Process(target=_snakemake, args=(arguments, self.folder, environment))
        process.start()
        process.join()
        return process.exitcode, (self.folder / "output.txt").read_text(encoding="utf-8")

    def plan(self, *arguments: str, **environment: str) -> dict[str, int]:
        """Jobs by rule that Snakemake would run."""
        code, output = self.run("-n", *arguments, **environment)
        assert code == 0, output
        jobs = re.findall(r"^(\w+) +(\d+)$", output, re.MULTILINE)
        return {rule: int(number) for rule, number in jobs}


@pytest.fixture
def workflow(tmp_path):
    return Workflow(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A workflow whose scale `one` has TARGETS, made with the stand-in for training."""
    workflow = Workflow(tmp_path_factory.mktemp("finished"))
    workflow.fake_training()
    code, workflow.output = workflow.run(*TARGETS, "--config", "scale=one")
    assert code == 0, workflow.output
    return workflow


def planned(**jobs: int) -> dict[str, int]:
    return jobs | {"total": sum(jobs.values())}


def test_default_plan_is_all_of_the_laptop_scale(workflow):
    scale = load_scale(ROOT / "configs" / "scales" / "laptop.yaml")
    protocols = plans(scale, load_ablations())
    modules = plans(scale, load_ablations(FULLSTACK), "fullstack")
    folders = {folder for plan in (*protocols, *modules) for folder in plan.folders()}
    trained = {f"pretrain/{r}/seed-{s}" for r in scale.pretrain.recipes for s in scale.pretrain.seeds}
    jobs = TABLES | STUDIES | dict.fromkeys(ONCE, 1) | {"ablations_figure": len(protocols)}
    jobs |= {
        "train": len(trained | {folder for folder in folders if folder.startswith("pretrain/")}),
        "ablation": sum(folder.startswith("ablations/") for folder in folders),
        "fullstack_run": sum(folder.startswith("fullstack/") for folder in folders),
        "trunk": len({*scale.ablations.branch_seeds, *scale.fullstack.branch_seeds}),
        "branch": sum(folder.startswith("branches/") for folder in folders),
        "gradients": len(scale.fidelity.models),
        "sensitivity": len(scale.fidelity.models),
        "fullstack_optim_table": len(optimizer_studies.STUDIES),
        "fullstack_optim_figure": len(optimizer_studies.STUDIES),
        "evaluate": len(scale.evals.models),
    }
    del jobs["fidelity"]  # `all` asks for its files
    assert workflow.plan() == planned(**{rule: number for rule, number in jobs.items() if number})


def test_publish_asks_for_all_that_a_plain_run_makes_or_for_chosen_targets(workflow):
    """And the tables that a run makes are those that a published folder is asked for."""
    whole, publish = {"published_folder": 1, "publish": 1}, ("publish", "--config", "scale=smoke")
    every = workflow.plan("--config", "scale=smoke")
    every.pop("all")
    assert workflow.plan(*publish) == planned(**{k: n for k, n in every.items() if k != "total"}, **whole)
    some = workflow.plan(*publish, "studies=[pretrain,formats]")
    trainings = every["train"]
    assert some == planned(data=1, train=trainings, **TABLES, **whole)
    tables = re.findall(r"results/smoke/tables/(\w+)\.csv", workflow.run("--summary", *publish)[1])
    assert set(tables) == set(planned_tables(load_scale(ROOT / "configs" / "scales" / "smoke.yaml")))


def test_fidelity_studies_one_run_and_the_pretrained_models(workflow):
    one = planned(data=1, train=1, **STUDIES)
    assert workflow.plan("fidelity", "--config", "scale=one") == one
    # The laptop adds SmolLM2, which needs no training.
    two = workflow.plan("fidelity", "--config", "scale=laptop")
    assert two == planned(data=1, train=1, **STUDIES | {"gradients": 2, "sensitivity": 2})
    workflow.edit("one", "fidelity", "models", value=["some/model"])
    alone = workflow.plan("results/one/fidelity/some--model.csv", "--config", "scale=one")
    assert alone == planned(gradients=1)
    assert workflow.plan("results/two/fidelity/other--model.csv") == planned(gradients=1)


def test_a_run_named_by_its_file_is_trained_alone(workflow):
    # Also where the default scale is another one, and for a seed that no table asks for.
    for seed in (0, 7):
        target = f"results/laptop/pretrain/nvfp4/seed-{seed}/metrics.csv"
        assert workflow.plan(target, "--config", "scale=smoke") == planned(data=1, train=1)


def test_paper_scale_is_a_plan_and_refused_without_its_gpu(workflow):
    assert workflow.plan("--config", "scale=paper")["train"] > 0
    said = (workflow.folder / "output.txt").read_text()
    assert "Plan of scale paper on 23 x 8 GB300, modelled for native products, not measured" in said
    for run in ("pretrain/fp8", "pretrain/nvfp4", "branches/trunk", "branches/no_sr"):
        (row,) = (line for line in said.splitlines() if line.startswith(f"| {run} "))
        hours, gpu_hours, gib = (float(cell.replace(",", "")) for cell in row.split("|")[5:8])
        assert gpu_hours == pytest.approx(184 * hours, rel=0.02) and 20 < gib < 288
    code, output = workflow.run("--config", "scale=paper", CUDA_VISIBLE_DEVICES="")
    assert code != 0
    assert "device cuda and torch finds none" in output
    assert_a_sentence(output)
    assert not (workflow.folder / "results" / "paper" / "data").exists()


def test_ranks_of_a_scale_are_started_and_asked_for(workflow):
    """The shell and the resources of one training: alone, on a node, on several."""
    rules = workflow.folder / "workflow" / "rules" / "pretrain.smk"
    rules.write_text(
        rules.read_text().replace('"Train {wildcards', '"Resources {resources}; Train {wildcards')
    )

    def planned_training(**cluster):
        workflow.edit("two", "cluster", value=cluster)
        workflow.edit("two", "training", "accumulate", value=8)
        target = "results/two/pretrain/nvfp4/seed-0/metrics.csv"
        code, output = workflow.run("-n", "-p", target, "--cores", "16")
        assert code == 0, output
        shell = re.search(r"^Shell command: (.* -m fp4repro\.train .*)$", output, re.MULTILINE)[1]
        return shell, re.search(r"Resources (.*); Train", output)[1].split()

    shell, resources = planned_training(hours=3, memory_gb=7)
    assert shell.startswith("python -m fp4repro.train --scale")
    assert {"7000", "180"} <= set(resources) and "srun" not in resources and "None" not in resources
    shell, resources = planned_training(ranks=4)
    assert shell.startswith(
        "python -m torch.distributed.run --standalone --nproc-per-node=4 -m fp4repro.train"
    )
    assert "srun" not in resources
    shell, resources = planned_training(nodes=2, ranks=4)
    assert shell.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 python -m torch")
    assert "--nnodes=2 --nproc-per-node=4" in shell and "$(hostname):$((29500" in shell
    assert "srun" in resources and resources.count("2") >= 2  # nodes and tasks


def test_other_ranks_are_no_other_run(finished):
    for cluster in ({"ranks": 2, "hours": 5}, {}):
        finished.edit("one", "cluster", value=cluster)
        finished.edit("one", "health_every", value=7)
        finished.edit("one", "training", "accumulate", value=1 if not cluster else 2)
        plan = finished.plan(*TARGETS, "--config", "scale=one")
        assert (plan == {}) == (not cluster)  # accumulate is a setting of the run


def test_kubernetes_can_be_planned(workflow):
    pytest.importorskip("snakemake_executor_plugin_kubernetes")
    pytest.importorskip(
        "snakemake_storage_plugin_fs"
    )  # a folder in place of a bucket, which a plan looks into
    profile = ("--workflow-profile", "profiles/kubernetes", "--default-storage-provider", "fs")
    profile += ("--default-storage-prefix", str(workflow.folder / "bucket"))
    target = "results/gpu/pretrain/nvfp4/seed-0/metrics.csv"
    assert workflow.plan(target, *profile, "--cores", "4")["train"] == 1


@pytest.mark.parametrize(
    ("given", "gpus"),
    [([], 1), (["--resources", "gpu=4"], 4), (["--workflow-profile", "none"], 1)],  # the profile has one
)
def test_a_benchmark_takes_every_core_and_gpu_of_the_run(workflow, given, gpus):
    rules = workflow.folder / "workflow" / "rules" / "kernels.smk"
    message = '"{threads} cores, {resources.gpu} GPUs: '
    rules.write_text(rules.read_text().replace('"Products of the linears', f"{message}products"))
    code, output = workflow.run("-n", "results/paper/tables/kernels.csv", "--cores", "3", *given)
    assert code == 0 and f"3 cores, {gpus} GPUs: products" in output, output


def assert_a_sentence(output: str) -> None:
    assert "Traceback" not in output
    assert "  File " not in output


@pytest.mark.parametrize(
    ("arguments", "mistake", "said"),
    [
        (["--config", "scale=lapptop"], None, "there is no scale 'lapptop'"),
        (["--config", "scal=smoke"], None, "unknown key 'scal'"),
        ([], ("seed", [0]), "two.yaml: unknown key 'seed'"),
    ],
)
def test_a_mistake_in_a_config_is_one_sentence(workflow, arguments, mistake, said):
    if mistake:
        workflow.edit("two", mistake[0], value=mistake[1])
    code, output = workflow.run(*arguments)
    assert code != 0
    assert said in output
    assert_a_sentence(output)
    assert not (workflow.folder / "results").exists()


def test_a_finished_scale_has_its_files_where_the_readme_says(finished):
    results = finished.folder / "results" / "one"
    files = {str(path.relative_to(results)) for path in results.rglob("*") if path.is_file()}
    runs = {f"pretrain/{recipe}/seed-{seed}" for recipe in RECIPES for seed in SEEDS}
    stages = {"data", *TABLES, *runs}
    names = ("metrics.csv", "curve.csv", "layers.csv", "model.safetensors", "run.json")
    assert files == {
        *(f"data/{name}" for name in ("tokenizer.json", "train.bin", "validation.bin", "data.json")),
        *(f"{run}/{name}" for run in runs for name in names),
        *(f"tables/{name}.{suffix}" for name in ("pretrain", "formats") for suffix in ("csv", "md")),
        *(f"figures/{name}.{suffix}" for name in ("pretrain", "formats") for suffix in ("png", "svg", "pdf")),
        *(f"logs/{stage}.log" for stage in stages),
        *(f"benchmarks/{stage}.tsv" for stage in stages),
    }
    log = (results / "logs" / "pretrain" / "nvfp4" / "seed-1.log").read_text()
    assert log == "nvfp4/seed-1: from step 0\n"
    assert log in finished.output  # progress is seen while it runs, too
    table = (results / "tables" / "pretrain.md").read_text()
    assert "+1.52 (no interval: one seed)" in table  # 0.0625 / 4.1
    # Formats are studied on the BF16 run of the first seed.
    assert "weights: results/one/pretrain/bf16/seed-1." in (results / "tables" / "formats.md").read_text()


@pytest.mark.parametrize(
    ("edits", "jobs"),
    [
        ({("training", "learning_rate"): 0.001}, {"train": 2}),
        ({("tokenizer", "vocabulary"): 640}, {"data": 1, "train": 2}),
        ({("pretrain", "seeds"): [0, 1, 2]}, {"train": 4}),
        ({("training", "checkpoint_every"): 5, ("log_every",): 3, ("description",): "x"}, {}),
    ],
)
def test_an_edit_reruns_only_what_depends_on_it(finished, edits, jobs):
    path = finished.folder / "configs" / "scales" / "one.yaml"
    before = path.read_text()
    try:
        for keys, value in edits.items():
            finished.edit("one", *keys, value=value)
        assert finished.plan(*TARGETS, "--config", "scale=one") == (
            planned(**jobs, **REPORTS) if jobs else {}
        )
    finally:
        path.write_text(before)


def test_tables_that_came_with_a_clone_are_made_anew(finished, workflow):
    for folder in ("tables", "figures"):
        shutil.copytree(
            finished.folder / "results" / "one" / folder,
            workflow.folder / "results" / "one" / folder,
        )
    every = planned(data=1, train=2, **REPORTS)
    assert workflow.plan(*TARGETS, "--config", "scale=one") == every


def test_other_books_are_other_data(finished):
    for same in ("shelf", str(finished.folder / "shelf")):
        assert finished.plan(*TARGETS, "--config", "scale=one", FP4REPRO_DATA=same) == {}
    other = finished.plan(*TARGETS, "--config", "scale=one", FP4REPRO_DATA="")
    assert other == planned(data=1, train=2, **REPORTS)


def test_a_training_killed_goes_on_where_it_was(workflow):
    workflow.fake_training()
    target = "results/one/pretrain/nvfp4/seed-0/metrics.csv"
    run = (workflow.folder / target).parent
    (workflow.folder / "kill-it").touch()
    code, output = workflow.run(target)
    assert code != 0
    assert_a_sentence(output)
    assert [path.name for path in run.iterdir()] == ["checkpoint.pt"]
    code, output = workflow.run(target)
    assert code == 0, output
    assert "nvfp4/seed-0: from step 5" in output
    assert not (run / "checkpoint.pt").exists()


def test_a_failing_run_shows_its_sentence(workflow):
    workflow.fake_training()
    code, output = workflow.run("results/one/pretrain/nvfp5/seed-0/metrics.csv")
    assert code != 0
    assert "fp4repro.train: error: there is no recipe 'nvfp5'" in output
    assert_a_sentence(output)


@pytest.fixture(scope="module")
def ablated(finished):
    """The same workflow after `snakemake ablations`."""
    code, output = finished.run("ablations", "--config", "scale=one")
    assert code == 0, output
    return finished


def test_ablations_have_their_files_where_the_docs_say(ablated):
    results = ablated.folder / "results" / "one"
    runs = {str(path.parent.relative_to(results)) for path in results.rglob("metrics.csv")}
    assert runs - {f"pretrain/{recipe}/seed-1" for recipe in RECIPES} == {
        "ablations/late_end/seed-1",
        *(f"branches/{name}/seed-1" for name in ("trunk", "bf16", "no_sr", "no_rht")),
    }
    figures = {path.name for path in (results / "figures").glob("ablations_*")}
    kinds = ("png", "svg", "pdf")
    assert figures == {f"ablations_{p}.{kind}" for p in ("scratch", "branches") for kind in kinds}
    table = (results / "tables" / "ablations.md").read_text()
    assert "no_sr" in table and "late_end" in table and "undecided" in table


def test_an_edited_ablation_is_trained_anew_alone(ablated):
    path = ablated.folder / "configs" / "ablations.yaml"
    before = path.read_text()
    assert ablated.plan("ablations", "--config", "scale=one") == {}
    reports = {"ablations_table": 1, "ablations_figure": 2, "ablations": 1}
    entries = yaml.safe_load(before)
    try:
        entries["no_rht"]["replace"] = {"hadamard": ["dgrad", "wgrad"]}
        path.write_text(yaml.safe_dump(entries, sort_keys=False))
        assert ablated.plan("ablations", "--config", "scale=one") == planned(branch=1, **reports)
        entries["no_rht"] = yaml.safe_load(before)["no_rht"] | {"note": "told otherwise"}
        path.write_text(yaml.safe_dump(entries, sort_keys=False))
        assert ablated.plan("ablations", "--config", "scale=one") == planned(**reports)
    finally:
        path.write_text(before)


def test_an_ablation_named_by_its_file_is_trained_with_what_it_needs(workflow):
    target = "results/laptop/ablations/no_rht/seed-0/metrics.csv"
    assert workflow.plan(target) == planned(data=1, ablation=1)
    target = "results/laptop/branches/signs_drawn/seed-5/metrics.csv"
    assert workflow.plan(target) == planned(data=1, trunk=1, branch=1)


def test_a_module_named_by_its_file_is_trained_with_what_it_needs(workflow):
    target = "results/overnight/fullstack/muon_full_stack/seed-0/metrics.csv"
    assert workflow.plan(target) == planned(data=1, fullstack_run=1)
    target = "results/laptop/branches/full_stack/seed-5/metrics.csv"
    assert workflow.plan(target) == planned(data=1, trunk=1, branch=1)


def test_a_mistake_in_an_ablation_ends_snakemake_with_a_sentence(workflow):
    path = workflow.folder / "configs" / "ablations.yaml"
    path.write_text(path.read_text().replace("{hadamard_size: 2}", "{hadamard_sizes: 2}"))
    code, output = workflow.run("ablations")
    assert code != 0
    assert "rht_2: recipe nvfp4 has no field 'hadamard_sizes'" in output
    assert_a_sentence(output)


def test_every_rule_that_runs_logs_is_benchmarked_and_keeps_the_order():
    text = "\n".join(path.read_text() for path in sorted((ROOT / "workflow").glob("rules/*.smk")))
    rules = re.findall(r"^rule (\w+):\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    assert {name for name, _ in rules} >= {"data", "train", *REPORTS, *STUDIES}
    for name, body in rules:
        keys = re.findall(r"^    (\w+):", body, re.MULTILINE)
        assert keys == sorted(keys, key=KEYS.index), name
        if "shell" in keys:
            assert {"output", "log", "benchmark", "conda", "threads", "message"} <= set(keys), name
            assert re.search(r"2>&1 \| tee \{log\}|> \{log\} 2>&1", body), name
