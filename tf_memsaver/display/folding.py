"""Blocks: layers whose names say that they belong together, such as ``block_3_expand`` and ``block_3_project``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

_NUMBERED = re.compile(r"(?:^|(?<=[_./-]))([A-Za-z]+)_?\d+[a-z]?(?=[_./-])")
"""A word with a number, and more behind it."""

_KIND = re.compile(r"\dd$")

_BLOCKS = ("block", "layer", "stage", "cell", "unit", "group", "module", "encoder", "decoder")
"""Words that mean a block: of several words with numbers, the last of these counts."""

_FEWEST = 3
"""Fewer blocks than this tell nothing: then layers are shown."""


def block_of(label: str) -> str:
    """Return the block that a layer's name puts it in; the name itself where it tells of none.

    Of a path it is the first part with a number, or the first part. ``#2``, which a label has for a layer's second
    call, counts for nothing.
    """
    name = label.split("#")[0]
    *folders, last = name.split("/")
    for place, folder in enumerate(folders):
        block = _numbered_part(f"{folder}/")
        if block is not None:
            return "/".join([*folders[:place], block])
    block = _numbered_part(last)
    if block is not None:
        return "/".join([*folders, block])
    return folders[0] if folders else name


def folded(labels: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return blocks, in the order of their first layers: a name, and the places of the layers in it."""
    blocks: dict[Hashable, list[int]] = {}
    for place, label in enumerate(labels):
        blocks.setdefault(block_of(label), []).append(place)
    if len(blocks) < min(_FEWEST, len(labels)):
        return [(label, [place]) for place, label in enumerate(labels)]
    return [(str(name) if len(places) > 1 else labels[places[0]], places) for name, places in blocks.items()]


def _numbered_part(name: str) -> str | None:
    """Return a name up to and with the word that numbers its block, if it has one."""
    found = list(_NUMBERED.finditer(name))
    blocks = [match for match in found if match[1].lower().endswith(_BLOCKS)]
    # ``conv2d_3`` and ``max_pooling2d_1`` are kinds of layers.
    found = [match for match in found if not _KIND.search(match[0])]
    chosen = blocks[-1] if blocks else found[0] if found else None
    return None if chosen is None else name[: chosen.end()]
