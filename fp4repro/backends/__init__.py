"""The ways to multiply NVFP4, and whether each can be trusted on this machine.

`python -m fp4repro.backends` prints the answer. Nothing here is imported by training: the emulation
is what the layers compute with, and the others are measured against it first.
"""

from fp4repro.backends.backend import Backend
from fp4repro.backends.emulation import EMULATION
from fp4repro.backends.native import NATIVE, native_matmul
from fp4repro.backends.probe import Probe, run_probe
from fp4repro.backends.transformer_engine import TRANSFORMER_ENGINE
from fp4repro.errors import Fp4ReproError

BACKENDS = {b.name: b for b in (EMULATION, NATIVE, TRANSFORMER_ENGINE)}


def probe(name: str) -> Probe:
    """Try the backend of that name here; whatever it does wrong is the answer, not an error."""
    if name not in BACKENDS:
        raise Fp4ReproError(f"no backend is named {name!r}; known: {', '.join(BACKENDS)}")
    return run_probe(BACKENDS[name])


__all__ = ["BACKENDS", "Backend", "Probe", "native_matmul", "probe"]
