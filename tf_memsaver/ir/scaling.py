"""One training step at other batch sizes: what two captures tell of all.

The bytes of a tensor, and the work of an operation, are a constant and a multiple of the batch size. Two captures of a
model at different batch sizes differ in nothing else, as a rule; where they do, there is no such line.
"""

from __future__ import annotations

from dataclasses import replace

from tf_memsaver.ir.graph import Graph


class Scaling:
    """The line through two captures of the same step."""

    def __init__(self, small: Graph, large: Graph) -> None:
        """Take two captures at different batch sizes.

        Raises:
          ValueError: they differ in more than numbers.
        """
        if small.batch_size == large.batch_size or _shape_of(small) != _shape_of(large):
            raise ValueError(
                f"captures at {small.batch_size} and {large.batch_size} samples differ in more than numbers"
            )
        self._small, self._large = small, large

    def at(self, batch_size: int) -> Graph:
        """Return the step at a batch size, as the line has it."""
        small, large = self._small, self._large
        share = (batch_size - small.batch_size) / (large.batch_size - small.batch_size)

        def between(first: float, second: float) -> float:
            return max(0.0, first + share * (second - first))

        return replace(
            small,
            batch_size=batch_size,
            values=tuple(
                replace(a, nbytes=round(between(a.nbytes, b.nbytes)))
                for a, b in zip(small.values, large.values, strict=True)
            ),
            ops=tuple(
                replace(
                    a,
                    flops=round(between(a.flops, b.flops)),
                    bytes_moved=round(between(a.bytes_moved, b.bytes_moved)),
                    seconds=between(a.seconds, b.seconds),
                    workspace_bytes=round(between(a.workspace_bytes, b.workspace_bytes)),
                    racing_bytes=round(between(a.racing_bytes, b.racing_bytes)),
                    replaced_bytes=round(between(a.replaced_bytes, b.replaced_bytes)),
                )
                for a, b in zip(small.ops, large.ops, strict=True)
            ),
        )


def _shape_of(graph: Graph) -> tuple[object, ...]:
    """Return all of a graph but its numbers."""
    return (
        graph.device,
        [(value.kind, value.alias_of) for value in graph.values],
        [(op.type, op.phase, op.unit, op.inputs, op.outputs, op.overwrites, op.scaled, op.after) for op in graph.ops],
        [(unit.label, unit.kind, unit.pinned) for unit in graph.units],
        [(cut.position, cut.live) for cut in graph.cuts],
        graph.outputs,
        graph.joined,
    )
