"""`python -m fp4repro.memory --model M --recipe R --ranks N`: the memory of one GPU, item by item.

From shapes alone, on the meta device. With `--table FILE` the whole table: operands and small models
really measured, and the 12B under each recipe.
"""

import argparse
from pathlib import Path

import torch

from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.memory import tables
from fp4repro.memory.account import ACTIVATIONS, STATES, WEIGHTS, Assumptions, account
from fp4repro.memory.activations import FUSED, HERE
from fp4repro.report.published import load_published
from fp4repro.report.schema import write_rows
from fp4repro.roofline.calibrate import PUBLISHED, model_config
from fp4repro.roofline.recipes import speed_recipe, speed_recipe_names
from fp4repro.train.provenance import commit, device_name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.memory", description=__doc__)
    parser.add_argument("--model", default="nemotron-12b", help="a file of configs/models, by its name")
    parser.add_argument("--recipe", default="nvfp4", help=", ".join(speed_recipe_names()))
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share states and weights (FSDP)")
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch on one GPU")
    parser.add_argument(
        "--implementation",
        choices=[HERE, FUSED],
        default=FUSED,
        help=f"{HERE}: this project's model, in float32 between the linears; {FUSED}: as frameworks keep it",
    )
    parser.add_argument("--table", type=Path, help="CSV of the whole table to write")
    arguments = parser.parse_args()
    if arguments.table:
        where = {
            "device": device_name(torch.device("cpu")),
            "torch": str(torch.__version__),
            "commit": commit(),
        }
        write_rows(arguments.table, tables.rows(load_published(PUBLISHED), where))
        return
    if arguments.ranks < 1 or arguments.tokens < 1:
        raise Fp4ReproError("--ranks and --tokens must be 1 or more")
    fused = arguments.implementation == FUSED
    assumed = Assumptions(
        arguments.ranks,
        arguments.tokens,
        arguments.implementation,
        orientations=2 if fused else 1,
        padded=fused,
        attention_bits=16,
    )
    found = account(model_config(arguments.model), speed_recipe(arguments.recipe), assumed)
    print(f"{arguments.model} under {arguments.recipe}, one of {arguments.ranks} GPUs, ", end="")
    print(f"{arguments.tokens:,} tokens a microbatch ({arguments.implementation}): modelled from shapes")
    for group in (STATES, WEIGHTS, ACTIVATIONS):
        print(f"{found.group(group) / 2**30:10.3f} GiB  {group}")
        for (of, item), nbytes in found.bytes_of.items():
            if of == group and nbytes:
                print(f"{nbytes / 2**30:14.3f}        {item}")
    print(f"{found.total / 2**30:10.3f} GiB  in all")


if __name__ == "__main__":
    run_stage("fp4repro.memory", main)
