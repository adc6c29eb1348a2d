"""Blocks: layers whose names say that they belong together, such as ``block_3_expand`` and ``block_3_project``."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBERED = re.compile(r"(?:^|(?<=[_./-]))([A-Za-z]+)_?\d+[a-z]?(?=[_.-]|$)")
"""A word with a number."""

_NUMBER = re.compile(r"_?\d+[a-z]?$")

_KIND = re.compile(r"\dd$")
"""The end of ``conv2d`` and ``max_pooling2d``, which are kinds of layers."""

_BLOCKS = ("block", "layer", "stage", "cell", "unit", "group", "module", "encoder", "decoder")
"""Words that mean a block: of several words with numbers, the last of these counts."""

_FEWEST = 3
"""Fewer blocks than this tell nothing: then layers are shown."""


def block_names(label: str) -> tuple[str, ...]:
    """Return the names of the blocks around a layer, the outermost first; none where its name tells of none.

    They are the folders of a path, and in each part of it what ends with a number: ``stage1`` and ``stage1.unit2`` of
    ``stage1.unit2.conv``. A number at the end of a layer's own name tells it from others. ``#2``, which a label has for
    a layer's second call, counts for nothing.
    """
    *folders, last = label.split("#")[0].split("/")
    found, before = list[str](), ""
    for folder in folders:
        numbered = [*_numbered(folder), folder]
        found += [f"{before}{name}" for name in dict.fromkeys(numbered)]
        before += f"{folder}/"
    return (*found, *(f"{before}{name}" for name in _numbered(last) if re.search("[A-Za-z]", last[len(name) :])))


def block_of(label: str) -> str:
    """Return the one block that a layer is shown in; the name itself where it tells of none.

    That is the first one with a number, or the first. Where a part of a name has several numbers, it is the last that
    is said to be a block: ``conv2_block1`` of ``conv2_block1_1_conv``.
    """
    names = block_names(label)
    numbered = [name for name in names if _numbered(name)[-1:] == [name]]
    first = [name for name in numbered if name.count("/") == numbered[0].count("/")]
    blocks = [name for name in first if _says_block(_NUMBER.sub("", name))]
    return next(iter((*blocks[-1:], *first, *names)), label.split("#")[0])


def folded(labels: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return blocks, in the order of their first layers: a name, and the places of the layers in it."""
    blocks: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        blocks.setdefault(block_of(label), []).append(place)
    if len(blocks) < min(_FEWEST, len(labels)):
        return [(label, [place]) for place, label in enumerate(labels)]
    return [(name if len(places) > 1 else labels[places[0]], places) for name, places in blocks.items()]


def _numbered(name: str) -> list[str]:
    """Return what of a name ends with a word and its number, the shortest first."""
    found = [match for match in _NUMBERED.finditer(name) if _says_block(match[1]) or not _KIND.search(match[0])]
    return [name[: match.end()] for match in found]


def _says_block(words: str) -> bool:
    return words.lower().endswith(_BLOCKS)
