"""The names that operations have in the plain step, for runs that take place elsewhere and in another order.

Graph optimisation sorts the terms of a sum and the factors of a product by name, so that names are part of the result.
TensorFlow numbers what is called the same in the order in which it is made. Replays are made backwards, so their names
are settled in the first run, which goes forwards, and kept for them.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.unique_names import asked, nothing_asked
from tf_memsaver.parity.grappler import FIRST_RUN_MARK, REPLAY_IN_FUNCTION

_MARKS = re.compile(rf"({FIRST_RUN_MARK}(_\d+)?)+$")


def plain_name(name: str, graph: Any, forward_first: bool | None) -> str:
    """Return the name scope that sorts in a replay as that of the same operations does in the plain step.

    ``name`` is theirs in the first run, in ``graph`` (None if there was none).

    Where the backward pass is a function of its own, the plain step's forward and backward operations belong to two
    calls, whose names settle the order (``forward_first``). Replays belong to the backward call: a prefix puts them in
    front of ``gradients/``, or after it.
    """
    parts = [_MARKS.sub("", part) for part in name.split("/") if part]
    in_other_graph = graph is not None and graph is not tf.compat.v1.get_default_graph()
    prefix = [REPLAY_IN_FUNCTION[bool(forward_first)]] if in_other_graph else []
    return "".join(f"{part}/" for part in (*prefix, *parts))


class Kept:
    """The names that first runs have taken for their replays, in one forward pass of a model."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def keep(self, graph: Any, name: str) -> str:
        """Return the name that ``graph`` gives to something called ``name`` now, and keep it for a replay."""
        kept = str(graph.unique_name(name))
        self._names.add(kept)
        return kept

    def take(self, graph: Any, name: str) -> str:
        """Return ``name`` if it was kept, else, as for a second replay, what ``graph`` makes of it."""
        if name in self._names:
            self._names.remove(name)
            return name
        return str(graph.unique_name(name))


class Names:
    """Gives layer calls the names of the plain step: here those of calls that are run as they stand.

    A *home* is the scope in which the plain step runs a layer: the model's, or that of a model inside it.
    """

    def __init__(self, root: str, kept: Kept, homes: dict[int, str]) -> None:
        """Prepare for a model in the scope ``root``; ``homes`` are those that were entered, by the entering call."""
        self._root, self._kept, self._homes = root, kept, homes

    @classmethod
    def of_model(cls, settled: bool = True) -> Names:
        """Return the names for a forward pass that begins here; those that the graph gives if they are not settled."""
        return (cls if settled else _GivenNames)(tf.get_current_name_scope(), Kept(), {})

    @property
    def kept(self) -> Kept:
        """The names that are kept for replays."""
        return self._kept

    @property
    def scope(self) -> str:
        """What stands for the model's scope here."""
        return self._root

    @property
    def mark(self) -> str:
        """What names here end with."""
        return ""

    def of_operation(self, name: str) -> str:
        """Return the name for an operation that brings its name in the plain step along."""
        return f"{name}{self.mark}"

    def plain(self, home: str, wanted: str) -> str:
        """Return the plain step's name, with its scope, of the next thing called ``wanted`` in ``home``."""
        return self._kept.keep(tf.compat.v1.get_default_graph(), _joined(home, wanted))

    @contextlib.contextmanager
    def entered(self, call: int, home: int | None, name: str) -> Iterator[None]:
        """Open a home: that of a model inside the model, which the call of that number enters, and run in it."""
        if not tf.executing_eagerly():
            with nothing_asked(tf.compat.v1.get_default_graph()):
                # Keras opens the scope of a layer twice: to build it, and to call it.
                for _ in range(2):
                    self._homes[call] = self.plain(self._home(home), name)
                    self._taken(self._homes[call])
        with self.inside(call):
            yield

    @contextlib.contextmanager
    def inside(self, home: int | None) -> Iterator[None]:
        """Run a layer call in its home (None is the model's), and settle all names that are asked for there."""
        if tf.executing_eagerly():
            yield
            return
        plain = self._home(home)
        scope = self._here(plain)

        def settled(name: str) -> str:
            return self._taken(self.plain(plain, name))

        with tf.name_scope(f"{scope}/" if scope else ""), asked(tf.compat.v1.get_default_graph(), scope, settled):
            yield

    def first_run(self) -> Names:
        """Return the names for the first run of a segment among these calls."""
        return FirstRunNames(self)

    def replay(self, scope: str) -> Names:
        """Return the names for a replay of what ran with these, where ``scope`` stands for the model's."""
        raise NotImplementedError(f"only first runs are replayed, not what stands in {scope}")

    def _home(self, home: int | None) -> str:
        # None was entered if the first run was eager and the replay is not.
        return self._root if home is None else self._homes.get(home, self._root)

    def _here(self, name: str) -> str:
        """Return a plain name, in the scope that stands for the model's here."""
        return _joined(self.scope, name.removeprefix(self._root).lstrip("/"))

    def _taken(self, name: str) -> str:
        return self._kept.take(tf.compat.v1.get_default_graph(), f"{self._here(name)}{self.mark}")


class _GivenNames(Names):
    """Leaves all names to the graph, which numbers what is called the same."""

    @contextlib.contextmanager
    def entered(self, call: int, home: int | None, name: str) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def inside(self, home: int | None) -> Iterator[None]:
        yield

    def first_run(self) -> Names:
        return self

    def replay(self, scope: str) -> Names:
        del scope
        return self


class FirstRunNames(Names):
    """Settles the names of a segment's calls, and gives its first run others."""

    def __init__(self, outer: Names) -> None:
        """Prepare for a segment among calls that get their names from ``outer``."""
        super().__init__(outer._root, outer._kept, outer._homes)
        self._outer = outer
        self._settled: list[tuple[tuple[str, str], str]] = []

    @property
    def scope(self) -> str:
        """What stands for the model's scope here."""
        return self._outer.scope

    @property
    def mark(self) -> str:
        """What names here end with."""
        return f"{self._outer.mark}{FIRST_RUN_MARK}"

    def plain(self, home: str, wanted: str) -> str:
        """Return what ``outer`` does, and note it for the replay."""
        name = self._outer.plain(home, wanted)
        self._settled.append(((home, wanted), name))
        return name

    def replay(self, scope: str) -> Names:
        """Return the names for a replay, where ``scope`` stands for the model's."""
        return ReplayNames(self, self._settled, scope)


class ReplayNames(Names):
    """Gives a replay the names that were settled in the first run."""

    def __init__(self, first: Names, settled: Iterable[tuple[tuple[str, str], str]], scope: str) -> None:
        """Prepare for one replay."""
        super().__init__(first._root, first._kept, dict(first._homes))
        self._scope = scope
        self._settled: dict[tuple[str, str], deque[str]] = {}
        for question, name in settled:
            self._settled.setdefault(question, deque()).append(name)

    @property
    def scope(self) -> str:
        """What stands for the model's scope here."""
        return self._scope

    def plain(self, home: str, wanted: str) -> str:
        """Return the name that was settled; a new one where the first run asked for none."""
        settled = self._settled.get((home, wanted))
        return settled.popleft() if settled else super().plain(home, wanted)


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)
