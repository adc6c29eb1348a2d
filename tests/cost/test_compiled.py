"""A step as XLA compiles it: what is fused takes no memory, and what XLA expands on CPUs does."""

from __future__ import annotations

import pytest

from tf_memsaver.cost.compiled import as_compiled, most_scratch
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.text import parse

STEP = """
graph "net" batch=2 device=CPU
unit 0 "conv" kind="Conv2D" signature="conv"
unit 1 "act" kind="Act" signature="act"
unit 2 "next" kind="Conv2D" signature="next"
value 0 "x" input 100
value 1 "w" parameter 10
value 2 "conv:0" activation 100
value 3 "scaled:0" activation 100
value 4 "act:0" activation 100
value 5 "next:0" activation 100
value 6 "dnext:0" gradient 100
value 7 "dw:0" weight_gradient 10
value 8 "dact:0" gradient 100
value 9 "dconv:0" gradient 100
value 10 "dw1:0" weight_gradient 10
value 11 "all:0" gradient 0 view_of=7
value 12 "all:1" gradient 0 view_of=10
value 13 "scaled_dw:0" gradient 10
value 14 "scaled_dw1:0" gradient 10
op 0 "conv" Conv2D forward unit=0 reads=0,1 writes=2
op 1 "scaled" Mul forward unit=1 reads=2,1 writes=3
op 2 "act" ACT forward unit=1 reads=3 writes=4
op 3 "next" Conv2D forward unit=2 reads=4,1 writes=5
op 4 "dnext" Neg backward reads=5 writes=6
op 5 "dw" READS backward unit=2 reads=4,6 writes=7
op 6 "dact" Conv2DBackpropInput backward unit=2 reads=1,6 writes=8
op 7 "dconv" ReluGrad backward unit=1 reads=8,4 writes=9
op 8 "dw1" Conv2DBackpropFilter backward unit=0 reads=0,9 writes=10 workspace_bytes=7
op 9 "all" IdentityN update reads=7,10 writes=11,12
op 10 "first" Mul update reads=11 writes=13
op 11 "second" Mul update reads=12 writes=14
outputs 2
"""


def compiled(act: str = "Relu", reads: str = "Conv2DBackpropFilter", outputs: str = "5") -> Graph:
    text = STEP.replace("ACT", act).replace("READS", reads).replace("outputs 2", f"outputs {outputs}")
    return as_compiled(parse(text))


def read_by(graph: Graph, name: str) -> set[str]:
    return {graph.values[v].name for op in graph.ops if op.name == name for v in op.inputs}


def test_a_chain_takes_memory_in_front_of_a_convolution_alone() -> None:
    graph = compiled()
    assert graph.values[3].nbytes == 0, "computed inside of the activation"
    assert graph.values[4].nbytes == 100, "read by the convolution as it stands"
    assert next(op for op in graph.ops if op.name == "dw1").workspace_bytes == 0, "TensorFlow's kernel is not run"


def test_a_backward_pass_keeps_what_a_chain_begins_with() -> None:
    graph = compiled()
    assert "conv:0" in read_by(graph, "dw") and "act:0" not in read_by(graph, "dw")
    assert next(op for op in graph.ops if op.name == "dw").workspace_bytes >= 100, "copied into another layout"


@pytest.mark.parametrize(("act", "reads"), [("Exp", "Conv2DBackpropFilter"), ("Relu", "MatMul")])
def test_what_is_dear_or_read_as_it_stands_is_kept(act: str, reads: str) -> None:
    assert "act:0" in read_by(compiled(act, reads), "dw")


def test_an_update_takes_nothing() -> None:
    graph = compiled()
    assert graph.values[13].nbytes == graph.values[14].nbytes == 0


def test_what_outlives_the_step_is_there() -> None:
    assert compiled(outputs="3").values[3].nbytes == 100


@pytest.mark.parametrize(("device", "scratch"), [("CPU", 4 * 400 + 5 * 100), ("GPU", 0)])
def test_a_pooling_is_expanded_on_cpus(device: str, scratch: int) -> None:
    text = f"""
graph "net" batch=1 device={device}
unit 0 "pool" kind="MaxPooling2D" signature="pool"
value 0 "x" input 400
value 1 "y" activation 100
value 2 "dy" gradient 100
value 3 "dx" gradient 400
op 0 "y" MaxPool forward unit=0 reads=0 writes=1
op 1 "dy" LossGrad backward reads=1 writes=2
op 2 "dx" MaxPoolGrad backward unit=0 reads=0,1,2 writes=3 workspace_bytes=900
outputs 3
"""
    graph = parse(text)
    assert as_compiled(graph).ops[-1].workspace_bytes == scratch
    assert most_scratch(graph) == (("dx", scratch) if scratch else ("", 0))


def test_a_depthwise_filter_gradient_is_that_of_all_pairs_of_channels() -> None:
    # A window of 3×3 over 8 channels, 5×5 positions, float32: the filter takes 288 bytes.
    text = f"""
graph "net" batch=1 device=CPU
unit 0 "depthwise" kind="DepthwiseConv2D" signature="depthwise"
value 0 "x" input 800
value 1 "y" activation 800
value 2 "dy" gradient 800
value 3 "dw" weight_gradient 288
op 0 "y" DepthwiseConv2dNative forward unit=0 reads=0 writes=1
op 1 "dy" LossGrad backward reads=1 writes=2
op 2 "dw" DepthwiseConv2dNativeBackpropFilter backward unit=0 reads=0,2 writes=3 flops={2 * 200 * 9}
outputs 3
"""
    assert as_compiled(parse(text)).ops[-1].workspace_bytes == 2 * 8 * 288
