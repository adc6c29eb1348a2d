"""Groups of a backward pass: whatever runs side by side takes no more than the pass takes one by one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tensorflow as tf

from tf_memsaver.cost.rules import Kernels
from tf_memsaver.parity.control import is_backward
from tf_memsaver.runtime.groups import MOST, NEAR_PEAK, Groups, Profile

BATCH, WIDTH = 512, 64


def backward_pass(layers: int) -> tuple[list[Any], list[Any]]:
    """Return the backward operations of a chain of dense layers, and the gradients that they are for."""
    weights = [tf.Variable(tf.ones((WIDTH, WIDTH))) for _ in range(layers)]
    results: list[Any] = []

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_sum(x)
        results.extend(tape.gradient(loss, weights))
        return [tf.identity(each) for each in results]

    graph = step.get_concrete_function(tf.TensorSpec((BATCH, WIDTH))).graph
    return [each for each in graph.get_operations() if is_backward(each)], results


def profile_of(operations: list[Any], results: list[Any]) -> Profile:
    return Profile(operations, results, BATCH, Kernels())


def test_a_profile_counts_what_is_live_one_by_one() -> None:
    operations, results = backward_pass(4)
    profile, tensor, weight = profile_of(operations, results), 4 * BATCH * WIDTH, 4 * WIDTH * WIDTH
    # At first, the outputs of four layers, the gradient of the last one, and what the tanh makes of it.
    assert profile.peaks[0] // tensor == 6
    used_up, kept = profile.after[-1]
    assert kept - used_up == len(results) * weight


@pytest.mark.parametrize("every", [1, 3], ids=["all are held", "two of three run freely"])
@pytest.mark.parametrize("layers", [2, 12, 40])
def test_what_may_run_side_by_side_is_below_the_peak(layers: int, every: int) -> None:
    operations, results = backward_pass(layers)
    profile = profile_of(operations, results)
    names = [each.name for each in operations]
    held = names[::every]
    groups = Groups(operations, held, profile)
    waits: dict[str, tuple[str, ...]] = {}
    joined = set[str]()
    for name in held:
        if groups.has_room(name):
            joined.add(name)
            waits[name] = groups.join(name)
        else:
            waits[name] = groups.end(name, waits=True)
    for number, name in enumerate(names):
        if name not in waits:
            continue
        # All held operations up to the last one that a name waits for are over when it begins.
        over = max((names.index(each) for each in waits[name]), default=-1)
        assert all(each not in waits or set(waits[each]) <= set(names[: over + 1]) for each in names[:number])
        if name in joined:
            # Beside it may run what is behind the last one, and what is not held, until the next one.
            at_once, live = sum(profile.made[over + 1 : number + every]), profile.after[over]
            assert all(each + at_once <= NEAR_PEAK * peak for each, peak in zip(live, profile.peaks, strict=True))
            assert number - over <= MOST * every
    assert layers == 2 or any(one not in waits[other] for one, other in itertools.pairwise(held))
