"""What one process has compiled, kept on disk for the next.

To trace a training run's kernels and to generate their code takes ten seconds, and a scale is a hundred
processes. A record holds the generated code, which inductor loads by its text, and the check of sides. Its
key is all that the code follows from: every source of this package, torch, inductor's settings, the vectors,
the threads, the function and its options, the types, and which sides are one. Only command lines of this
package keep and take records: elsewhere (a test, a notebook) a function may have been replaced in memory,
which no key would tell. A record that cannot be read or run is compiled anew.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fp4repro.files import atomic_write

BEGAN = time.time()
SETTLED = 60.0  # seconds: a source younger than that may be newer than what this process has imported


@dataclass(frozen=True)
class Record:
    """A kernel: the code that inductor generated (None where more than code belongs to it), the sides that
    it serves, and whether it gives one tensor or several."""

    source: str | None
    width: int  # bits of the vectors that the code is for
    assumed: str  # an expression in the sides that are free, `L['t0']` the first of them
    free: list[int]
    fixed: dict[int, int]
    alone: bool

    def holds(self, sides: Sequence[int]) -> bool:
        """Whether it serves tensors of these sides, those of all arguments in a row."""
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        return all(
            sides[i] == side for i, side in self.fixed.items()
        ) and ShapeEnv().evaluate_guards_expression(self.assumed, [sides[i] for i in self.free])


def key(name: Sequence[object], types: Sequence[object], tensors: list[Tensor]) -> str | None:
    """The name under which kernels of this function and these types are kept; None where none are."""
    told = repr((name, types, [[side == 1 for side in t.shape] for t in tensors]))
    if tensors[0].device.type != "cpu" or " at 0x" in told or not (everything := _everything()):
        return None
    return hashlib.sha256(f"{everything}\n{torch.get_num_threads()}\n{told}".encode()).hexdigest()


def find(key: str | None, sides: Sequence[int]) -> Record | None:
    """The record of this key that serves these sides."""
    if key is None:
        return None
    for path in sorted(_folder().glob(f"{key}-*.json")):
        try:
            held = json.loads(path.read_text())
            record = Record(**held | {"fixed": {int(i): side for i, side in held["fixed"].items()}})
            if record.holds(sides) and load(record):
                return record
        except Exception:  # whatever a damaged record or a compiler that has gone raises
            continue
    return None


def load(record: Record) -> Callable[[list], Sequence]:
    """The kernel, called with a list of tensors."""
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache

    with config.patch({"cpp.simdlen": record.width}):  # built for other vectors, the code would be nonsense
        return PyCodeCache.load(record.source).call


def keep(key: str | None, record: Record) -> None:
    """Keep a record for processes to come; where that fails, they compile."""
    if key is None or record.source is None:
        return
    text = json.dumps(asdict(record))
    try:
        with atomic_write(_folder() / f"{key}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json") as path:
            path.write_text(text)
    except OSError:
        pass


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "fp4repro"


@cache
def _everything() -> str | None:
    """What every kernel of this process follows from; None where records are of no use."""
    program = getattr(sys.modules.get("__main__"), "__spec__", None)
    if not program or program.name.partition(".")[0] != "fp4repro":
        return None
    package = Path(__file__).parents[1]
    sources = sorted(package.rglob("*.py"))
    if max(os.stat(source).st_mtime for source in sources) > BEGAN - SETTLED:
        return None
    from torch._inductor import config, cpu_vec_isa

    digest = hashlib.sha256()
    for source in sources:
        digest.update(
            f"{source.relative_to(package)} {source.stat().st_size}\n".encode() + source.read_bytes()
        )
    told = torch.__version__, torch.get_default_dtype(), str(cpu_vec_isa.pick_vec_isa()), config.get_hash()
    return f"{digest.hexdigest()} {told!r}"
