"""The tables of evaluations as long rows: each arm's figures, and each arm against the first.

`n` counts questions here. An arm's setting is `<model> in <arithmetic>`, a metric's name
`<task>.<metric>`. Accuracies are per cent, their differences points, positive where the arm is better;
of bits per byte and of perplexity a positive difference is worse.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from fp4repro.report.accuracy import against_chance, wilson
from fp4repro.report.paired import bootstrap, compare, questions_needed
from fp4repro.report.questions import ACCURACY, Answers, Arm, Asked, Evaluations
from fp4repro.report.schema import NOT_RUN, Row

EVALS = "evals"
PAIRED = "evals_paired"
TOLD = 0.0004  # the difference of the paper's two MMLU-Pro accuracies, 0.04 points
LINEARS = "quantised.linears"
TO_TELL = "questions_to_tell_0.04_points"

Found = Mapping[Arm, Mapping[Asked, Answers]]


def arm_name(arm: Arm) -> str:
    return f"{arm[0]} in {arm[1]}"


def evals_rows(got: Evaluations) -> list[Row]:
    """Each arm's figure by task and metric, then how many linears each arithmetic quantised."""
    rows = []

    def row(arm: Arm, metric: str, value: float | None, unit: str, note: str, **more: float) -> None:
        what = {"experiment": EVALS, "setting": arm_name(arm), "metric": metric, "unit": unit}
        rows.append(Row(value=value, note=note, **what, **more, **got.where))

    for arm, tasks in got.found.items():
        for (task, metric), answers in tasks.items():
            kind = answers.measure
            low, high, note = _accuracy(answers) if kind is ACCURACY else (*_interval(answers), "")
            ends = {"ci_low": kind.factor * low, "ci_high": kind.factor * high}
            count = len(answers.questions)
            row(arm, f"{task}.{metric}", kind.factor * answers.figure, kind.unit, note, n=count, **ends)
    for arm, task, why in got.missing:
        row(arm, f"{task}.acc", None, "%", NOT_RUN + why)
    for arm, (count, of) in got.quantised.items():
        row(arm, LINEARS, count, "linears", of)
    return rows


def _accuracy(answers: Answers) -> tuple[float, float, str]:
    right = round(answers.values.sum())
    chances = answers.chances
    note = "chance unknown" if chances is None else against_chance(right, chances)
    return *wilson(right, len(answers.questions)), note


def _interval(answers: Answers) -> tuple[float, float]:
    of = answers.measure.of_ratio
    return bootstrap(np.stack([answers.values, answers.weights]), lambda s: of(s[0] / s[1]))


def paired_rows(found: Found, where: Mapping[str, str]) -> list[Row]:
    """Each arm against the first arithmetic of its own model, and against the first arm of all where that
    was asked the same questions."""
    arms = list(found)
    rows = []
    for asked in dict.fromkeys(asked for tasks in found.values() for asked in tasks):
        for arm in arms[1:]:
            own = next(other for other in arms if other[0] == arm[0])
            for baseline in dict.fromkeys((arms[0], own)):
                if baseline != arm and _asked_both(found, arm, baseline, asked, own):
                    rows += _pair(arm, baseline, asked, found, where)
    return rows


def _asked_both(found: Found, arm: Arm, baseline: Arm, asked: Asked, own: Arm) -> bool:
    """Whether to pair; another model's sample may be another, one model's arithmetics share theirs."""
    if asked not in found[arm] or asked not in found[baseline]:
        return False
    return baseline == own or found[arm][asked].questions == found[baseline][asked].questions


def _pair(arm: Arm, baseline: Arm, asked: Asked, found: Found, where: Mapping) -> Iterator[Row]:
    task, metric = asked
    got = compare(found[arm][asked], found[baseline][asked])
    kind = found[arm][asked].measure

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

    ends = {"ci_low": kind.factor * got.low, "ci_high": kind.factor * got.high}
    yield row("difference", kind.factor * got.difference, kind.difference, **ends)
    if kind is ACCURACY:
        counts = f"{got.only_arm} right in the first alone, {got.only_baseline} in the second alone"
        yield row("discordant", 100 * got.discordance, "%", counts)
        yield row("mcnemar_p", got.p_value, "1", "exact, two-sided")
        if got.discordance > TOLD:
            needed = questions_needed(TOLD, got.discordance)
            yield row(TO_TELL, needed, "questions", "at 5 %, with 80 % power, at this discordance")
        else:
            yield row(TO_TELL, None, "questions", f"{NOT_RUN}no question, or too few, is discordant")
