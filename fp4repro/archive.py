"""`python -m fp4repro.archive FOLDER`: a published folder as one ZIP file, ready for Zenodo.

A folder that disagrees with itself is refused. The same folder gives the same bytes: files in order, one
date for all of them.
"""

import argparse
import zipfile
from pathlib import Path

from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.files import atomic_write, sha256
from fp4repro.verify import verify

DATE = (1980, 1, 1, 0, 0, 0)  # the first that the format knows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.archive", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a folder that python -m fp4repro.publish wrote")
    parser.add_argument("--out", type=Path, help="file to write; FOLDER.zip beside the folder by default")
    arguments = parser.parse_args()
    out = arguments.out or arguments.folder.with_name(f"{arguments.folder.name}.zip")
    write_archive(arguments.folder, out)
    print(f"{out}: SHA-256 {sha256(out)}")


def write_archive(folder: Path, out: Path) -> None:
    """Write the ZIP; its files lie below the folder's name."""
    if faults := verify(folder).faults:
        raise Fp4ReproError("\n".join([f"{folder} does not agree with itself:", *faults]))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with atomic_write(out) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for path in files:
            entry = zipfile.ZipInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}", DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=9)


if __name__ == "__main__":
    run_stage("fp4repro.archive", main)
