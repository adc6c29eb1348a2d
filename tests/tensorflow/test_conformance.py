"""The quick part of ``python -m tools.conformance``: ways of training that no other test has, in this process."""

from __future__ import annotations

import pytest

from tools.conformance.cell import TRAINING_MODES, Cell, train
from tools.shared.records import differing

_CELLS = [
    Cell("perceptron", "fit_3_steps"),
    Cell("residual", "accumulation"),
    Cell("siamese", "ema"),
    Cell("own_step", "clipping"),
    Cell("autoencoder", "evaluate_predict"),
    Cell("autoencoder", "loop_eager"),
    Cell("sequential", "class_weight"),
    Cell("dictionaries", "fit_dataset"),
    Cell("layer_policies", "loop_function"),
    Cell("nested", "train_on_batch", "mixed_bfloat16"),
    Cell("recurrent", "fit", granularity="op"),
    # No operation of it can lower the peak, which is in the loop.
    Cell("convolutional_lstm", "train_on_batch", granularity="op", plan="recompute_all"),
    Cell("autoencoder", "fit", granularity="op"),
    Cell("nested", "fit_dataset", granularity="op"),
]


@pytest.mark.parametrize("cell", _CELLS, ids=lambda cell: cell.name)
def test_the_optimized_model_trains_as_the_plain_one(cell: Cell) -> None:
    plain, _ = train(cell, "plain")
    optimized, facts = train(cell, "optimized")
    assert facts["recomputed"]
    assert len(plain) > 5 and not differing(plain, optimized)


def test_modes_without_xla_are_modes() -> None:
    assert all(Cell("perceptron", mode).uncompiled in TRAINING_MODES for mode in TRAINING_MODES)
