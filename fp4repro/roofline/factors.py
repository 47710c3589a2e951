"""How far from their data sheets GPUs stay: five factors that are fitted, four that are assumed.

Fitted (`calibrate`), each one number for all devices and shapes:

    math_bf16, math_fp8   sustained share of the tensor cores' peak
    math_fp4              sustained FP4 rate over the *FP8* peak, never more than `math_fp8` of the FP4
                          peak. Boards are limited by power, and energy a product falls with the width
                          of its operands: GB300's third "x" over FP8 is not what large products reach
    passes                share of the memory bandwidth that quantisation kernels reach
    step                  modelled over measured time of a whole step: launches, waiting, the rest

Assumed, and stated with every table: `stream`, `attention`, `launch`, and no exposed communication.
"""

from dataclasses import dataclass

from fp4repro.roofline.devices import Device


@dataclass(frozen=True)
class Factors:
    """See the module docstring."""

    math_bf16: float
    math_fp8: float
    math_fp4: float
    passes: float
    step: float = 1.0
    stream: float = 0.8  # share of the bandwidth that products' operands and element-wise kernels reach
    attention: float = 0.5  # share of the BF16 peak that attention and the SSD scan reach
    launch: float = 3e-6  # seconds that a kernel takes however small

    def rate(self, device: Device, operand: str) -> float:
        """Sustained FLOP/s of products of one operand class."""
        if operand == "fp4":
            most = self.math_fp8 * device.flops("fp4")
            return min(most, self.math_fp4 * device.flops("fp8"))
        return {"bf16": self.math_bf16, "fp8": self.math_fp8}[operand] * device.flops(operand)
