"""Slow tests run with ``tools/test --long`` only: those that are marked ``long``, and those listed in slow_tests.txt.

``python -m tools.slow_tests`` makes the list of measured times.

TensorFlow takes oneDNN's kernels on newer processors alone. Others take other memory, such as 30 MiB of scratch for a
convolution of Eigen's, and small models have other plans. So that tests find the same plans everywhere, they ask for
oneDNN, unless ``TF_ENABLE_ONEDNN_OPTS`` is set.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

SLOW = frozenset(Path(__file__).with_name("slow_tests.txt").read_text(encoding="utf-8").splitlines())

LOST = pytest.StashKey[list[str]]()
"""The tests of the list that do not exist, where all tests are collected."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the slow tests, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes long; run with --long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.stash[LOST] = sorted(SLOW.difference(item.nodeid for item in items))
    if config.getoption("--long"):
        return
    named = any("::" in argument for argument in config.args)
    slow = {item for item in items if item.get_closest_marker("long") or (item.nodeid in SLOW and not named)}
    items[:] = [item for item in items if item not in slow]
    config.hook.pytest_deselected(items=list(slow))
