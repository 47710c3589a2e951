"""`python -m fp4repro.data --scale FILE --out DIR`: text to token files."""

import argparse
from pathlib import Path

from fp4repro.config import load_scale
from fp4repro.data.tokens import PARTS, prepare
from fp4repro.errors import run_stage


def main() -> None:
    parser = argparse.ArgumentParser(prog="fp4repro.data", description="Make token files of a corpus.")
    parser.add_argument("--scale", type=Path, required=True, help="scale file, configs/scales/*.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for the token files")
    parser.add_argument("--verify", action="store_true", help="compare shards that are there by their bytes")
    arguments = parser.parse_args()
    summary = prepare(load_scale(arguments.scale), arguments.out, arguments.verify)
    print(summary["description"])
    for part in PARTS:
        print(
            "{0}: {documents} documents, {bytes} bytes, {tokens} tokens, "
            "{bytes_per_token:.2f} bytes a token".format(part, **summary[part])
        )


if __name__ == "__main__":
    run_stage("fp4repro.data", main)
