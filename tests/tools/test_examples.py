"""The examples train as plain ones do, in no more memory: scripts of the kinds that people copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.examples.comparing import compare, examples, is_good, summary, table
from tools.shared.processes import in_own_process

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


def written(memsaver: bool, folder: str) -> Any:
    """Return what a sequence-to-sequence model writes after it was trained, saved and loaded, and its weights."""
    import keras
    import numpy as np

    import tf_memsaver
    from tools.examples import lstm_seq2seq as example

    keras.utils.set_random_seed(0)
    model, data = example.make()
    if memsaver:
        model = tf_memsaver.optimize(model, data=data, strategy="recompute_all")
        assert model.memsaver_plan.recomputed
    model.fit(data, epochs=1, verbose=0)
    path = f"{folder}/model_{memsaver}.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert tf_memsaver.strip(loaded) is not loaded or not memsaver
    read = np.eye(example.ENCODER_TOKENS, dtype="float32")[np.arange(example.READ) % example.ENCODER_TOKENS][None]
    return example.write(loaded, read), [weight.numpy().tobytes() for weight in loaded.weights]


@pytest.mark.long
def test_a_model_is_taken_apart_after_training_to_write(tmp_path: Path) -> None:
    plain, optimized = (in_own_process(written, memsaver, str(tmp_path)) for memsaver in (False, True))
    assert plain == optimized
    assert len(plain[0]) == 30


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
