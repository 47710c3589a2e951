"""The optimizer as data: AdamW or Muon, how each state is stored, how Newton-Schulz is computed.

After Full-Stack FP4 (arXiv 2607.04422): the second moment goes through square root, removal of its tile's
mean and a Hadamard transform before NVFP4; the first moment is stored in NVFP4; Muon's Newton-Schulz
multiplies in NVFP4. The paper gives neither tile nor floor nor coefficients: each is a field here. The
other codecs are what the literature stores, and controls that are meant to fail.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

from fp4repro.core.formats import NVFP4, BlockFormat
from fp4repro.core.hadamard import SIZES
from fp4repro.errors import Fp4ReproError

BLOCK = 16  # of NVFP4, in which every coded state is stored
MAPS = ("linear", "sqrt", "fourth-root", "log2", "inverse-sqrt")


@dataclass(frozen=True)
class Linear4:
    """k / 16 of the block's maximum for k = 1 to 16, without a zero; FP32 scales (torchao's AdamW4bit)."""

    block: int = 128


@dataclass(frozen=True, kw_only=True)
class StateCodec:
    """How one optimizer state is stored; see `optim.codecs` for the arithmetic.

    format          NVFP4 with blocks of 16 along a row, or Linear4
    map             what is coded in place of the state itself
    centre          "mean" or "max" of a tile, which is subtracted and kept in BF16; None for neither
    hadamard        size of the transform along a row, after the centre is removed; 0 for none
    hadamard_first  the wrong order, as a control
    tile            elements of a row that share a centre
    floor           the least decoded value as a share of its tile's mean: above 0 no element is ever read
                    back as zero
    log_range       log2 only: values are at least 2**-log_range of their tile's maximum; 0 for no bound
    signed          a first moment; second moments are never decoded below zero
    rounding        of the codes
    """

    format: BlockFormat | Linear4 = NVFP4
    map: Literal["linear", "sqrt", "fourth-root", "log2", "inverse-sqrt"] = "linear"
    centre: Literal["mean", "max"] | None = None
    hadamard: int = 0
    hadamard_first: bool = False
    tile: int = BLOCK
    floor: float = 0.0
    log_range: float = 0.0
    signed: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if self.map not in MAPS:
            raise Fp4ReproError(f"a state's map {self.map!r} must be one of {', '.join(MAPS)}")
        if self.centre not in (None, "mean", "max"):
            raise Fp4ReproError(f"a state's centre {self.centre!r} must be mean, max or None")
        if self.rounding not in ("nearest", "stochastic"):
            raise Fp4ReproError(f"a state's rounding {self.rounding!r} must be nearest or stochastic")
        if self.hadamard and self.hadamard not in SIZES:
            raise Fp4ReproError(f"a state's Hadamard size {self.hadamard} must be 0 or one of {SIZES}")
        if self.tile % BLOCK or not 0 <= self.floor < 1:
            raise Fp4ReproError(
                f"a state's tile {self.tile} must be a multiple of {BLOCK}, its floor {self.floor} in [0, 1)"
            )
        if self.floor and self.centre != "mean":
            raise Fp4ReproError("a state's floor is a share of its tile's mean: set centre='mean'")
        if self.signed and (self.map != "linear" or self.floor):
            raise Fp4ReproError("a signed state can be neither mapped nor floored")
        nvfp4 = isinstance(self.format, BlockFormat)
        if nvfp4 and (self.format.block != (1, BLOCK) or self.format.four_over_six):
            raise Fp4ReproError(
                f"states are stored in blocks of 1x{BLOCK} with one candidate scale each; "
                f"{self.format.name} has {self.format.block}"
            )
        if not nvfp4 and (self.signed or self.centre or self.hadamard or self.rounding != "nearest"):
            raise Fp4ReproError("Linear4 stores second moments, uncentred, rounded to nearest")

    @property
    def multiple(self) -> int:
        """What a row's length must be a multiple of."""
        return max(self.format.block if isinstance(self.format, Linear4) else BLOCK, self.tile, self.hadamard)

    @property
    def bits(self) -> float:
        """Stored bits an element; the tensor's FP32 amax (NVFP4) comes on top."""
        if isinstance(self.format, Linear4):
            return 4 + 32 / self.format.block
        return self.format.bits_per_value + (16 / self.tile if self.centre else 0.0)

    def replace(self, **changes: object) -> "StateCodec":
        return replace(self, **changes)


