"""The tables of evaluations as long rows: each arm's figures, and each arm against the first.

`n` counts questions here. An arm's setting is `<model> in <arithmetic>`, a metric's name
`<task>.<metric>`. Accuracies are per cent, their differences points, positive where the arm is better;
of bits per byte a positive difference is worse.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fp4repro.report.accuracy import against_chance, wilson
from fp4repro.report.paired import bootstrap, compare, questions_needed
from fp4repro.report.questions import Answers, Arm, Asked, is_accuracy
from fp4repro.report.schema import NOT_RUN, Row

EVALS = "evals"
PAIRED = "evals_paired"
TOLD = 0.0004  # the difference of the paper's two MMLU-Pro accuracies, 0.04 points
TO_TELL = "questions_to_tell_0.04_points"

Found = Mapping[Arm, Mapping[Asked, Answers]]


def arm_name(arm: Arm) -> str:
    return f"{arm[0]} in {arm[1]}"


def evals_rows(found: Found, missing: Sequence[tuple[Arm, str, str]], where: Mapping[str, str]) -> list[Row]:
    """Each arm's figure by task and metric; `missing` names (arm, task, why) of what was not run."""
    rows = []
    for arm, tasks in found.items():
        for (task, metric), answers in tasks.items():
            accuracy = is_accuracy(metric)
            factor = 100 if accuracy else 1
            low, high, note = _accuracy(answers) if accuracy else (*_ratio_interval(answers), "")
            rows.append(
                Row(
                    experiment=EVALS,
                    setting=arm_name(arm),
                    metric=f"{task}.{metric}",
                    value=factor * answers.figure,
                    unit="%" if accuracy else "bits/byte",
                    ci_low=factor * low,
                    ci_high=factor * high,
                    n=len(answers.questions),
                    note=note,
                    **where,
                )
            )
    for arm, task, why in missing:
        what = {"experiment": EVALS, "setting": arm_name(arm), "metric": f"{task}.acc", "unit": "%"}
        rows.append(Row(value=None, note=NOT_RUN + why, **what, **where))
    return rows


def _accuracy(answers: Answers) -> tuple[float, float, str]:
    right = round(answers.values.sum())
    chances = answers.chances
    note = "chance unknown" if chances is None else against_chance(right, chances)
    return *wilson(right, len(answers.questions)), note


def _ratio_interval(answers: Answers) -> tuple[float, float]:
    return bootstrap(np.stack([answers.values, answers.weights]), lambda s: s[0] / s[1])


def paired_rows(found: Found, where: Mapping[str, str]) -> list[Row]:
    """Each arm against the first arm, and against the first arithmetic of its own model."""
    arms = list(found)
    rows = []
    for asked in dict.fromkeys(asked for tasks in found.values() for asked in tasks):
        for arm in arms[1:]:
            own = next(other for other in arms if other[0] == arm[0])
            for baseline in dict.fromkeys((arms[0], own)):
                if baseline != arm and asked in found[arm] and asked in found[baseline]:
                    rows += _pair(arm, baseline, asked, found, where)
    return rows


def _pair(arm: Arm, baseline: Arm, asked: Asked, found: Found, where: Mapping) -> Iterator[Row]:
    task, metric = asked
    got = compare(found[arm][asked], found[baseline][asked])
    accuracy = is_accuracy(metric)
    factor = 100 if accuracy else 1

    def row(name: str, value: float | None, unit: str, note: str = "", **interval: float) -> Row:
        return Row(
            experiment=PAIRED,
            setting=f"{arm_name(arm)} against {arm_name(baseline)}",
            metric=f"{task}.{metric}.{name}",
            value=value,
            unit=unit,
            n=got.n,
            note=note,
            **interval,
            **where,
        )

    ends = {"ci_low": factor * got.low, "ci_high": factor * got.high}
    yield row("difference", factor * got.difference, "points" if accuracy else "bits/byte", **ends)
    if accuracy:
        counts = f"{got.only_arm} right in the first alone, {got.only_baseline} in the second alone"
        yield row("discordant", 100 * got.discordance, "%", counts)
        yield row("mcnemar_p", got.p_value, "1", "exact, two-sided")
        if got.discordance > TOLD:
            needed = questions_needed(TOLD, got.discordance)
            yield row(TO_TELL, needed, "questions", "at 5 %, with 80 % power, at this discordance")
        else:
            yield row(TO_TELL, None, "questions", f"{NOT_RUN}no question, or too few, is discordant")
