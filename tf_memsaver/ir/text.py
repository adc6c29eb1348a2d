"""A Graph as line-based text and back: for golden files, and for graphs that a person reads or writes.

One line for the graph, then one for each opened layer, unit, value, op and cut, and one for the outputs. Indices are
implied by the order and written only for the reader; fields at their default are left out; ``#`` starts a comment::

    graph "chain" batch=2 device=CPU
    unit 0 "dense" kind="Dense" signature="Dense(4)"
    value 0 "kernel" parameter 64
    value 1 "dense/MatMul:0" activation 128
    value 2 "dense/Reshape:0" activation 0 view_of=1
    op 0 "dense/MatMul" MatMul forward unit=0 reads=0 writes=1 seconds=1e-05
    cut 1 "dense" live=1
    outputs 1

``parse(dump(graph)) == graph`` for every graph, and equal graphs have equal text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from tf_memsaver.ir.graph import Cut, Graph, MemoryKind, Op, Phase, Unit, Value

_TOKEN = re.compile(r'\s*([a-z_]+=)?("(?:[^"\\]|\\.)*"|[^\s"]+)')
_INTS = ("flops", "bytes_moved", "workspace_bytes", "racing_bytes", "replaced_bytes", "tape")
_LISTS = {"reads": "inputs", "writes": "outputs", "overwrites": "overwrites", "scaled": "scaled", "after": "after"}


def dump(graph: Graph) -> str:
    """Return the graph as text that ``parse`` reads back to an equal graph."""
    head = f"graph {_quoted(graph.name)} batch={graph.batch_size} device={graph.device}"
    note = f" note={_quoted(graph.note)}" if graph.note else ""
    shapes = ",".join("x".join(map(str, shape)) for shape in graph.data_shapes)
    told = f" data_shapes={shapes}" if shapes else ""
    lines = [head + _list(" joined", graph.joined) + note + told]
    lines += [f"opened {_quoted(layer)}" for layer in graph.opened]
    for unit in graph.units:
        line = f"unit {unit.index} {_quoted(unit.label)} kind={_quoted(unit.kind)} signature={_quoted(unit.signature)}"
        lines.append(line + (f" pinned={_quoted(unit.pinned)}" if unit.pinned else ""))
    for value in graph.values:
        line = f"value {value.index} {_quoted(value.name)} {value.kind.value} {value.nbytes}"
        line += "" if value.alias_of is None else f" view_of={value.alias_of}"
        lines.append(line + (f" parts={value.parts}" if value.parts != 1 else ""))
    lines += [_op_line(op) for op in graph.ops]
    lines += [f"cut {cut.position} {_quoted(cut.label)}{_list(' live', cut.live)}" for cut in graph.cuts]
    lines.append(" ".join(["outputs", *map(str, graph.outputs)]))
    return "\n".join(lines) + "\n"


def parse(text: str) -> Graph:
    """Return the graph that ``text`` describes.

    Raises:
      ValueError: a line is not of the form above; the message names the line.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        words, fields = _split(line, number)
        if words:
            try:
                reader.take(words, fields)
            except (ValueError, IndexError, KeyError, TypeError) as error:
                raise ValueError(f"line {number}: {type(error).__name__}: {error}: {line.strip()!r}") from error
    return reader.graph()


class _Reader:
    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._rows: dict[str, list[Any]] = {"unit": [], "value": [], "op": [], "cut": [], "opened": []}
        self._outputs: tuple[int, ...] = ()

    def take(self, words: list[str], fields: dict[str, str]) -> None:
        """Take in one line. Every field must be used, so that a misspelt one is an error."""
        word, *rest = words
        if word == "graph":
            (name,) = rest
            self._head = {
                "name": _unquoted(name),
                "batch_size": int(fields.pop("batch")),
                "device": fields.pop("device"),
                "joined": _indices(fields.pop("joined", "")),
                "note": _unquoted(fields.pop("note", '""')),
                "data_shapes": _shapes(fields.pop("data_shapes", "")),
            }
        elif word == "outputs":
            self._outputs = tuple(int(value) for value in rest)
        elif word in self._rows:
            rows = self._rows[word]
            if word not in ("cut", "opened") and int(rest[0]) != len(rows):
                raise ValueError(f"{word} {rest[0]} stands at place {len(rows)}")
            rows.append(_MAKERS[word](rest, fields))
        else:
            raise ValueError(f"a line starts with graph, opened, unit, value, op, cut or outputs, not '{word}'")
        if fields:
            raise ValueError(f"unknown fields {', '.join(fields)}")

    def graph(self) -> Graph:
        if not self._head:
            raise ValueError("the text has no line that starts with 'graph'")
        units, values, ops, cuts, opened = (tuple(self._rows[word]) for word in _MAKERS)
        return Graph(**self._head, units=units, values=values, ops=ops, cuts=cuts, outputs=self._outputs, opened=opened)


