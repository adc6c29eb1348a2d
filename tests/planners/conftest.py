"""What tests of planners share."""

from __future__ import annotations

import pytest

from tf_memsaver.plan import registry


@pytest.fixture
def scratch_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planners that a test registers are gone after it."""
    monkeypatch.setattr(registry, "_PLANNERS", dict(registry._PLANNERS))
