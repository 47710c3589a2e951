"""What a model is made of: a pattern of blocks, and their sizes.

A pattern has one letter a residual block, in the notation of Nemotron-H: M a Mamba-2 mixer, - a
feed-forward network, * attention. `M-M*M-` is a hybrid of six blocks, `*-*-` a transformer of two
layers. Every linear of a block has in and out features that are multiples of 16, the grain in which
block-scaled formats and tensor cores take them.
"""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from fp4repro.errors import Fp4ReproError

KINDS = {"M": "mamba", "-": "ffn", "*": "attention"}
FEATURE_MULTIPLE = 16

# Sizes that a kind of block needs; the others keep their zero where a pattern has no such block.
_NEEDS = {
    "mamba": ("mamba_heads", "mamba_head_dim", "state", "groups", "conv", "chunk"),
    "ffn": ("ffn_width",),
    "attention": ("query_heads", "kv_heads", "head_dim"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model; a mistake raises `Fp4ReproError` with what would fit."""

    pattern: str
    width: int  # of the residual stream
    vocabulary: int
    ffn_width: int = 0
    activation: str = "relu2"  # of the feed-forward network: squared ReLU, or "swiglu" with a gate
    query_heads: int = 0
    kv_heads: int = 0  # each serves query_heads / kv_heads query heads
    head_dim: int = 0  # of attention
    positions: str = "none"  # or "rope"
    rope_theta: float = 10_000.0
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    state: int = 0  # columns of a Mamba head's state
    groups: int = 1  # Mamba heads of a group share B and C
    conv: int = 4  # taps of the causal convolution
    chunk: int = 64  # tokens that the scan takes at once: speed and memory, not results
    init_std: float = 0.02
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        self._check_types()
        self._check_pattern()
        self._check_sizes()
        for kind in sorted(self.kinds):
            for name, features in self.linears(kind).items():
                self._check_features(f"{kind}.{name}", *features)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "ModelConfig":
        """Read one file of `configs/models`."""
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise Fp4ReproError(f"The model config {path} cannot be read: {reason}.") from None
        if not isinstance(values, dict):
            raise Fp4ReproError(f"The model config {path} must hold `key: value` lines.")
        try:
            return cls.from_dict(values)
        except Fp4ReproError as error:
            raise Fp4ReproError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Build from plain values; unknown and missing keys are refused."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
                raise Fp4ReproError(f"A model config has no key {key!r}; {hint}")
        for key in ("pattern", "width", "vocabulary"):
            if key not in values:
                raise Fp4ReproError(f"A model config needs the key {key!r}.")
        return cls(**values)

    def replace(self, **changes: Any) -> "ModelConfig":
        """The same model with some fields changed; unknown ones are refused."""
        return self.from_dict(asdict(self) | changes)

    @property
    def kinds(self) -> set[str]:
        """Kinds of block that the pattern has."""
        return {KINDS[letter] for letter in self.pattern}

    @property
    def mamba_inner(self) -> int:
        """Channels that the scan mixes."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: x, and B and C of each group."""
        return self.mamba_inner + 2 * self.groups * self.state

    def linears(self, kind: str) -> dict[str, tuple[int, int]]:
        """Names of a block's linears with their (in, out) features."""
        queries, keys = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "mamba": {
                "in_proj": (self.width, self.mamba_inner + self.conv_channels + self.mamba_heads),
                "out_proj": (self.mamba_inner, self.width),
            },
            "ffn": {
                "up": (self.width, self.ffn_width),
                **({"gate": (self.width, self.ffn_width)} if self.activation == "swiglu" else {}),
                "down": (self.ffn_width, self.width),
            },
            "attention": {
                "q": (self.width, queries),
                "k": (self.width, keys),
                "v": (self.width, keys),
                "o": (queries, self.width),
            },
        }[kind]

    def _check_types(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = {int: int, float: (int, float), str: str}[field.type]
            if not isinstance(value, wanted) or isinstance(value, bool):
                name = {int: "a whole number", float: "a number", str: "text"}[field.type]
                raise Fp4ReproError(f"{field.name} must be {name}, but is {value!r}.")

    def _check_pattern(self) -> None:
        if not self.pattern:
            raise Fp4ReproError("pattern is empty; it needs a letter a block, such as 'M-M*M-'.")
        for place, letter in enumerate(self.pattern):
            if letter not in KINDS:
                raise Fp4ReproError(
                    f"pattern {self.pattern!r} has {letter!r} at place {place}; the letters are "
                    "M (Mamba-2), - (feed-forward) and * (attention)."
                )

    def _check_sizes(self) -> None:
        needed = ("width", "vocabulary", "init_std", "norm_eps", "rope_theta")
        for name in (*needed, *(name for kind in sorted(self.kinds) for name in _NEEDS[kind])):
            if not getattr(self, name) > 0:
                raise Fp4ReproError(
                    f"{name} must be above zero for pattern {self.pattern!r}, but is {getattr(self, name)!r}."
                )
        if self.activation not in ("relu2", "swiglu"):
            raise Fp4ReproError(f"activation must be 'relu2' or 'swiglu', but is {self.activation!r}.")
        if self.positions not in ("none", "rope"):
            raise Fp4ReproError(f"positions must be 'none' or 'rope', but is {self.positions!r}.")
        if "attention" in self.kinds:
            self._check_divides("kv_heads", "query_heads")
            if self.positions == "rope" and self.head_dim % 2:
                raise Fp4ReproError(f"head_dim must be even for RoPE, but is {self.head_dim}.")
        if "mamba" in self.kinds:
            self._check_divides("groups", "mamba_heads")

    def _check_divides(self, part: str, whole: str) -> None:
        if getattr(self, whole) % getattr(self, part):
            raise Fp4ReproError(
                f"{whole} must be a multiple of {part}, but {getattr(self, whole)} is not one of "
                f"{getattr(self, part)}."
            )

    def _check_features(self, linear: str, fan_in: int, fan_out: int) -> None:
        for side, features in (("input", fan_in), ("output", fan_out)):
            below = features - features % FEATURE_MULTIPLE
            if below != features:
                fits = f"{below} and {below + FEATURE_MULTIPLE}" if below else FEATURE_MULTIPLE
                made_of = ""
                if (linear, side) == ("mamba.in_proj", "output"):
                    made_of = " (2 x mamba_heads x mamba_head_dim + 2 x groups x state + mamba_heads)"
                raise Fp4ReproError(
                    f"The linear {linear} has {features} {side} features{made_of}, which is not a "
                    f"multiple of {FEATURE_MULTIPLE}; nearest that fit: {fits}."
                )