def _unit(rest: list[str], fields: dict[str, str]) -> Unit:
    index, label = rest
    texts = {name: _unquoted(fields.pop(name)) for name in ("kind", "signature", "pinned") if name in fields}
    return Unit(index=int(index), label=_unquoted(label), **texts)


def _value(rest: list[str], fields: dict[str, str]) -> Value:
    index, name, kind, nbytes = rest
    alias = fields.pop("view_of", None)
    return Value(
        index=int(index),
        name=_unquoted(name),
        kind=MemoryKind(kind),
        nbytes=int(nbytes),
        alias_of=None if alias is None else int(alias),
        parts=int(fields.pop("parts", 1)),
    )


def _op(rest: list[str], fields: dict[str, str]) -> Op:
    index, name, op_type, phase = rest
    unit = fields.pop("unit", None)
    more: dict[str, Any] = {name: int(fields.pop(name)) for name in _INTS if name in fields}
    if "seconds" in fields:
        more["seconds"] = float(fields.pop("seconds"))
    more |= {name: _indices(fields.pop(word, "")) for word, name in _LISTS.items()}
    return Op(
        index=int(index),
        name=_unquoted(name),
        type=op_type,
        phase=Phase(phase),
        unit=None if unit is None else int(unit),
        **more,
    )


def _cut(rest: list[str], fields: dict[str, str]) -> Cut:
    position, label = rest
    return Cut(position=int(position), label=_unquoted(label), live=_indices(fields.pop("live", "")))


def _opened(rest: list[str], fields: dict[str, str]) -> str:
    del fields
    (layer,) = rest
    return _unquoted(layer)


_MAKERS: dict[str, Callable[[list[str], dict[str, str]], Any]] = {
    "unit": _unit,
    "value": _value,
    "op": _op,
    "cut": _cut,
    "opened": _opened,
}


def _op_line(op: Op) -> str:
    line = f"op {op.index} {_quoted(op.name)} {op.type} {op.phase.value}"
    line += "" if op.unit is None else f" unit={op.unit}"
    line += "".join(_list(f" {word}", getattr(op, name)) for word, name in _LISTS.items())
    defaults = {field.name: field.default for field in dataclasses.fields(Op)}
    for name in (*_INTS, "seconds"):
        if getattr(op, name) != defaults[name]:
            line += f" {name}={getattr(op, name)!r}"
    return line


def _list(word: str, indices: tuple[int, ...]) -> str:
    return f"{word}={','.join(map(str, indices))}" if indices else ""


def _indices(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",")) if text else ()


def _shapes(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, shape.split("x"))) for shape in text.split(",")) if text else ()


def _quoted(text: str) -> str:
    return json.dumps(text)


def _unquoted(text: str) -> str:
    value = json.loads(text)
    if not isinstance(value, str):
        raise ValueError(f"{text} is not a quoted text")
    return value


def _split(line: str, number: int) -> tuple[list[str], dict[str, str]]:
    """Split a line into its plain words and its ``name=value`` fields."""
    words: list[str] = []
    fields: dict[str, str] = {}
    position, end = 0, len(line.rstrip())
    while position < end:
        match = _TOKEN.match(line, position)
        if match is None:
            raise ValueError(f"line {number}: cannot read {line[position:]!r}")
        if match[2].startswith("#") and not match[1]:
            break
        if match[1]:
            if match[1][:-1] in fields:
                raise ValueError(f"line {number}: field {match[1]} stands twice")
            fields[match[1][:-1]] = match[2]
        else:
            words.append(match[2])
        position = match.end()
    return words, fields
