"""`python -m fp4repro.fullstack STUDY`: the studies of Full-Stack FP4's modules."""

import argparse

from fp4repro.errors import run_stage
from fp4repro.fullstack import attention_control, attention_sensitivity, optimizer_studies, projections

# Each has a docstring, `add_arguments(parser)` and `run(arguments)`.
STUDIES = {
    "projections": projections,
    "attention_sensitivity": attention_sensitivity,
    "attention_control": attention_control,
    **optimizer_studies.STUDIES,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.fullstack", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, study in STUDIES.items():
        command = commands.add_parser(name, help=study.__doc__.splitlines()[0])
        study.add_arguments(command)
        command.set_defaults(run=study.run)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    run_stage("fp4repro.fullstack", main)
