"""GPUs by data sheet, read from `configs/devices.yaml`, where each figure has its source."""

import difflib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fp4repro.config import MODELS, SCHEMAS, check, read_yaml
from fp4repro.errors import Fp4ReproError

DEVICES = MODELS.parent / "devices.yaml"
OPERANDS = ("bf16", "fp8", "fp4")  # classes of operands by the units that multiply them


@dataclass(frozen=True)
class Device:
    """One GPU; the head of the YAML file explains the fields."""

    name: str
    what: str
    peak: dict[str, float] = field(hash=False)  # TFLOP/s by operand class
    bandwidth: float  # TB/s
    capacity: float  # GB
    link: float  # GB/s
    sms: int
    source: str
    confidence: str
    agree: bool
    note: str = ""

    def flops(self, operand: str) -> float:
        """Peak FLOP/s of products of such operands; a device without the units is refused."""
        if operand not in self.peak:
            raise Fp4ReproError(
                f"{self.name} has no {operand.upper()} units, so no time can be predicted for them: "
                f"choose a device that has ({', '.join(d for d in device_names() if has(d, operand))})"
            )
        return 1e12 * self.peak[operand]

    @property
    def bytes_per_second(self) -> float:
        return 1e12 * self.bandwidth

    def peak_ratio(self, operand: str, over: str) -> float:
        """Data-sheet rate of one operand class over another's: a bound, never a result."""
        return self.flops(operand) / self.flops(over)


@cache
def load_devices(path: Path = DEVICES) -> dict[str, Device]:
    """All devices by name; a file that breaks its schema is refused with a sentence."""
    entries = read_yaml(path)
    check(entries, read_yaml(SCHEMAS / "devices.schema.yaml"), path)
    devices = {entry["name"]: Device(**entry) for entry in entries}
    if len(devices) < len(entries):
        raise Fp4ReproError(f"{path}: a device stands there more than once")
    return devices


def device_names() -> list[str]:
    return list(load_devices())


def has(name: str, operand: str) -> bool:
    """Whether a known device has units for such operands."""
    return operand in load_devices()[name].peak


def device(name: str) -> Device:
    """The device of that name; an unknown one is refused with the nearest name and the list."""
    devices = load_devices()
    if name not in devices:
        near = difflib.get_close_matches(name.upper(), devices, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise Fp4ReproError(
            f"no device is named {name!r}{hint}; configs/devices.yaml has {', '.join(devices)}"
        )
    return devices[name]
