"""Where MMLU-Pro's questions are: a folder that is named, or the hub where it is asked for.

`local` is the folder mmlu_pro/ of the one that FP4REPRO_DATA names. Where local data is named, nothing
asks the hub.
"""

import os
from pathlib import Path

from fp4repro.data.files import VARIABLE
from fp4repro.errors import Fp4ReproError

HUB = "hub"
LOCAL = "local"
SPLITS = ("test", "validation")


def mmlu_pro_folder(source: str) -> Path | None:
    """The folder with the two parquet files; None for the hub.

    Raises Fp4ReproError where there is none, with the ways to name one.
    """
    if source == HUB:
        return None
    ways = f"name a folder with {' and '.join(f'{s}.parquet' for s in SPLITS)}, or say {HUB}"
    named = os.environ.get(VARIABLE) if source == LOCAL else source
    if not named:
        raise Fp4ReproError(f"no local MMLU-Pro, as {VARIABLE} is not set: set it, {ways}")
    folder = Path(named) / "mmlu_pro" if source == LOCAL else Path(named)
    missing = [split for split in SPLITS if not (folder / f"{split}.parquet").is_file()]
    if missing:
        raise Fp4ReproError(f"no local MMLU-Pro, as {folder} has no {missing[0]}.parquet: {ways}")
    return folder


def why_missing(source: str) -> str:
    """Why the questions are not at hand; empty where they are, or where the hub may be asked."""
    try:
        mmlu_pro_folder(source)
    except Fp4ReproError as error:
        return str(error)
    return ""
