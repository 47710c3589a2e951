"""T-D6: attention whose D belongs to another P than the one in use loses in training."""

import pytest

from fp4repro.report import attention_tables as names


@pytest.mark.slow
def test_an_inconsistent_row_term_loses_clearly():
    from fp4repro.fullstack import attention_control, tiny_lm

    figures = attention_control.figures(tiny_lm.Setup(), (0,), attention_control.REDUCED)
    gaps = {setting: value for setting, metric, value, _ in figures if metric == names.LOSS_GAP}
    assert gaps["full-stack/seed-0"] < 0.05
    assert gaps["control: P of the backward is another/seed-0"] > 0.2
