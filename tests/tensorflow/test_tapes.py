"""Tapes: what several modules ask of TensorFlow's one gradient function, they all get."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from tf_memsaver.compat import gradient_terms, gradients
from tf_memsaver.compat.tapes import record_operation, stop_recording, wrap_gradient_function


@pytest.fixture
def _restored() -> Iterator[None]:
    gradients._make_tapes_tell()
    before: list[Callable[..., Any]] = []
    wrap_gradient_function(lambda found: (before.append(found), found)[1])
    yield
    wrap_gradient_function(lambda _: before[0])


@pytest.mark.usefixtures("_restored")
def test_all_who_wrap_the_gradient_function_are_called() -> None:
    called: list[str] = []

    def noted(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(differentiate: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: (called.append(name), differentiate(*given))[1]

        return wrap

    for name in ("first", "second"):
        wrap_gradient_function(noted(name))
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    assert float(tape.gradient(y, x)) == 6.0
    assert called == ["second", "first"]


class _Heard:
    """Keeps the names of the operations that were differentiated."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def differentiated(self, operation: tf.Operation, *args: Any) -> None:
        self.names.append(operation.name)

    def took_gradients(self, *args: Any) -> None:
        pass


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("terms_last", [False, True])
def test_tapes_are_heard_whoever_came_first(terms_last: bool) -> None:
    listener = _Heard()
    if not terms_last:
        gradient_terms._register.__wrapped__()

    def function(x: tf.Tensor) -> tf.Tensor:
        with gradients.tapes_heard_by(listener), tf.GradientTape() as tape:
            if terms_last:
                gradient_terms._register.__wrapped__()
            tape.watch(x)
            y = tf.sin(x, name="sine")
            return tape.gradient(y, x)

    assert float(tf.function(function)(tf.constant(0.0))) == 1.0
    assert listener.names == ["sine"]


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("hands_on", [False, True])
def test_a_sum_that_was_handed_on_is_one_term(hands_on: bool) -> None:
    """Gradient functions that are recorded, such as those of copied operations, may hand a sum on as it is."""
    seen: list[int] = []

    def noted(upstream: tf.Tensor) -> list[tf.Tensor]:
        seen.append(len(gradient_terms.last_sum(upstream)))
        return [upstream]

    gradient_terms.note_sums(noted, list)
    x = tf.constant([3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        with stop_recording():
            y = tf.identity(x)
        record_operation("noted", [y], [x], noted)
        z = tf.grad_pass_through(tf.identity)(y) if hands_on else y
        total = 2.0 * z + 3.0 * z + 5.0 * z
    assert float(tape.gradient(total, x)[0]) == 10.0
    assert seen == [1 if hands_on else 3]


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("scope", ["", "inside/"])
def test_a_sum_that_nobody_reads_gives_its_number_to_the_next(scope: str) -> None:
    names = []
    with tf.Graph().as_default(), tf.name_scope(scope) if scope else contextlib.nullcontext():
        gradient_terms.note_sums(lambda: None, list)
        for number in range(4):
            x = tf.constant([3.0])
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = 2.0 * x + 3.0 * x
            total = tape.gradient(y, x)
            names.append(total.op.name)
            if number in (1, 2):
                gradient_terms.forget_number(total)
    assert names == [f"{scope}{name}" for name in ("AddN", "AddN_1", "AddN_1-again", "AddN_1-again_1")]
