"""What segments read and make, and what runs each mode: the facts that ``rewrite`` goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tf_memsaver.errors import PlanMismatchError
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.program.calls import CallSequence, Reader
from tf_memsaver.program.layer_calls import list_layer_calls
from tf_memsaver.rewrite import segments
from tf_memsaver.rewrite.blocks import Block, blocks_of
from tf_memsaver.rewrite.segments import RUNNERS, SegmentedForward

STORE, RECOMPUTE = SegmentMode.STORE, SegmentMode.RECOMPUTE


def cut(*stops: int, mode: SegmentMode = RECOMPUTE) -> list[Segment]:
    """Segments that end at these positions; the last one stores."""
    starts = (0, *stops[:-1])
    return [
        Segment(start=start, stop=stop, mode=mode if stop < stops[-1] else STORE)
        for start, stop in zip(starts, stops, strict=True)
    ]


def model() -> Any:
    """A tensor that three layers read, one of them twice; a shared layer; a frozen BatchNorm."""
    inputs = keras.Input((6,), name="in")
    x = layers.Dense(6, activation="tanh", name="stem")(inputs)
    shared = layers.Dense(6, name="shared")
    y = layers.BatchNormalization(name="norm", trainable=False)(shared(x))
    z = layers.Activation("relu", name="relu")(y)
    y = layers.Add(name="add")([shared(z), x])
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Multiply(name="times")([y, x])))


class Facts:
    """Blocks of the model, with the labels of calls for the slots that they make."""

    def __init__(self, *stops: int) -> None:
        self.sequence: CallSequence = list_layer_calls(model())
        self.labels = [call.label for call in self.sequence.calls]
        assert self.labels == ["stem", "shared", "norm", "relu", "shared#2", "add", "times", "head"]
        self.makers = {slot: call.label for call in self.sequence.calls for slot in call.outputs}
        self.blocks = blocks_of(self.sequence, cut(*stops))

    def names(self, slots: Sequence[int] | frozenset[int]) -> list[str]:
        return sorted(self.makers.get(slot, "in") for slot in slots)


def test_what_a_segment_reads_and_makes_and_shares_with_others() -> None:
    facts = Facts(1, 4, 8)
    stem, middle, rest = facts.blocks
    assert (facts.names(stem.inputs), facts.names(stem.outputs)) == (["in"], ["stem"])
    # Others read the stem after the segment in the middle, so that its gradient is a sum outside.
    assert (facts.names(middle.inputs), facts.names(middle.outputs)) == (["stem"], ["relu"])
    assert facts.names(middle.read_elsewhere) == ["stem"] and middle.released == ()
    assert facts.names(rest.inputs) == ["relu", "stem"] == facts.names(rest.released)
    assert (facts.names(stem.released), facts.names(rest.outputs)) == (["in"], ["head"])


def test_slots_are_released_after_the_last_call_that_reads_them() -> None:
    facts = Facts(8)
    released = {call.label: facts.names(slots) for call, slots in facts.blocks[0].calls}
    assert released == {
        "stem": ["in"],
        "shared": [],
        "norm": ["shared"],
        "relu": ["norm"],
        "shared#2": ["relu"],
        "add": ["shared#2"],
        "times": ["add", "stem"],
        "head": ["times"],
    }


def test_variables_of_a_segment_and_its_own() -> None:
    _, middle, rest = Facts(1, 4, 8).blocks
    paths = [variable.path for variable in middle.variables]
    assert paths[:2] == ["shared/kernel", "shared/bias"] and len(paths) == len(set(paths)) == 6
    own = [v.path for v in middle.variables if id(v) in middle.own_variables]
    assert own == paths[2:]
    assert [v.path for v in rest.variables if id(v) in rest.own_variables] == ["head/kernel", "head/bias"]


def test_how_gradients_arrive_from_layers() -> None:
    facts = Facts(1, 3, 8)
    stem, middle, _ = facts.blocks
    (of_stem,) = stem.outputs
    # Three layers send it a gradient: a sum.
    assert stem.gradients.names == {of_stem: "AddN"}
    (of_norm,) = middle.outputs
    assert middle.gradients.names[of_norm] == "gradients/relu_grad"
    # What happens inside a layer is not known.
    assert middle.gradients.terms == set(middle.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A call of one operation."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operation: Any = None
    signature = pinned = ""

    @property
    def label(self) -> str:
        return f"{self.kind}{self.outputs[0]}"

    def readers(self, slot: int) -> list[Reader]:
        passes_to = self.outputs[0] if self.kind == "AddV2" else None
        return [Reader(self.label, self.kind, passes_to) for read in self.inputs if read == slot]

    def run(self, slots: Sequence[Any], training: bool | None, names: Any) -> list[Any]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("readers", "name", "is_term", "is_assigned"),
    [
        ([("Tanh", (1,))], "gradients/Tanh2_grad", False, False),
        ([("MatMul", (1,))], "gradients/MatMul2_grad", True, False),
        ([("Tanh", (1,)), ("Mul", (1, 2))], "AddN", False, False),
        ([("Tanh", (1,)), ("MatMul", (1, 2))], "AddN", True, False),
        # The gradient of an addition is that of what reads the sum.
        ([("AddV2", (0, 1)), ("Exp", (2,))], "gradients/Exp3_grad", True, False),
        ([("AssignAddVariableOp", (1,))], "gradients/AssignAddVariableOp2_grad", True, True),
    ],
)
def test_how_gradients_arrive_from_operations(
    readers: list[tuple[str, tuple[int, ...]]], name: str, is_term: bool, is_assigned: bool
) -> None:
    chain = [("Conv2D", (0,)), *readers, ("Sum", (len(readers) + 1,))]
    calls = tuple(Op(kind=kind, inputs=read, outputs=(place,)) for place, (kind, read) in enumerate(chain, 1))
    sequence = CallSequence(calls=calls, inputs=(0,), outputs=(len(calls),), slot_count=len(calls) + 1)
    block = blocks_of(sequence, cut(1, len(calls)))[0]
    assert block.gradients.names[1] == name
    assert (1 in block.gradients.terms, 1 in block.assigned) == (is_term, is_assigned)


def test_factors_of_one_product_are_terms() -> None:
    """A constant moves on to one of them, by their names (a T5's gate, behind which there is a Dropout)."""
    chain = [("Relu", (0,)), ("MatMul", (0,)), ("Neg", (0,)), ("Mul", (1, 2)), ("Mul", (3, 4))]
    calls = tuple(Op(kind=kind, inputs=read, outputs=(place,)) for place, (kind, read) in enumerate(chain, 1))
    sequence = CallSequence(calls=calls, inputs=(0,), outputs=(len(calls),), slot_count=len(calls) + 1)
    gradients = blocks_of(sequence, cut(3, len(calls)))[0].gradients
    assert gradients.terms == gradients.several == {1, 2}


@pytest.mark.parametrize("mode", [STORE, RECOMPUTE])
def test_an_output_of_the_model_is_made_in_a_store_segment(mode: SegmentMode) -> None:
    sequence = list_layer_calls(model())
    whole = [Segment(start=0, stop=8, mode=mode)]
    assert blocks_of(sequence, whole)[0].result_makers == ("head",)
    if mode is STORE:
        SegmentedForward(sequence, whole)
    else:
        with pytest.raises(PlanMismatchError, match="'head', which makes an output"):
            SegmentedForward(sequence, whole)


def test_a_mode_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def noting(block: Block, inside: segments.Runner) -> segments.Runner:
        made.append(f"{block.segment.start}:{block.segment.stop}")
        return inside

    monkeypatch.setattr(segments, "RUNNERS", {**RUNNERS, RECOMPUTE: noting})
    net = model()
    x = tf.constant(np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(4, 6))
    (result,) = SegmentedForward(list_layer_calls(net), cut(1, 4, 8))([x], training=True)
    assert made == ["0:1", "1:4"] and np.array_equal(result, net(x, training=True))


def test_children_run_inside_their_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noting(block: Block, inside: segments.Runner) -> segments.Runner:
        def run(*args: Any) -> None:
            order.append(f"{block.segment.start}:{block.segment.stop}")
            inside(*args)
            order.append("end")

        return run

    monkeypatch.setattr(segments, "RUNNERS", {STORE: noting, RECOMPUTE: noting})
    children = tuple(cut(2, 4))
    plan = [Segment(start=0, stop=4, mode=RECOMPUTE, children=children), Segment(start=4, stop=8, mode=STORE)]
    SegmentedForward(list_layer_calls(model()), plan)([tf.ones((4, 6))], training=False)
    assert order == ["0:4", "0:2", "end", "2:4", "end", "end", "4:8", "end"]
