"""Every test starts with the same seeds, default names and the default dtype policy."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest


@pytest.fixture(autouse=True)
def _fresh_keras() -> Iterator[None]:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)
