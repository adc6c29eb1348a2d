"""The examples train as plain ones do, in no more memory: scripts of the kinds that people copy."""

from __future__ import annotations

import pytest

from tools.examples.comparing import compare, examples, is_good, summary, table

ROW = {
    "example": "one",
    "outcome": "identical",
    "plain_bytes": 200,
    "optimized_bytes": 120,
    "predicted_bytes": 110,
    "plain_activations_bytes": 160,
    "optimized_activations_bytes": 80,
    "plain_step_seconds": 1.0,
    "optimized_step_seconds": 1.25,
    "optimize_seconds": 3.0,
}


@pytest.mark.long
@pytest.mark.parametrize("name", examples())
def test_an_example_trains_the_same_in_no_more_memory(name: str) -> None:
    row = compare(name)
    if row["outcome"] == "skipped":
        pytest.skip(row["error"])
    assert is_good(row), row


def test_what_is_good() -> None:
    assert is_good(ROW) and is_good({**ROW, "outcome": "varies as plain"})
    assert not is_good({**ROW, "outcome": "different"})
    assert not is_good({**ROW, "optimized_bytes": 210})
    failed = {"example": "two", "outcome": "failed", "error": "ValueError: no"}
    assert not is_good(failed)
    assert (
        summary([ROW, failed])
        == "2 examples, 1 the same in no more memory than plain; activations 50% of plain at the median"
    )
    assert (
        "| one | identical |" in table([ROW, failed]) and "| 1.25 x | 3 s |" in table([ROW]) and "no" in table([failed])
    )
