"""List the tests that take long, by the times that pytest has measured; ``tools/test`` leaves them to ``--long``.

Usage: python -m pytest --long --durations=0 | tee times.log; python -m tools.slow_tests times.log
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from absl import app, flags

from tools.shared.results import ROOT

LIST = ROOT / "tests" / "slow_tests.txt"
ALWAYS = (
    "tests/test_readme.py::test_python_blocks_run[README]",
    "tests/tensorflow/test_compiled.py::test_a_model_that_fit_compiles_is_planned_by_the_compiler",
)
"""What always runs: people read the first before all else, and the second alone plans as `fit` does with XLA."""

_LIMIT = flags.DEFINE_float("limit", 2.5, "seconds from which on a test is slow")


def main(arguments: list[str]) -> None:
    """Read the logs and write the list."""
    seconds: dict[str, float] = defaultdict(float)
    for path in arguments[1:]:
        for took, test in re.findall(r"(?m)^([\d.]+)s (?:call|setup|teardown) +(\S.*)$", Path(path).read_text()):
            seconds[test.strip()] += float(took)
    slow = sorted(test for test, took in seconds.items() if took > _LIMIT.value and test not in ALWAYS)
    LIST.write_text("\n".join([*slow, ""]), encoding="utf-8")
    left = sum(took for test, took in seconds.items() if test not in slow)
    print(f"{len(slow)} slow tests of {len(seconds)}; the others take {left:.0f} s")


if __name__ == "__main__":
    app.run(main)