FIRST_MOMENT = StateCodec(signed=True)
SECOND_MOMENT = StateCodec(map="sqrt", centre="mean", hadamard=16, floor=0.2)

FIRST_MOMENTS = {
    "fp32": None,
    "nvfp4": FIRST_MOMENT,
    "nvfp4-stochastic": FIRST_MOMENT.replace(rounding="stochastic"),
    "nvfp4-hadamard": FIRST_MOMENT.replace(hadamard=16),
}
SECOND_MOMENTS = {
    "fp32": None,
    "direct": StateCodec(),
    "sqrt": StateCodec(map="sqrt"),
    "fourth-root": StateCodec(map="fourth-root"),
    "sqrt-mean": StateCodec(map="sqrt", centre="mean"),
    "sqrt-mean-hadamard": SECOND_MOMENT.replace(floor=0.0),
    "sqrt-mean-hadamard-floor": SECOND_MOMENT,
    "sqrt-mean128-hadamard128": SECOND_MOMENT.replace(floor=0.0, tile=128, hadamard=128),
    "sqrt-hadamard-mean": SECOND_MOMENT.replace(floor=0.0, hadamard_first=True),
    "mean-hadamard": SECOND_MOMENT.replace(map="linear", floor=0.0),
    "log2-mean": StateCodec(map="log2", centre="mean"),
    "log2-clamped": StateCodec(map="log2", centre="max", log_range=12.0),
    "inverse-sqrt": StateCodec(map="inverse-sqrt"),
    "linear4-no-zero": StateCodec(format=Linear4(), tile=128),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """What `optim.build_optimizer` makes; the default is torch's AdamW with FP32 states.

    kind            "adamw", or "muon" for the hidden matrices with AdamW for the rest
    first, second   codecs of the moments, None for FP32; `first` is Muon's momentum too
    schedule        Newton-Schulz coefficients, a name of `optim.newton_schulz.SCHEDULES`
    gemm            what Newton-Schulz multiplies in: "nvfp4", "bf16" or "fp32"
    last_step_bf16  the last iteration multiplies in BF16 whatever `gemm` is
    guard           largest singular value that an iterate may have before it is divided by it; 0: none
    clip_quantile   ROOT's clip of the momentum at this quantile of its magnitudes; None: none
    momentum, nesterov    of Muon
    rms             root mean square that Muon's update is scaled to
    rms_of          "actual" scales the update that came out, "shape" what an orthogonal matrix would have
    """

    kind: Literal["adamw", "muon"] = "adamw"
    first: StateCodec | None = None
    second: StateCodec | None = None
    schedule: str = "muon3c3"
    gemm: Literal["nvfp4", "bf16", "fp32"] = "nvfp4"
    last_step_bf16: bool = False
    guard: float = 1.45
    clip_quantile: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    rms: float = 0.2
    rms_of: Literal["actual", "shape"] = "actual"

    def __post_init__(self) -> None:
        for name, known in (
            ("kind", ("adamw", "muon")),
            ("gemm", ("nvfp4", "bf16", "fp32")),
            ("rms_of", ("actual", "shape")),
        ):
            if getattr(self, name) not in known:
                raise Fp4ReproError(f"optimizer: {name} is {getattr(self, name)!r}, not {' or '.join(known)}")
        if self.first is not None and not self.first.signed:
            raise Fp4ReproError("optimizer: the first moment has signs: its codec needs signed=True")
        if self.second is not None and self.second.signed:
            raise Fp4ReproError("optimizer: the second moment has no signs: its codec needs signed=False")
        if self.clip_quantile is not None and not 0 < self.clip_quantile < 1:
            raise Fp4ReproError(f"optimizer: clip_quantile {self.clip_quantile} must lie between 0 and 1")
        if not 0 <= self.momentum < 1 or self.rms <= 0 or self.guard < 0:
            raise Fp4ReproError(
                f"optimizer: momentum {self.momentum} must be in [0, 1), rms {self.rms} above 0 and guard "
                f"{self.guard} not below 0"
            )

    def replace(self, **changes: object) -> "OptimizerRecipe":
        """The recipe with other fields; a wrong name is refused with the list of the right ones."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise Fp4ReproError(f"the optimizer has no field {name!r}; it has {', '.join(known)}")
        return replace(self, **changes)


ADAMW = OptimizerRecipe()
NVFP4_ADAMW = OptimizerRecipe(first=FIRST_MOMENT, second=SECOND_MOMENT)
NVFP4_MUON = NVFP4_ADAMW.replace(kind="muon")
