"""Run the examples plain and with the one line, in a process each, and compare what comes out, bit by bit.

Usage: python -m tools.examples [--names=vae,dcgan] [--output=FILE.json]

Without ``--names``, all are run. The rows go to a JSON file, in which those of other examples are kept, and as a table
to stdout. An example whose packages are not installed is skipped, and its row stays as it was. Bytes are the device
allocator's, the largest of twenty steps of ``fit``; a step's activations are what its peak lies above the bytes that
are in use before it. The exit code is 1 if an example fails, does not come out identical, or takes more memory than
plain.
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import app, flags

from tools.examples.comparing import compare, examples, is_good, summary, table
from tools.shared.results import RESULTS, machine_line, write_rows, write_text

_NAMES = flags.DEFINE_list("names", [], "examples to run (default: all)")
_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "examples.json"), "where to write the JSON; a .md lies beside it")


def main(_: list[str]) -> int:
    """Run the examples and write the tables."""
    output = Path(_OUTPUT.value)
    rows = {}
    if output.exists():
        rows = {row["example"]: row for row in json.loads(output.read_text(encoding="utf-8"))["rows"]}
    names = _NAMES.value or examples()
    failed = False
    for name in names:
        row = compare(name)
        if row["outcome"] == "skipped":
            print(f"{name} is skipped: {row['error']}", flush=True)
            continue
        failed |= not is_good(row)
        rows[name] = row
        print(table([rows[name]]).splitlines()[-1], flush=True)
        write_rows(output, [rows[each] for each in sorted(rows)])
    kept = [rows[name] for name in sorted(rows)]
    write_text(output.with_suffix(".md"), f"# Examples\n\n{machine_line()}\n\n{summary(kept)}.\n\n{table(kept)}\n")
    print(summary(kept))
    return 1 if failed else 0


if __name__ == "__main__":
    app.run(main)
