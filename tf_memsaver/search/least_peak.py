"""The least limit on the peak that the tables allow: bisection over searches."""

from __future__ import annotations

from tf_memsaver.search.labels import INFINITE, Search
from tf_memsaver.search.tables import Proposal, Tables


def least_peak(
    tables: Tables,
    known: Proposal | None = None,
    tolerance: float = 0.0,
    *,
    least: float = 0.0,
    most: float = INFINITE,
) -> Proposal | None:
    """Return the proposal of least predicted peak, or one within ``tolerance`` (a share) of it; None if there is none.

    Below ``least`` and above ``most`` bytes none is looked for. ``known`` is a proposal for tables of which these are
    an extension; the search starts a little below it.
    Bisection, where a success lowers the upper end to the peak found and a failure raises the lower end to the least
    peak that was rejected: both ends are peaks of labels, so they meet exactly.
    """
    best, low, high = known, max(least, tables.least_peak), most if known is None else known.peak_bytes
    step, failed = high / 128, known is None
    trial = high if known is None else max(high - step, low)
    while low < high:
        search = Search(tables, trial, front=1)
        found = search.run()
        if found is not None:
            best, high = found, found.peak_bytes
            step *= 4
        elif search.next_limit == INFINITE:
            return best
        else:
            low, failed = max(low, search.next_limit), True
        if failed and high - low <= tolerance * high:
            return best
        middle = low if high - low < 1.0 else (low + high) / 2
        trial = middle if failed else max(high - step, low)
    return best
