"""The checker of figures in texts: what is traced, what is not, and what is no figure."""

from pathlib import Path

import pytest

from fp4repro.report.published import load_published
from fp4repro.report.schema import Row, write_rows
from fp4repro.report.trace import is_traced, known_values, untraced

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("figure", "value"),
    [("3.9631", 3.96312), ("+0.92", 0.9184), ("-0.12", 0.1249), ("2,048.5", 2048.53)],
)
def test_a_value_that_rounds_to_a_figure_traces_it(figure, value):
    assert is_traced(figure, [7.0, value])
    assert not is_traced(figure, [7.0, value * 1.1])


def test_one_digit_more_or_less_is_seen():
    assert is_traced("3.963", [3.96312]) and not is_traced("3.964", [3.96312])
    assert not is_traced("3.96311", [3.96312])


def test_what_is_no_figure_is_left_alone():
    text = "torch 2.13.0, `x = 0.123`, arXiv 2509.25149, [a](a/b-0.77.png)\n```\n0.999\n```\n"
    text += "4.5 bits <!-- not a result: the format's definition -->\n"
    assert list(untraced(text, [])) == []
    found = list(untraced("one\n| a | 1.25 ± 0.50 [+0.1, 2.5] |\n", [1.25, 2.5]))
    assert found == [(2, "0.50"), (2, "+0.1")]


def test_shares_are_printed_in_per_cent_and_counts_in_millions(tmp_path):
    common = {"experiment": "e", "setting": "s", "metric": "m"}
    rows = [Row(value=0.65591, unit="1", **common), Row(value=898_408, unit="parameters", **common)]
    write_rows(tmp_path / "t.csv", [*rows, Row(value=0.4321, unit="%", **common)])
    values = known_values([tmp_path / "t.csv"], [])
    assert list(untraced("65.59 % of 0.898 M, 0.432 %", values)) == []
    assert list(untraced("6.559, 89.8, 43.21 %", values)) == [(1, "6.559"), (1, "89.8"), (1, "43.21")]


def test_a_figure_of_the_readme_that_is_changed_is_named():
    tables = sorted((ROOT / "results" / "published").glob("*/tables/*.csv"))
    values = known_values(tables, load_published(ROOT / "configs" / "published.yaml"))
    text = "| bf16 | 3.9631 ± 0.0393 | about 1.5 % |\n"
    assert list(untraced(text, values)) == []
    assert list(untraced(text.replace("3.9631", "3.9641"), values)) == [(1, "3.9641")]
    assert list(untraced(text.replace("1.5", "17.35219"), values)) == [(1, "17.35219")]
