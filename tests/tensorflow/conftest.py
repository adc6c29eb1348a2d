"""Every test starts with the same seeds, default names and the default dtype policy."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import keras
import pytest

import tf_memsaver  # noqa: F401 - what is imported stays for good: see below
from tf_memsaver.capture import convert
from tf_memsaver.cost.rules import Kernels
from tools.shared import memory  # noqa: F401 - has memory counted before the first operation

# Keras collects garbage before every test. What TensorFlow is made of, a million objects, is not garbage, and neither
# is what a test leaves behind for good: TensorFlow keeps the graphs of custom gradients.
gc.freeze()


@pytest.fixture
def costs_with_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as for a processor with oneDNN: where Eigen unfolds images, what it unfolds is all that small models are."""
    monkeypatch.setattr(convert, "kernels_here", Kernels)


@pytest.fixture(autouse=True)
def _fresh_keras() -> Iterator[None]:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)
    gc.collect()
    gc.freeze()
