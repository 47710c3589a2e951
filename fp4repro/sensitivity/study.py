"""Blocks by what quantising them does, and choices of those that stay in BF16, compared.

Each block is measured in two ways: by the error of its own products, given exact operands (local), and
by how far the gradient of the whole model moves when that block alone is quantised. Where the errors of
blocks are independent their squares add up, so the best choice of k blocks is the k largest; whether
that holds is seen by running each choice in the whole model. The paper keeps its first 2 and last 8 of
62 blocks (arXiv 2509.25149, section 3) since "the last layers show the largest wgrad error" (appendix E).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fp4repro.errors import Fp4ReproError
from fp4repro.fidelity.gradients import GradientStudy
from fp4repro.fidelity.subject import Subject
from fp4repro.fidelity.whole import Whole, WholeFidelity
from fp4repro.recipes import PRODUCTS, KeepBF16, Recipe, recipe

PAPER = recipe("nvfp4").keep


@dataclass(frozen=True)
class Choice:
    """Blocks that stay in BF16, and what the whole model under the recipe then does."""

    blocks: tuple[int, ...]
    parameters: float  # share of the blocks' linears
    fidelity: WholeFidelity
    patterns: tuple[str, ...]  # the same as KeepBF16.names


@dataclass
class Sensitivity:
    """Results of one subject; the steps fill them in their order."""

    subject: Subject
    recipe: Recipe
    draws: int
    local: dict[int, dict[str, float]] = field(default_factory=dict)  # block -> product -> error
    alone: dict[int, WholeFidelity] = field(default_factory=dict)  # of a single draw
    choices: dict[str, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.linears: dict[int, list[str]] = defaultdict(list)
        for name, block in self.subject.blocks.items():
            self.linears[block].append(name)
        self.blocks = sorted(self.linears)
        if len(self.blocks) < 2:
            raise Fp4ReproError(
                f"{self.subject.name} has {len(self.blocks)} block: there is nothing to choose"
            )
        layers = self.subject.linears
        self.sizes = {b: sum(layers[n].weight.numel() for n in names) for b, names in self.linears.items()}
        self.whole = Whole(self.subject)

    @property
    def exact_loss(self) -> float:
        return self.whole.loss

    def run(self, share: float, progress: Callable[[Iterable], Iterable] = iter) -> None:
        """All steps; `share` of the blocks is what choices keep."""
        self.measure_locally()
        for block in progress(self.blocks):
            kept = [b for b in self.blocks if b != block]
            self.alone[block] = self.whole.fidelity(self.keeping(kept))
        for name, kept in self.candidates(share).items():
            found = self.whole.fidelity(self.keeping(kept), self.draws)
            self.choices[name] = Choice(
                tuple(sorted(kept)), self.share_of_parameters(kept), found, self.patterns(kept)
            )

    def measure_locally(self) -> None:
        study = GradientStudy(self.subject, {"recipe": self.recipe}, draws=1)
        squares = defaultdict(list)
        for product in PRODUCTS:
            for name, fidelity in study.found["recipe", product]:
                squares[self.subject.blocks[name], product].append(fidelity.error)
        for block in self.blocks:
            of = {p: squares[block, p] for p in PRODUCTS}
            self.local[block] = {p: math.sqrt(sum(s) / len(s)) if s else 0.0 for p, s in of.items()}

    def candidates(self, share: float) -> dict[str, list[int]]:
        """Blocks that stay in BF16, by the choice's name."""
        blocks, count = self.blocks, round(share * len(self.blocks))
        if not 0 < count < len(blocks):
            raise Fp4ReproError(
                f"a share of {share:g} of the {len(blocks)} blocks of {self.subject.name} is {count}: "
                "choose one that leaves some quantised and some not"
            )
        ends = KeepBF16(PAPER.first * count, PAPER.last * count, of=(PAPER.first + PAPER.last) * len(blocks))
        paper = [blocks[i] for i in sorted(ends.blocks(len(blocks)))]
        by_local = sorted(blocks, key=lambda b: -self.local[b]["wgrad"])
        by_measured = sorted(blocks, key=lambda b: -self.alone[b].error)
        by_size = sorted(blocks, key=lambda b: -self.alone[b].error / self.sizes[b])
        return {
            "none": [],
            "paper": paper,
            "last": blocks[-count:],
            "first": blocks[:count],
            "local": by_local[:count],
            "measured": by_measured[:count],
            "measured_by_size": self._that_fit(by_size, self.share_of_parameters(paper)),
            "least": by_measured[-count:],
        }

    def _that_fit(self, order: Iterable[int], share: float) -> list[int]:
        kept: list[int] = []
        for block in order:
            if self.share_of_parameters([*kept, block]) <= share * (1 + 1e-9):
                kept.append(block)
        return kept

    def share_of_parameters(self, blocks: Iterable[int]) -> float:
        return sum(self.sizes[b] for b in blocks) / sum(self.sizes.values())

    def keeping(self, blocks: Iterable[int]) -> Recipe:
        """The recipe with these blocks in BF16 and all others quantised."""
        return self.recipe.replace(keep=KeepBF16(names=self.patterns(blocks)))

    def patterns(self, blocks: Iterable[int]) -> tuple[str, ...]:
        return tuple(name for block in sorted(blocks) for name in self.linears[block])


def errors_add_up(alone: Mapping[int, WholeFidelity], none: WholeFidelity) -> float:
    """Sum of the squared errors of blocks alone over that of all together: 1 where they are independent."""
    return sum(found.error for found in alone.values()) / none.error
