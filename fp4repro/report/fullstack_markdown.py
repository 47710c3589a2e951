"""The table of Full-Stack FP4's modules for a reader: that of `ablations_markdown`, with memory, the two
cumulative orders, what the single gaps add up to, and the published gaps by version."""

from collections.abc import Mapping, Sequence

from fp4repro.ablations import Ablation
from fp4repro.report.ablations_markdown import entries_markdown, value_cell
from fp4repro.report.fullstack import ALL, BASE, INTERACTION, MEMORY, ORDERS, SINGLES, SUM_OF_SINGLES
from fp4repro.report.schema import Row
from fp4repro.report.tables import GAP

MEASURED = (
    "Optimizer states are all tensors that the optimizer holds after the run; saved activations are what one "
    "forward pass of a micro-batch keeps for its backward: weights as products take them too, but not the "
    "parameters. Both are measured, of this emulation and these shapes."
)


def fullstack_markdown(rows: Sequence[Row], entries: Mapping[str, Ablation]) -> str:
    figures = [row for row in rows if row.provenance == "published" and row.metric == GAP + BASE]
    told = [f"- {row.note}." for row in figures]
    published = "\n".join(["Published gaps, each in its own setting:", "", *told]) if told else ""
    last = "\n\n".join(filter(None, [MEASURED, published]))
    return entries_markdown("Full-Stack FP4, module by module", rows, entries, _together, MEMORY, last)


def _together(protocol: str, of: Mapping) -> str:
    """The orders, and the gap of all beside the sum of the singles'."""
    lines = []
    for order in ORDERS:
        steps = [f"{name} {value_cell(of.get((f'{protocol}/{name}', GAP + BASE))) or '-'}" for name in order]
        lines.append(f"Cumulative, gap to {BASE} in %: {', then '.join(steps)}.")
    total, beyond, all_of_it = (
        value_cell(of.get((f"{protocol}/{ALL}", metric)))
        for metric in (SUM_OF_SINGLES, INTERACTION, GAP + BASE)
    )
    if not total:
        return ""
    lines.append(
        f"The gaps of {', '.join(SINGLES)} alone add up to {total} %; all together have {all_of_it} %, which "
        f"is {beyond} % beyond the sum."
    )
    return "\n\n".join(lines) + "\n"
