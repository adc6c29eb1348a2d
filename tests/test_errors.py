"""Errors carry their values, and say in a sentence what is wrong, what the limit is and what to do."""

from __future__ import annotations

import inspect
import pickle

import pytest

from tf_memsaver import errors
from tf_memsaver.errors import MemsaverError

WITH_VALUES: list[tuple[MemsaverError, dict[str, object], list[str]]] = [
    (
        errors.UnknownDimensionError("image", (None, None, 3)),
        {"input_name": "image", "shape": (None, None, 3)},
        ["'image'", "(None, None, 3)", "keras.Input"],
    ),
    (
        errors.InfeasibleBudgetError(2**30, 3 * 2**29),
        {"budget_bytes": 2**30, "least_bytes": 3 * 2**29},
        ["1.00 GiB", "1.50 GiB", str(3 * 2**29), "Raise the budget"],
    ),
    (
        errors.InfeasibleBudgetError(2**30, 3 * 2**29, remedy="Try a smaller model."),
        {"remedy": "Try a smaller model."},
        ["1.50 GiB", "Try a smaller model. Or raise the budget"],
    ),
    (
        errors.InfeasibleBudgetError(2**30, 3 * 2**29, predicted_bytes=5 * 2**28),
        {"predicted_bytes": 5 * 2**28},
        [f"takes 1.25 GiB ({5 * 2**28} bytes)", f"up to 1.50 GiB ({3 * 2**29} bytes)"],
    ),
    (
        errors.InfeasibleBudgetError(2**30, 3 * 2**29, plain_bytes=11 * 2**27),
        {"plain_bytes": 11 * 2**27},
        ["Most plain steps take 1.38 GiB", "saves much"],
    ),
    (
        errors.InfeasibleOverheadError(0.1, 0.25),
        {"max_overhead": 0.1, "least_overhead": 0.25},
        ["10.0%", "25.0%", "max_overhead"],
    ),
    (errors.PlanMismatchError("layer 3 differs"), {"difference": "layer 3 differs"}, ["layer 3", "search_plan"]),
    (
        errors.CertificationError("mine", "a hole"),
        {"strategy": "mine", "reason": "a hole"},
        ["'mine'", "a hole", "another strategy"],
    ),
    (
        errors.OutputError("out/", "no space left"),
        {"path": "out/", "reason": "no space left"},
        ["'out/'", "no space left", "No partial output"],
    ),
    (errors.OutputExistsError("out/"), {"path": "out/"}, ["'out/'", "overwrit"]),
    (
        errors.MissingExtraError("highspy", "milp"),
        {"package": "highspy", "extra": "milp"},
        ["'highspy'", "pip install highspy"],
    ),
    (errors.SecondDerivativeError(), {}, ["neither second", "strip"]),
]


@pytest.mark.parametrize(("error", "values", "words"), WITH_VALUES, ids=lambda item: type(item).__name__)
def test_values_and_sentence(error: MemsaverError, values: dict[str, object], words: list[str]):
    for name, value in values.items():
        assert getattr(error, name) == value
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(("error", "values", "words"), WITH_VALUES, ids=lambda item: type(item).__name__)
def test_errors_come_through_a_process_border(error: MemsaverError, values: dict[str, object], words: list[str]):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_all_errors_are_of_one_family():
    classes = [item for _, item in inspect.getmembers(errors, inspect.isclass) if item.__module__ == errors.__name__]
    assert len(classes) > 10
    assert all(issubclass(item, MemsaverError) for item in classes)
    assert all(item.__doc__ for item in classes)
