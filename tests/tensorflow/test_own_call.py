"""Models that compute in a ``call`` of their own, in segments of single operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import optimized_between_cuts
from tf_memsaver.errors import InvalidRequestError, UnknownDimensionError, UnsupportedModelError
from tf_memsaver.program.signature import note_inputs, signature_of
from tools.shared.models import own_call
from tools.shared.training import assert_trains_alike


@pytest.mark.parametrize(
    "build",
    [own_call.blocks, own_call.blocks_half, own_call.dictionaries, own_call.of_a_graph],
    ids=lambda build: build.__name__,
)
def test_segments_between_all_cuts_train_alike(build: Callable[[], Any]) -> None:
    keras.utils.set_random_seed(0)
    model = build()
    optimized = optimized_between_cuts(model, length=1, granularity="op")
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)
    assert tf_memsaver.verify(model, optimized, batch_size=4).identical


def test_fit_is_the_same_and_takes_less_memory() -> None:
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    y = np.arange(64) % 2
    histories, peaks = [], []
    for optimize in (False, True):
        keras.utils.set_random_seed(0)
        model: Any = own_call.Blocks(256)
        note_inputs(model, x)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        if optimize:
            model = tf_memsaver.optimize(model, batch_size=2048, strategy="min_peak", granularity="op")
            assert isinstance(model, own_call.Blocks) and model.memsaver_plan.recomputed
        histories.append(model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history)
        assert float(model.steps) == 8
        peaks.append(tf_memsaver.measure(model, batch_size=2048, isolate=False).activation_bytes)
    assert histories[0] == histories[1]
    assert peaks[1] < peaks[0]


def test_the_same_layers_and_variables() -> None:
    model = own_call.blocks()
    optimized = tf_memsaver.optimize(model, batch_size=4, granularity="op")
    assert type(optimized).__name__ == "Blocks" and isinstance(optimized, own_call.Blocks) and optimized.width == 16
    for kind in ("layers", "variables", "trainable_variables", "non_trainable_variables", "metrics"):
        assert [id(each) for each in getattr(optimized, kind)] == [id(each) for each in getattr(model, kind)], kind
    optimized.compile("sgd", "mse")
    assert not model.compiled and not model.metrics
    plain = tf_memsaver.strip(optimized)
    assert type(plain) is own_call.Blocks and plain.blocks[0] is model.blocks[0]
    x = np.ones((2, 16), np.float32)
    assert np.array_equal(optimized.predict(x, verbose=0), model.predict(x, verbose=0))


def test_save_and_load(tmp_path: Path) -> None:
    optimized = tf_memsaver.optimize(
        own_call.Blocks(), batch_size=4, strategy="min_peak", granularity="op", inputs=tf.TensorSpec((None, 16))
    )
    optimized.compile("adam", "mse")
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    optimized.fit(x, np.ones((8, 2), np.float32), batch_size=4, verbose=0)
    optimized.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.memsaver_plan == optimized.memsaver_plan
    assert np.array_equal(loaded.predict(x, verbose=0), optimized.predict(x, verbose=0))
    assert tf_memsaver.measure(loaded, batch_size=4, steps=1).steps == 1
    optimized.save_weights(tmp_path / "model.weights.h5")
    fresh = own_call.blocks()
    fresh.load_weights(tmp_path / "model.weights.h5")
    assert all(np.array_equal(a, b) for a, b in zip(fresh.get_weights(), optimized.get_weights(), strict=True))


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="inputs="):
        tf_memsaver.optimize(own_call.Blocks(), batch_size=4, granularity="op")
    with pytest.raises(InvalidRequestError, match="TensorSpec"):
        tf_memsaver.optimize(own_call.Blocks(), batch_size=4, granularity="op", inputs="images")
    with pytest.raises(UnknownDimensionError):
        tf_memsaver.optimize(
            own_call.dictionaries(),
            batch_size=4,
            granularity="op",
            inputs={"words": tf.TensorSpec((None, None), tf.int32), "scale": tf.TensorSpec((None, 1))},
        )
    with pytest.raises(InvalidRequestError, match="knows its inputs"):
        tf_memsaver.optimize(own_call.of_a_graph(), batch_size=4, granularity="op", inputs=tf.TensorSpec((None, 16)))

    class Branches(keras.Model):
        def call(self, x: Any) -> Any:
            return x if float(keras.ops.sum(x)) > 0 else -x

    with pytest.raises(UnsupportedModelError, match="cannot be traced"):
        tf_memsaver.optimize(Branches(), batch_size=4, granularity="op", inputs=tf.TensorSpec((None, 16)))


def test_estimate_counts_operations() -> None:
    model = own_call.Blocks(width=64)
    spec = tf.TensorSpec((None, 64))
    with pytest.raises(UnsupportedModelError, match="inputs="):
        tf_memsaver.estimate(model, batch_size=512)
    found = tf_memsaver.estimate(model, batch_size=512, granularity="op", inputs=spec)
    plan = tf_memsaver.search_plan(model, batch_size=512, granularity="op")
    assert found.peak_bytes == plan.plain_peak_bytes
    assert [unit.label for unit in found.units] == list(plan.labels)


class _Preprocessor:
    """What a task of KerasHub has: it makes all texts of one length."""

    sequence_length = encoder_sequence_length = 12
    decoder_sequence_length = 7


@keras.saving.register_keras_serializable("test_own_call")
class PreparedTask(keras.Model):
    preprocessor = _Preprocessor()


@pytest.mark.parametrize(
    ("names", "lengths"), [(("token_ids", "padding_mask"), (12, 12)), (("encoder_ids", "decoder_ids"), (12, 7))]
)
def test_the_preprocessor_of_a_task_tells_the_length_of_texts(names: Any, lengths: Any) -> None:
    inputs = {name: keras.Input((None,), name=name, dtype="int32") for name in names}
    x = layers.Concatenate()([keras.layers.Embedding(9, 16)(words)[:, 0] for words in inputs.values()])
    for _ in range(12):
        x = layers.Dense(64, activation="tanh")(x)
    model = PreparedTask(inputs, layers.Dense(2)(x))
    found = keras.tree.flatten(signature_of(model).inputs)
    assert dict(zip(sorted(names), lengths if names[0] < names[1] else lengths[::-1], strict=True)) == {
        spec.name: spec.shape[1] for spec in found
    }
    assert tf_memsaver.search_plan(model, batch_size=256, strategy="min_peak").recomputed
    # What the user says counts more.
    specs = {name: tf.TensorSpec((None, 5), tf.int32) for name in names}
    assert tf_memsaver.search_plan(model, batch_size=64, inputs=specs).batch_size == 64
    assert {spec.shape[1] for spec in keras.tree.flatten(signature_of(model).inputs)} == {5}


def test_an_open_length_that_nobody_tells_is_refused() -> None:
    words = keras.Input((None,), name="words", dtype="int32")
    model = keras.Model(words, layers.Dense(2)(layers.Embedding(9, 16)(words)))
    with pytest.raises(UnknownDimensionError, match="words"):
        tf_memsaver.search_plan(model, batch_size=4)
