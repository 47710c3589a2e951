"""`python -m fp4repro.fullstack STUDY --scale FILE --out FILE`: the rest of the stack in 4 bits."""

import argparse

from fp4repro.errors import run_stage
from fp4repro.fullstack import attention_sensitivity

STUDIES = {"attention_sensitivity": attention_sensitivity}


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
