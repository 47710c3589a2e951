"""How a training's ranks are started: python for one, torchrun for those of a node, srun and torchrun for
several nodes.

On several nodes Slurm runs the job's shell on the first of its nodes, whose name and a port of the job's own
are where the ranks meet (torchrun's c10d rendezvous).
"""

from fp4repro.plans import Cluster

PYTHON = "python"
TORCHRUN = f"{PYTHON} -m torch.distributed.run"
FIRST_PORT = 29_500


def launcher(cluster: Cluster, threads: int) -> str:
    """The command that `-m fp4repro.train ...` follows; `threads`: of one rank."""
    nodes, ranks = cluster.nodes, cluster.ranks
    if nodes * ranks == 1:
        return PYTHON
    if nodes == 1:
        return f"{TORCHRUN} --standalone --nproc-per-node={ranks}"
    step = f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={ranks * threads}"
    where = f"--rdzv-backend=c10d --rdzv-endpoint=$(hostname):$(({FIRST_PORT} + SLURM_JOB_ID % 1000))"
    return f"{step} {TORCHRUN} --nnodes={nodes} --nproc-per-node={ranks} --rdzv-id=$SLURM_JOB_ID {where}"
