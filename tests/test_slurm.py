"""Trainings through a real Slurm of two nodes on one machine: marked `slurm`, skipped where there is none.

Debian: apt install slurmctld slurmd slurm-client munge. The daemons run as root, in a folder of their
own, with a GPU that is a null device, so that what asks for one is seen to get it. Jobs look for
Slurm's settings in their usual place (the plugin clears Slurm's variables), where a link stands meanwhile.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
USUAL = Path("/etc/slurm/slurm.conf")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, NEEDED)), reason="Slurm is not installed (slurmctld, slurmd, munge)"
    ),
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="starting Slurm's daemons needs root"),
    pytest.mark.skipif(USUAL.exists(), reason=f"this machine has a Slurm of its own ({USUAL})"),
    pytest.mark.skipif(
        find_spec("snakemake_executor_plugin_slurm") is None, reason="needs the extra `slurm`"
    ),
]

CONF = """\
ClusterName=one
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
GresTypes=gpu
NodeName=one NodeHostname={host} Port=16818 CPUs={cpus} RealMemory={memory} Gres=gpu:1 State=UNKNOWN
NodeName=two NodeHostname={host} Port=16819 CPUs={cpus} RealMemory={memory} Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes=one,two Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Environment variables under which Slurm's commands find a fresh cluster, of nodes on this machine."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    host = os.uname().nodename.split(".")[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 // 2 - 500
    conf = CONF.format(host=host, folder=folder, cpus=os.cpu_count(), memory=memory)
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for parent in (folder, *folder.parents[:2]):  # munged refuses a socket that others cannot reach
        parent.chmod(0o755)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munged = ["munged", "--foreground", "--force"]
    munged += [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
    daemons = [munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in ("one", "two"))]
    running = []
    try:
        for command in daemons:
            log = open(folder / f"{command[0]}.out", "wb")  # noqa: SIM115 (closed with the process)
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            time.sleep(2)
        _wait_for_nodes(environment, folder)
        USUAL.parent.mkdir(exist_ok=True)
        USUAL.symlink_to(folder / "slurm.conf")
        yield environment
    finally:
        USUAL.unlink(missing_ok=True)
        for process in reversed(running):
            process.terminate()
            process.wait(20)


def _wait_for_nodes(environment: dict, folder: Path) -> None:
    for _ in range(30):
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%D %T"], env=environment, capture_output=True, text=True
        )
        if done.stdout.strip() == "2 idle":
            return
        time.sleep(1)
    logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.*o[gu]*"))
    pytest.fail(f"the nodes did not come up: {done.stdout}{done.stderr}\n{logs}")


def test_a_job_gets_the_gpu(cluster):
    done = subprocess.run(
        ["srun", "--gres=gpu:1", "printenv", "CUDA_VISIBLE_DEVICES"],
        env=cluster,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "0", done.stderr


def project(tmp_path: Path) -> Path:
    """A copy of what a run needs."""
    copy = tmp_path / "project"
    copy.mkdir()
    for name in (
        "fp4repro",
        "workflow",
        "configs",
        "profiles",
        "Snakefile",
        "environment.yml",
        "pyproject.toml",
    ):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, dirs_exist_ok=True)
        else:
            shutil.copy(source, copy / name)
    return copy


def through_slurm(cluster: dict, copy: Path, wanted: str) -> str:
    """What Snakemake says while Slurm makes a file."""
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", wanted, "--workflow-profile", "profiles/slurm"],
        cwd=copy,
        env=cluster | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = done.stdout + done.stderr
    (copy.parent / "snakemake.log").write_text(said)
    assert done.returncode == 0, said[-4000:]
    assert (copy / wanted).exists()
    submitted = [line for line in said.splitlines() if "SLURM jobid" in line]
    assert len(submitted) == 2, submitted  # the data and the training, each a job of its own
    return said


def test_the_smoke_pipeline_runs_through_slurm(cluster, tmp_path):
    through_slurm(cluster, project(tmp_path), "results/smoke/pretrain/nvfp4/seed-0/metrics.csv")


def test_two_nodes_train_what_one_rank_does(cluster, tmp_path):
    """srun, torchrun and a rendezvous between the nodes, each with one rank on its CPU."""
    copy = project(tmp_path)
    scale = yaml.safe_load((copy / "configs" / "scales" / "smoke.yaml").read_text())
    scale["training"] |= {"tokens": 6 * 512, "batch": 4, "accumulate": 2, "validation_every": 3}
    scale |= {"scale": "nodes", "cluster": {"nodes": 2, "memory_gb": 2, "hours": 1}}
    path = copy / "configs" / "scales" / "nodes.yaml"
    path.write_text(yaml.safe_dump(scale))
    run = copy / "results" / "nodes" / "pretrain" / "nvfp4" / "seed-0"
    through_slurm(cluster, copy, str(run.relative_to(copy) / "metrics.csv"))
    assert json.loads((run / "run.json").read_text())["sessions"][0]["ranks"] == 2
    alone = [sys.executable, "-m", "fp4repro.train", "--scale", path, "--recipe", "nvfp4", "--seed", "0"]
    alone += ["--data", copy / "results" / "nodes" / "data", "--out", tmp_path / "alone"]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(list(map(str, alone)), cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("curve.csv", "model.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
