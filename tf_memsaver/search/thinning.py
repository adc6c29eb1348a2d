"""Some of the positions of a large graph, for searches that look at all segments between them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tf_memsaver.search.tables import Tables


def thinned(tables: Tables, wanted: Collection[int], most: int) -> list[int]:
    """Return the indices of about ``most`` positions and of the ``wanted`` ones, or of all where there are no more.

    Of each of equal shares of the activations that the backward pass reads, the position that the fewest bytes cross.
    """
    positions = tables.positions
    count = len(positions) - 1
    if len(positions) <= most:
        return list(range(count + 1))
    grid = tables.grid(np.arange(1), np.arange(1, count + 1))
    stored = grid.stored_bytes[0, 0] + 1e-9 * np.arange(count)
    share = np.concatenate([[0.0], stored]) / stored[-1] * (most - 2)
    crossing = tables.crossing.nbytes.sum(axis=1)
    chosen: dict[int, int] = {}
    for index in range(1, count):
        current = chosen.get(int(share[index]))
        if current is None or crossing[index] < crossing[current]:
            chosen[int(share[index])] = index
    fixed = [index for index in range(count + 1) if positions[index] in wanted]
    return sorted({0, count, *chosen.values(), *fixed})
