"""The tables of evaluations for a reader: pure functions of their long rows."""

from collections.abc import Iterator, Sequence

from fp4repro.report.evals import TO_TELL
from fp4repro.report.markdown import aligned
from fp4repro.report.published_accuracy import ARMS, PAPER
from fp4repro.report.schema import NOT_RUN, Row
from fp4repro.report.tables import origin

EMULATED = (
    "Measured by lm-eval, by log likelihood. The arithmetic of FP8, MXFP4 and NVFP4 is emulated in the "
    "forward pass, on the layers that the recipe quantises. The recipes have the Hadamard transform on the "
    "inputs of wgrad alone, which no evaluation gets to: taking it out of `nvfp4` changes nothing here, and "
    "`+rht` puts it on both operands of fprop. `four-over-six` lets the largest code of a block of inputs be "
    "4 or 6."
)
INTERVALS = (
    "[ ] are 95 % intervals over questions: Wilson's for one accuracy, a bootstrap for the rest, paired for "
    "a difference. They say nothing of what another training seed would give."
)


def evals_markdown(rows: Sequence[Row]) -> str:
    """A table a task, a line a model, arithmetic and metric; chance stands with each accuracy."""
    scale, device, torch, commit = origin(rows)
    parts = [f"# Evaluations, scale `{scale}`"]
    for task in dict.fromkeys(row.metric.rpartition(".")[0] for row in rows):
        of_task = [row for row in rows if row.metric.rpartition(".")[0] == task]
        lines = [
            [row.setting, row.metric.rpartition(".")[2], _value(row), str(row.n or "-"), row.note]
            for row in of_task
            if row.value is not None
        ]
        header = ["model in arithmetic", "metric", "value", "questions", "note"]
        parts.append(f"**{task}**" + ("\n\n" + "\n".join(aligned(header, lines)) if lines else ""))
        absent = {(row.setting.rpartition(" in ")[0], row.note): None for row in of_task if row.value is None}
        parts += [f"{model}: {why}." for model, why in absent]
    parts += [EMULATED, INTERVALS, f"Measured on {device}; torch {torch}; commit {commit}."]
    return "\n\n".join(parts) + "\n"


def paired_markdown(rows: Sequence[Row]) -> str:
    """Ours, a line a pair and metric; then the paper's accuracies with the uncertainty they have."""
    ours = [row for row in rows if row.setting != PAPER]
    paper = {row.metric: row for row in rows if row.setting == PAPER}
    parts = ["# Paired comparisons of evaluations"]
    if ours:
        header = ["pair", "metric", "difference", "discordant", "McNemar p", "questions", "to tell 0.04"]
        parts.append("\n".join(aligned(header, list(_pairs(ours)))))
        parts.append(
            "Accuracies differ by points, positive where the first of the pair is better; bits per byte and "
            "perplexities the other way round. 'To tell 0.04' is how many questions a difference of 0.04 "
            "points would need to be told from zero, at 5 % with 80 % power, at the discordance measured."
        )
        parts.append(INTERVALS)
    parts.append("\n".join(["**The paper's accuracies, % (arXiv 2509.25149)**", "", *_paper_table(paper)]))
    parts.append(_mmlu_pro(paper))
    return "\n\n".join(parts) + "\n"


def _pairs(rows: Sequence[Row]) -> Iterator[list[str]]:
    of = {(row.setting, row.metric): row for row in rows}
    for (setting, metric), row in of.items():
        asked, _, what = metric.rpartition(".")
        if what == "difference":
            others = (of.get((setting, f"{asked}.{name}")) for name in ("discordant", "mcnemar_p"))
            yield [
                setting,
                asked,
                _signed(row),
                *map(_plain, others),
                str(row.n),
                _needed(of, setting, asked),
            ]


def _needed(of: dict, setting: str, asked: str) -> str:
    row = of.get((setting, f"{asked}.{TO_TELL}"))
    if row is None:
        return "-"
    return row.note.removeprefix(NOT_RUN) if row.value is None else f"{row.value:,.0f}"


def _paper_table(paper: dict[str, Row]) -> Iterator[str]:
    names = [metric.removesuffix(".difference") for metric in paper if metric.endswith(".difference")]
    lines = [
        [
            name,
            *(f"{paper[f'{name}.{arm}'].value:.2f}" for arm in reversed(ARMS)),
            _signed(row),
            str(row.n or "-"),
        ]
        for name in names
        for row in [paper[f"{name}.difference"]]
    ]
    yield from aligned(["benchmark", "FP8", "NVFP4", "difference, unpaired interval", "questions"], lines)


def _mmlu_pro(paper: dict[str, Row]) -> str:
    """What 62.58 against 62.62 can say."""
    arm, baseline = (paper[f"mmlu-pro.{name}"].value for name in ARMS)
    row = paper["mmlu-pro.difference"]
    lines = [
        f"MMLU-Pro: {arm:g} against {baseline:g} is a difference of {_signed(row)} points if nothing is "
        f"known of the answers to {row.n:,} questions. Modelled for shares of discordant questions:",
        "",
    ]
    for metric, row in paper.items():
        if metric.startswith("mmlu-pro.difference.discordant_"):
            share = metric.rpartition("_")[2]
            needed = paper[f"mmlu-pro.{TO_TELL}.discordant_{share}"].value
            lines.append(
                f"- {share} % discordant: {_signed(row)}; {needed:,.0f} questions would tell it from zero."
            )
    return "\n".join(lines)


def _value(row: Row) -> str:
    if row.ci_low is None:
        return f"{row.value:g}"
    digits = 4 if row.unit == "bits/byte" else 2
    return f"{row.value:.{digits}f} [{row.ci_low:.{digits}f}, {row.ci_high:.{digits}f}]"


def _signed(row: Row) -> str:
    digits = 4 if row.unit == "bits/byte" else 2
    ends = "" if row.ci_low is None else f" [{row.ci_low:+.{digits}f}, {row.ci_high:+.{digits}f}]"
    return f"{row.value:+.{digits}f}{ends}"


def _plain(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row.value:.1f} %" if row.unit == "%" else f"{row.value:.3g}"
