"""What TensorFlow makes of the steps of ``fit``, and where a step computes otherwise than another one.

Equal numbers can be chance, and different ones do not say where they come from. Here the graphs of two steps are
compared, as they run: after TensorFlow's graph optimizer. What is written to each variable is an expression of
operations and constants; two steps leave the same bits if all expressions are equal, but for where a sum of three
terms begins and for what oneDNN joins. A power of two that stands at another factor is a difference here, though it
rounds nothing. Names, control dependencies, sizes and what changes nothing do not count.

Steps can be compared as a GPU runs them, on a machine without one: TensorFlow's graph optimizer takes descriptions of
devices, too. For a GPU it brings what convolutions read and make into another layout.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.eager import context
from tensorflow.python.grappler import cluster, tf_optimizer

from tf_memsaver.compat.graphs import traced_graphs_go_to
from tf_memsaver.program.kept_objects import slots_of

_PASSED = frozenset("DebugGradientIdentity EnsureShape Identity PreventGradient Reshape Snapshot StopGradient".split())
"""Operations that hand on the numbers of their first input."""

_LEFT_OUT = tuple("_ Index Tshape container frame_name output_shapes parallel_iterations shape shared_name".split())
"""How the names of attributes begin that do not matter for what an operation computes."""

_OF_LOOP = "NextIteration"
"""Closes the circle of a loop: what is made inside one is not compared."""

_GATE = "memsaver_gate"
"""What is in the name of a zero by which a replay waits: it is taken from what has to wait."""

_VIEW = re.compile(r"/arrived(_\d+)?/BroadcastTo(_\d+)?$")
"""Names of gradients in the shape that they have."""

_SWAPPED = frozenset("Add AddN AddV2 Equal Maximum Minimum Mul NotEqual".split())
"""Operations whose result is the same if two inputs are swapped."""

_SIZES = frozenset(
    """BroadcastGradientArgs ConcatOffset DataFormatDimMap DataFormatVecPermute InvertPermutation Rank Shape ShapeN
    Size""".split()
)
_INTEGERS = (tf.int32.as_datatype_enum, tf.int64.as_datatype_enum)
_OF_SIZES = frozenset(
    "Cast ConcatV2 Fill FloorDiv GatherV2 Maximum Mul Pack Prod Range Reshape Slice StridedSlice Sub".split()
)
"""Operations that compute with sizes where they compute with integers."""

_ARGUMENT = "_user_specified_name"
"""The attribute that names an argument of a function, by a number if it is captured."""

_OTHER_LAYOUT = "LayoutOptimizer"
"""What is in the names of transpositions by which graph optimisation changes a layout."""

_REDUCTIONS = frozenset("All Any Max Mean Min Prod Sum".split())
"""Operations whose second input says over which dimensions they go: for these a layout counts."""

_noted: list[list[Any]] = []
"""Where graphs are noted that are traced now, if anywhere."""

Output = tuple[str, int]
"""A node and the place of its output."""


class Difference(NamedTuple):
    """Two operations that the same is expected of, as text: ``Mul<name>(Add<name>(...), #digest)``."""

    plain: str
    found: str


def step_graph(model: Any, run: Callable[[], Any], *, on_gpu: bool = False) -> Expressions:
    """Return the largest graph that ``run`` executes, after graph optimisation; variables are those of a model.

    With ``on_gpu`` it is optimized as for a GPU, whatever is there.
    """
    traced_graphs_go_to(_note)
    traced: list[Any] = []
    _noted.append(traced)
    try:
        graphs = graphs_run(run)
    finally:
        _noted.remove(traced)
    written = [*model.variables, *slots_of(model), *model.metrics_variables]
    paths = {id(variable.value.handle): variable.path for variable in written}
    # Functions inside, which are traced to their ends before, have the same names for other variables.
    arguments = {
        inside.op.get_attr(_ARGUMENT).decode(): _label(outside, paths)
        for outside, inside in max(reversed(traced), key=lambda graph: _count(graph, paths)).captures
        if _ARGUMENT in inside.op.node_def.attr
    }
    largest = max(graphs, key=lambda each: len(each.post_optimization_graph.node))
    graph = _as_on_gpu(largest.pre_optimization_graph) if on_gpu else largest.post_optimization_graph
    return Expressions(graph, arguments)


def graphs_run(run: Callable[[], Any]) -> list[Any]:
    """Return the graphs of functions that ``run`` executes, each before and after graph optimisation."""
    running = context.context()
    running.enable_run_metadata()
    try:
        # What ended after an earlier call had read its graphs is still there.
        running.export_run_metadata()
        run()
        return list(running.export_run_metadata().function_graphs)
    finally:
        running.disable_run_metadata()


def _count(graph: Any, paths: dict[int, str]) -> int:
    """Return how many of a model's variables a graph captures: another one may be traced after that of the step."""
    return sum(id(outside) in paths for outside, _ in graph.captures)


def _label(captured: Any, paths: dict[int, str]) -> str:
    """Return what a graph captured, as text: the path of a variable, or the shape of a tensor and its numbers."""
    if id(captured) in paths or captured.dtype in (tf.resource, tf.variant):
        return paths.get(id(captured), "a resource")
    return f"{captured.shape} {hashlib.sha256(captured.numpy().tobytes()).hexdigest()}"


def _as_on_gpu(graph: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """Return a graph as TensorFlow's graph optimizer would leave it for a data-centre GPU."""
    kinds = {"CPU": {}, "GPU": {"vendor": "NVIDIA", "environment": {"architecture": "9.0"}}}
    place = "/job:localhost/replica:0/task:0/device:{}:0".format
    devices = [
        device_properties_pb2.NamedDevice(
            name=place(kind), properties=device_properties_pb2.DeviceProperties(type=kind, num_cores=8, **more)
        )
        for kind, more in kinds.items()
    ]
    placed = tf.compat.v1.GraphDef()
    placed.CopyFrom(graph)
    for nodes in (placed.node, *(function.node_def for function in placed.library.function)):
        for node in nodes:
            node.device = place("GPU")
    asked = meta_graph_pb2.MetaGraphDef(graph_def=placed)
    kept = [node.name for node in placed.node if node.op == "_Retval" or node.op.startswith("Assign")]
    asked.collection_def["train_op"].node_list.value.extend(kept)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    return tf_optimizer.OptimizeGraph(config, asked, verbose=False, cluster=cluster.Cluster(devices=devices))


def _note(graph: Any, _run: list[Any]) -> None:
    for graphs in _noted:
        graphs.append(graph)


class Expressions:
    """The operations of a graph, as expressions of variables, constants and what is fed."""

    def __init__(self, graph: tf.compat.v1.GraphDef, variables: dict[str, str]) -> None:
        """Take a graph after graph optimisation, and the paths of variables by the arguments that hold them."""
        self._nodes = {node.name: node for node in graph.node}
        self._variables = variables
        self._digests: dict[Output, str] = {}

    def node(self, output: Output) -> Any:
        """Return the node of an output."""
        return self._nodes[output[0]]

    def kind(self, output: Output) -> str:
        """Return the type of the node of an output, of two equal ones always the same."""
        return str(self.node(output).op).replace("AddV2", "Add")

    def inputs(self, output: Output) -> list[Output]:
        """Return what the node of an output reads, without what only changes its name or when it is read."""
        return [self._source(each) for each in self._read(self.node(output))]

    def assigned(self) -> dict[str, list[Output]]:
        """Return what is written to each variable, by its path."""
        found: dict[str, list[Output]] = {}
        for node in self._nodes.values():
            if node.op.startswith("Assign") and node.op.endswith("VariableOp"):
                handle, value = self._read(node)
                found.setdefault(self._argument(self.node(self._source(handle))), []).append(self._source(value))
        return found

    def attributes(self, output: Output) -> list[Any]:
        """Return the attributes of the node of an output that matter for what it computes."""
        attributes = sorted(self.node(output).attr.items())
        found: list[Any] = [
            (name, value.SerializeToString(deterministic=True))
            for name, value in attributes
            if not name.startswith(_LEFT_OUT)
        ]
        return [*found, *self._dimensions(output)]

    def _dimensions(self, output: Output) -> list[Any]:
        """Return the dimensions that a reduction goes over, if they are known."""
        node = self.node(output)
        if node.op not in _REDUCTIONS:
            return []
        over = self.node(self._read(node)[1])
        return sorted(tf.make_ndarray(over.attr["value"].tensor).ravel().tolist()) if over.op == "Const" else []

    def digest(self, output: Output) -> str:
        """Return what is equal for equal expressions."""
        pending = [self._source(output)]
        while pending:
            current = pending[-1]
            missing = (
                [] if self._is_leaf(current) else [each for each in self.inputs(current) if each not in self._digests]
            )
            if not missing or current in self._digests:
                self._digests.setdefault(current, self._digest(current))
                pending.pop()
            else:
                pending += missing
        return self._digests[self._source(output)]

    def text(self, output: Output, depth: int = 3) -> str:
        """Return an expression as text, down to a depth."""
        node = self.node(output)
        if self._is_leaf(output):
            return self._leaf(output)
        if not depth:
            return f"#{self.digest(output)[:6]}"
        return f"{node.op}<{node.name}>({', '.join(self.text(each, depth - 1) for each in self.inputs(output))})"

    def _digest(self, output: Output) -> str:
        if self._is_leaf(output):
            key: Any = self._leaf(output)
        else:
            read = [self._digests[each] for each in self.inputs(output)]
            if len(read) == 2 and self.node(output).op in _SWAPPED:
                read.sort()
            key = (self.kind(output), output[1], self.attributes(output), read)
        return hashlib.sha256(repr(key).encode()).hexdigest()

    def _is_leaf(self, output: Output) -> bool:
        node = self.node(output)
        return node.op in ("Const", "_Arg", "_DeviceArg", _OF_LOOP) or self._is_size(node)

    def _leaf(self, output: Output) -> str:
        node = self.node(output)
        if self._is_size(node):
            return "size"
        if node.op == _OF_LOOP:
            return "what an iteration has made"
        if node.op != "Const":
            return self._argument(node)
        value = tf.make_ndarray(node.attr["value"].tensor)
        return f"{value.dtype}:{value.ravel().tolist() if value.size < 4 else value.tobytes().hex()}"

    def _is_size(self, node: Any) -> bool:
        if node.op in _SIZES:
            return True
        if node.op == "Const":
            return bool(node.attr["dtype"].type in _INTEGERS)
        return bool(node.op in _OF_SIZES and node.attr["DstT" if node.op == "Cast" else "T"].type in _INTEGERS)

    def _argument(self, node: Any) -> str:
        name = node.attr[_ARGUMENT].s.decode()
        return self._variables.get(name, name or node.name)

    def _read(self, node: Any) -> list[Output]:
        found = []
        for each in node.input:
            if not each.startswith("^"):
                name, _, place = each.partition(":")
                found.append((name, int(place or 0)))
        return found

    def _source(self, output: Output) -> Output:
        """Return what the numbers of an output are, before operations handed them on."""
        while True:
            node = self.node(output)
            if node.op == "IdentityN":
                output = self._read(node)[output[1]]
            elif self._hands_on(node):
                output = self._read(node)[0]
            else:
                return output

    def _hands_on(self, node: Any) -> bool:
        if node.op == "Transpose" and _OTHER_LAYOUT in node.name:
            return True
        if node.op == "Sub":
            zero = self.node(self._read(node)[1])
            zero = self.node(self._read(zero)[0]) if zero.op == "Cast" else zero
            return _GATE in zero.name
        if node.op == "BroadcastTo":
            return _VIEW.search(node.name) is not None
        if node.op == "Sum":
            # The gradient of an operand, which hardly ever had another shape: nothing is summed up.
            return bool(self.node(self._read(node)[1]).op == "BroadcastGradientArgs")
        return node.op in _PASSED and not self._is_size(node)


def differences(plain: Expressions, found: Expressions) -> list[Difference]:
    """Return where the values that two steps write to variables begin to differ, in the order of the variables."""
    expected, written = plain.assigned(), found.assigned()
    made = [
        Difference(f"{name} is written {len(values)} times", f"{len(written.get(name, []))} times")
        for name, values in expected.items()
        if len(values) != len(written.get(name, []))
    ]
    seen = set[tuple[Output, Output]]()
    for name, values in expected.items():
        for pair in zip(values, written.get(name, []), strict=False):
            made += _first_differences(plain, found, pair, seen)
    return made


def _first_differences(
    plain: Expressions, found: Expressions, pair: tuple[Output, Output], seen: set[tuple[Output, Output]]
) -> Iterator[Difference]:
    pending = [pair]
    while pending:
        first, second = pending.pop()
        if (first, second) in seen or plain.digest(first) == found.digest(second):
            continue
        seen.add((first, second))
        ours, theirs = plain.inputs(first), found.inputs(second)
        alike = plain.kind(first) == found.kind(second) and plain.attributes(first) == found.attributes(second)
        if len(ours) == len(theirs) == 2 and plain.node(first).op in _SWAPPED:
            crossed = theirs[::-1]
            same = any(plain.digest(a) == found.digest(b) for a, b in zip(ours, crossed, strict=True))
            kinds, straight, swapped = [plain.kind(a) for a in ours], map(found.kind, theirs), map(found.kind, crossed)
            theirs = crossed if same or (kinds != list(straight) and kinds == list(swapped)) else theirs
        unlike = [(a, b) for a, b in zip(ours, theirs, strict=False) if plain.digest(a) != found.digest(b)]
        if alike and len(ours) == len(theirs) and unlike:
            pending += unlike
        else:
            yield Difference(plain.text(first), found.text(second))
