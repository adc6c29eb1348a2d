"""What a person who calls the library is told: by absl's log and, where somebody sits in front of it, on the screen."""

from __future__ import annotations

import sys

from absl import logging


def tell(text: str) -> None:
    """Log a line at level INFO, and show it in a notebook or on a terminal, where that level is not logged."""
    logging.info("%s", text)
    if logging.level_info():
        return
    if "ipykernel" in sys.modules:
        sys.stdout.write(f"{text}\n")
    elif sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")
