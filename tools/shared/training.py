"""Train a model for a few steps and keep every number, independently of ``tf_memsaver.verify``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_memsaver.program.signature import signature_of
from tools.shared.records import Record, array_of, assert_identical, differing


@contextlib.contextmanager
def kept(variables: Sequence[Any]) -> Iterator[None]:
    """Put variables back as they were."""
    values = [v.numpy() for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def kept_state(model: Any) -> contextlib.AbstractContextManager[None]:
    """Put the variables of a model back as they were."""
    return kept(model.variables)


@contextlib.contextmanager
def no_graph_rewriting() -> Iterator[None]:
    """Run graphs as they were written, without TensorFlow's graph optimizer."""
    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})


def batch_for(model: Any, batch_size: int = 4, seed: int = 0, vocabulary: int = 5) -> Any:
    """Return random inputs for a model: normal floats, integers below ``vocabulary`` with zeros at the end."""
    generator = np.random.default_rng(seed)

    def tensor(spec: Any) -> tf.Tensor:
        shape = (batch_size, *spec.shape[1:])
        dtype = tf.as_dtype(spec.dtype)
        if dtype.is_integer:
            tokens = generator.integers(1, vocabulary, shape)
            if len(shape) > 1:
                tokens[: batch_size // 2, shape[1] // 2 :] = 0
            return tf.constant(tokens, dtype)
        if dtype.is_bool:
            return tf.constant(generator.integers(0, 2, shape).astype(bool))
        return tf.constant(generator.standard_normal(shape), dtype)

    return keras.tree.map_structure(tensor, signature_of(model).inputs)


def square_loss(outputs: Any) -> tf.Tensor:
    """Return the sum of the mean squares of all outputs."""
    return tf.add_n([tf.reduce_mean(tf.square(tf.cast(y, tf.float32))) for y in keras.tree.flatten(outputs)])


def train(
    model: Any,
    *,
    mode: str = "graph",
    steps: int = 2,
    batch_size: int = 4,
    loss: Callable[[Any], tf.Tensor] = square_loss,
    optimizer: Any = None,
    batches: Callable[[int], Any] | None = None,
    free_batch: bool = False,
) -> Record:
    """Return loss, all gradients and all variables of ``steps`` steps; the variables are put back.

    With ``free_batch`` the step is traced as ``fit`` does it, with an unknown batch dimension.
    """
    weights = list(model.trainable_variables)
    optimizer = keras.optimizers.SGD(0.1) if optimizer is None else type(optimizer).from_config(optimizer.get_config())
    optimizer.build(weights)
    batches = batches or (lambda number: batch_for(model, batch_size, seed=number))

    def step(x: Any) -> tuple[Any, Any, Any]:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            total = tf.reduce_sum(tf.stack([tf.cast(t, tf.float32) for t in [loss(outputs), *model.losses]]))
            scaled = optimizer.scale_loss(total)
        gradients = tape.gradient(scaled, [v.value for v in weights])
        optimizer.apply_gradients([(g, v) for g, v in zip(gradients, weights, strict=True) if g is not None])
        return total, gradients, outputs

    run = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    if free_batch:
        spec = tf.nest.map_structure(lambda t: tf.TensorSpec((None, *t.shape[1:]), t.dtype), batches(0))
        run = tf.function(step, input_signature=[spec])
    record: Record = {}
    rewriting = contextlib.nullcontext() if mode != "as_written" else no_graph_rewriting()
    with kept_state(model), rewriting:
        for number in range(steps):
            total, gradients, outputs = run(batches(number))
            record["loss", number] = array_of(total)
            for place, output in enumerate(keras.tree.flatten(outputs)):
                record["output", place, number] = array_of(output)
            for variable, gradient in zip(weights, gradients, strict=True):
                record["gradient", variable.path, number] = array_of(gradient)
            for variable in model.variables:
                record["variable", variable.path, number] = array_of(variable)
            for place, variable in enumerate(optimizer.variables):
                record["slot", place, number] = array_of(variable)
    return record


def fit(model: Any, x: Any, y: Any, *, batch_size: int, epochs: int = 2) -> Record:
    """Return losses of all steps and all variables after Keras's own ``fit`` of a compiled model; they are put back."""
    model.optimizer.build(model.trainable_variables)
    variables = {id(v): v for v in [*model.variables, *model.optimizer.variables, *model.metrics_variables]}.values()
    losses: list[Any] = []
    noted = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
    with kept(list(variables)):
        model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=[noted])
        # By place: optimizers and metrics of two compiled models have names of their own.
        return {
            **{("loss", place): loss for place, loss in enumerate(losses)},
            **{("variable", place): array_of(variable) for place, variable in enumerate(variables)},
        }


def assert_fit_alike(model: Any, optimized: Any, x: Any, y: Any, *, batch_size: int, epochs: int = 2) -> None:
    """Check equal bits of all losses and variables after ``fit`` of both, with a smaller last batch or without."""
    plain, other = (fit(each, x, y, batch_size=batch_size, epochs=epochs) for each in (model, optimized))
    assert any(key[0] == "loss" for key in plain)
    wrong = differing(plain, other)
    assert not wrong, f"{len(wrong)} of {len(plain)} differ, the first: {wrong[:3]}"


def assert_trains_alike(
    model: Any, optimized: Any, modes: tuple[str, ...] = ("graph", "eager"), **options: Any
) -> None:
    """Check equal bits of all that a few steps in each mode leave of both models."""
    for mode in modes:
        assert_identical(train(model, mode=mode, **options), train(optimized, mode=mode, **options))
