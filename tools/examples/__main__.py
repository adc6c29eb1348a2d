"""Run the examples plain and with the one line, in a process each, and compare what comes out, bit by bit.

Usage: python -m tools.examples [--names=vae,dcgan] [--output=FILE.json]

Without ``--names``, all are run. The rows go to a JSON file, in which those of other examples are kept, and as a table
to stdout. An example whose packages are not installed is skipped, and its row stays as it was. Bytes are the device
allocator's, the largest of twenty steps of ``fit``; a step's activations are what its peak lies above the bytes that
are in use before it. The exit code is 1 if an example fails, does not come out identical, or takes more memory than
plain.
"""

from __future__ import annotations

from absl import app, flags

from tools.examples.comparing import compare, examples, is_good, summary, table
from tools.shared.results import RESULTS, KeptRows

_NAMES = flags.DEFINE_list("names", [], "examples to run (default: all)")
_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "examples.json"), "where to write the JSON; a .md lies beside it")


def main(_: list[str]) -> int:
    """Run the examples and write the tables."""
    kept = KeptRows(_OUTPUT.value, "Examples", ["example"], lambda rows: [f"{summary(rows)}."], table)
    failed = False
    for name in _NAMES.value or examples():
        row = compare(name)
        if row["outcome"] == "skipped":
            print(f"{name} is skipped: {row['error']}", flush=True)
            continue
        failed |= not is_good(row)
        kept.add([row], lambda each: each["example"])
    kept.print_summary()
    return 1 if failed else 0


if __name__ == "__main__":
    app.run(main)
