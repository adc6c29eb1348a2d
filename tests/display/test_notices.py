"""Lines for whoever calls the library."""

from __future__ import annotations

import pytest
from absl import logging

from tf_memsaver.display.notices import tell


@pytest.mark.parametrize(("verbosity", "written"), [(logging.WARNING, True), (logging.ERROR, False)])
def test_a_line_is_written_also_where_no_terminal_is(
    verbosity: int, written: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log file of a batch job is read, too; a verbosity below warnings turns it off."""
    before = logging.get_verbosity()
    try:
        logging.set_verbosity(verbosity)
        tell("a plan was made")
    finally:
        logging.set_verbosity(before)
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == ("a plan was made\n" if written else "", "")
