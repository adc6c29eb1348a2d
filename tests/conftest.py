"""Slow tests are marked ``long`` and run with ``tools/test --long``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests that are marked long, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes long; run with --long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    slow = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if item not in set(slow)]
    config.hook.pytest_deselected(items=slow)
