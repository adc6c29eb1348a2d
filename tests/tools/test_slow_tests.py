"""The list of slow tests names tests that exist: what is not in it runs with the fast ones."""

from __future__ import annotations

import pytest

from tests.conftest import LOST


def test_all_tests_of_the_list_exist(request: pytest.FixtureRequest) -> None:
    lost = request.config.stash.get(LOST, None)
    if lost is None:
        pytest.skip("only some tests were collected")
    assert not lost, "tests/slow_tests.txt lists tests that do not exist; python -m tools.slow_tests makes it anew"
