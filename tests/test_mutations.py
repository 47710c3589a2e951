"""Every deliberate fault is caught by the test that its row names; the table is made by running them."""

import mutations
import pytest
from mutants import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_mutant_is_caught(mutation):
    mutations.run(mutation)


def test_the_table_is_up_to_date():
    assert mutations.TABLE.read_text() == mutations.table(MUTATIONS), "run python tests/mutations.py"


def test_at_least_25_faults_of_every_part():
    assert len(MUTATIONS) >= 25
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
    places = {m.what.partition(":")[0] for m in MUTATIONS}
    assert {"make_scales", "tensor_scales", "round_nearest", "Slot.of", "swizzle_scales"} <= places


def test_a_mutation_that_no_longer_fits_is_an_error():
    with pytest.raises(mutations.Stale, match="renew"), pytest.MonkeyPatch.context() as patch:
        mutations.edit("core.kernels:make_scales", ("no such snippet", ""))(patch)
