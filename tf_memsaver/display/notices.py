"""What a person who calls the library is told: by absl's log, or on stderr where that shows warnings alone."""

from __future__ import annotations

import sys

from absl import logging


def tell(text: str) -> None:
    """Log a line at level INFO; where that level is not logged, write it to stderr, in a notebook as output.

    Logs and pipes get it, too: people read them after a training script has run. Whoever sets absl's verbosity below
    warnings reads nothing.
    """
    logging.info("%s", text)
    if logging.level_warning() and not logging.level_info():
        (sys.stdout if "ipykernel" in sys.modules else sys.stderr).write(f"{text}\n")
