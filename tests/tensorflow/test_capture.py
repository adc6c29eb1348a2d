"""The captured step: units by layer call, bytes, pins and cuts of real models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from tests.tensorflow.plans import labels
from tf_memsaver.capture import model_step
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.check.measure import measure
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.ir.graph import MemoryKind, Phase
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.schedule import scheduled
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.program.batch import synthetic_batch
from tools.shared.models import small as models


@pytest.mark.parametrize(
    "name", ["chain", "residual_net", "unet", "text_attention", "two_by_two", "transfer", "three_deep", "siamese"]
)
def test_units_are_the_layer_calls(name: str) -> None:
    model = getattr(models, name)()
    graph = capture_graph(model, batch_size=16)
    assert [unit.label for unit in graph.units] == labels(model)
    assert len(set(labels(model))) == len(graph.units)
    units = {op.unit for op in graph.ops if op.phase is Phase.FORWARD}
    assert units - {None} <= set(range(len(graph.units)))
    backward = {op.unit for op in graph.ops if op.phase is Phase.BACKWARD}
    assert len(backward) > len(graph.units) // 2
    assert graph.units[-1].pinned


def test_gradients_that_an_optimizer_accumulates_in_a_branch_are_part_of_the_step() -> None:
    bytes_of = []
    for steps in (None, 2):
        model = models.residual_net()
        model.compile(keras.optimizers.Adam(gradient_accumulation_steps=steps), "mse")
        graph = capture_graph(model, batch_size=64)
        bytes_of.append([op.workspace_bytes for op in graph.ops if op.phase is Phase.BACKWARD and op.inputs])
    assert bytes_of[0] and len(bytes_of[0]) == len(bytes_of[1])


def test_targets_of_a_dict_of_outputs_go_by_their_keys() -> None:
    x = inputs = keras.Input((4,))
    outputs = {"zeta": layers.Dense(3, name="a")(x), "alpha": layers.Dense(2, name="z")(x)}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"zeta": "sparse_categorical_crossentropy", "alpha": "mse"})
    x, y, _ = synthetic_batch(model, 5)
    found = {name: (tuple(target.shape), target.dtype.name) for name, target in y.items()}
    assert found == {"alpha": ((5, 2), "float32"), "zeta": ((5,), "int32")}
    model.fit(x, y, verbose=0)


def test_nested_models_are_flattened_and_calls_counted() -> None:
    assert [name for name in labels(models.three_deep()) if not name.endswith("/inputs")] == [
        "outer/middle/c",
        "outer/middle/innermost/a",
        "outer/middle/innermost/b",
        "outer/middle/d",
        "outer/e",
        "head",
    ]
    siamese = labels(models.siamese())
    assert "tower/d0" in siamese and "tower/d0#2" in siamese


def test_bytes_of_parameters_slots_and_inputs() -> None:
    model = models.chain(width=64, depth=3)
    weights = sum(tf.size(v.value).numpy() * 4 for v in model.variables)
    plain = capture_graph(model, batch_size=32)
    assert weights <= plain.bytes_of(MemoryKind.PARAMETER) <= weights + 256 * len(model.variables)
    assert plain.bytes_of(MemoryKind.OPTIMIZER) == 0
    assert plain.bytes_of(MemoryKind.INPUT) >= 32 * 64 * 4
    model.compile("adam", "mse")
    compiled = capture_graph(model, batch_size=32)
    assert 2 * weights <= compiled.bytes_of(MemoryKind.OPTIMIZER) <= 2 * weights + 512 * (len(model.variables) + 2)
    assert any(op.phase is Phase.UPDATE for op in compiled.ops)


def test_activations_grow_with_the_batch_and_parameters_do_not() -> None:
    model = models.unet()
    small, large = (capture_graph(model, batch_size=size) for size in (64, 128))
    assert small.bytes_of(MemoryKind.PARAMETER) == large.bytes_of(MemoryKind.PARAMETER)
    ratio = large.bytes_of(MemoryKind.ACTIVATION) / small.bytes_of(MemoryKind.ACTIVATION)
    assert 1.9 < ratio < 2.1
    assert small.signatures == large.signatures


def test_a_product_with_one_is_a_view_as_graph_optimisation_makes_it() -> None:
    inputs = keras.Input((64,))
    x = layers.Dense(64, activation="silu", name="silu")(inputs)
    graph = capture_graph(keras.Model(inputs, layers.Dense(1)(layers.ReLU()(x))), batch_size=256)
    made = [op for op in graph.ops if op.unit == 0 and op.phase is Phase.FORWARD and op.type == "Mul"]
    by_one, by_sigmoid = made
    assert graph.values[by_one.outputs[0]].alias_of is not None and by_one.seconds == 0
    assert graph.values[by_sigmoid.outputs[0]].alias_of is None and by_sigmoid.seconds > 0


def test_a_sum_that_only_another_sum_reads_is_part_of_it_as_graph_optimisation_makes_it() -> None:
    inputs = keras.Input((16, 64))
    shared = layers.Dense(64, activation="tanh")(inputs)
    branches = [layers.Dense(64)(layers.LayerNormalization()(shared)) for _ in range(3)]
    graph = capture_graph(keras.Model(inputs, layers.Add()(branches)), batch_size=256)
    sums = [op for op in graph.ops if op.type == "AddN" and op.phase is Phase.BACKWARD]
    assert max(len(op.inputs) for op in sums) == 9
    made = {value for op in sums for value in op.outputs}
    assert not any(made.intersection(op.inputs) for op in sums)


def skips(inputs: Any, dilation: int) -> Any:
    """The sum of what four causal convolutions in a row make."""
    x, total = inputs, None
    for _ in range(4):
        x = layers.Conv1D(16, 2, padding="causal", dilation_rate=dilation, activation="tanh")(x)
        total = x if total is None else layers.Add()([total, x])
    return total


@pytest.mark.parametrize(
    ("dilation", "fixed_batch", "terms"),
    [(1, True, [4]), (1, False, [4]), (2, True, [4]), (2, False, [2, 2, 2])],
)
def test_forward_sums_are_joined_where_graph_optimisation_knows_that_shapes_are_equal(
    dilation: int, fixed_batch: bool, terms: list[int]
) -> None:
    inputs = keras.Input((64, 4))
    model = keras.Model(inputs, layers.Conv1D(1, 1)(skips(inputs, dilation)))
    model.compile("sgd", "mse")
    given = tf.data.Dataset.from_tensors((tf.zeros((64, 64, 4)), tf.zeros((64, 64, 1)))).unbatch()
    graph = capture_graph(model, data=given.batch(32, drop_remainder=fixed_batch), granularity="layer")
    added = {unit.index for unit in graph.units if unit.kind == "Add"}
    assert [len(op.inputs) for op in graph.ops if op.phase is Phase.FORWARD and op.unit in added] == terms


def test_what_two_layers_compute_alike_is_there_once_as_graph_optimisation_makes_it() -> None:
    inputs = keras.Input((64, 16))
    x = layers.Dense(16, activation="tanh")(inputs)
    gates = [layers.Conv1D(16, 2, padding="causal", dilation_rate=2)(x) for _ in range(2)]
    other = layers.Conv1D(16, 3, padding="causal", dilation_rate=2)(x)
    graph = capture_graph(keras.Model(inputs, layers.Add()([*gates, other])), batch_size=32)
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    read = [op.inputs for op in forward if op.type == "SpaceToBatchND"]
    # Two of the three convolutions read one padded tensor; the third has another padding.
    assert len(read) == 2 and read[0] != read[1]
    assert [op.type for op in forward].count("Pad") == 2


def test_the_gradient_of_a_kernel_comes_before_that_of_its_input_as_in_an_ordered_step() -> None:
    graph = capture_graph(models.residual_net(), batch_size=64)
    place = {op.name: op.index for op in graph.ops}
    pairs = [(name, name.replace("Filter", "Input")) for name in place if name.endswith("Conv2DBackpropFilter")]
    both = [(place[first], place[second]) for first, second in pairs if second in place]
    assert len(both) == 3 and all(first < second for first, second in both)


class Transposing(keras.Model):
    """Products of three dimensions, and transpositions that move something or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Dense(64, activation="tanh"), layers.Dense(1)

    def call(self, x: Any) -> Any:
        x = tf.transpose(self.up(x), [1, 0, 2], name="moved")
        return self.down(tf.transpose(tf.expand_dims(x, 0), [1, 0, 2, 3], name="of_size_1"))


def test_a_transposition_that_moves_nothing_is_a_view_as_the_kernel_makes_it() -> None:
    data = tf.data.Dataset.from_tensors((tf.zeros((32, 16, 64)), tf.zeros((16, 1, 32, 1))))
    model = Transposing()
    model.compile("sgd", "mse")
    graph = capture_graph(model, data=data, granularity="layer")
    made = [graph.values[op.outputs[0]] for op in graph.ops if op.type == "Transpose"]
    moved = [value.name for value in made if value.alias_of is None]
    assert len(made) > len(moved) == 2 and all("/moved" in name for name in moved)


def test_what_updates_wait_for_grows_with_the_layers_and_not_with_their_square() -> None:
    model = keras.Sequential([keras.Input((64,)), *[layers.Dense(64) for _ in range(40)]])
    model.compile("adam", "mse")
    graph = capture_graph(model, batch_size=64)
    assert sum(len(op.after) for op in graph.ops) < 2 * len(graph.ops)


def test_capture_changes_nothing() -> None:
    model = models.residual_net()
    model.compile("adam", "mse")
    values = [v.numpy().tobytes() for v in model.variables]
    before = set(vars(model))
    nodes = [len(layer._inbound_nodes) for layer in model.layers]
    capture_graph(model, batch_size=8)
    assert [v.numpy().tobytes() for v in model.variables] == values
    assert not model.optimizer.built and set(vars(model)) == before and model.losses == []
    assert [len(layer._inbound_nodes) for layer in model.layers] == nodes


def test_articulation_points_of_a_chain_and_of_a_unet() -> None:
    chain = capture_graph(models.chain(width=64), batch_size=64)
    assert [cut.position for cut in chain.cuts] == [1, 2, 3, 4] and all(cut.is_articulation for cut in chain.cuts)
    unet = capture_graph(models.unet(), batch_size=64)
    crossed = {cut.position: len(cut.live) for cut in unet.cuts}
    names = labels(models.unet())
    assert crossed[names.index("middle")] == 3 and crossed[names.index("head")] == 1


def test_random_operations_with_hidden_state_are_pinned() -> None:
    x = inputs = keras.Input((8,))
    x = layers.Dense(8, name="d0")(x)
    x = models.HiddenRandom(name="hidden")(x)
    x = layers.Dropout(0.5, name="drop")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    pinned = {unit.label: unit.pinned for unit in capture_graph(model, batch_size=64).units if unit.pinned}
    assert set(pinned) == {"hidden", "head"} and "RandomUniform" in pinned["hidden"]


@pytest.mark.parametrize("channels", [64, 512])
def test_a_normalisation_needs_its_variance_again_whatever_the_number_of_channels(channels: int) -> None:
    """The few numbers of 256 channels or less were left out, and with them what makes them: 5% was told, 15 took."""
    x = inputs = keras.Input((8, 8, 3))
    for number in range(2):
        x = layers.Conv2D(channels, 3, padding="same", name=f"conv{number}")(x)
        x = layers.BatchNormalization(name=f"norm{number}")(x)
        x = layers.ReLU(name=f"relu{number}")(x)
    graph = capture_graph(keras.Model(inputs, layers.Dense(2)(x)), batch_size=8, granularity="layer")
    start = [unit.label for unit in graph.units].index("norm0")
    segments = [Segment(start=unit, stop=unit + 1, mode=SegmentMode.STORE) for unit in range(len(graph.units))]
    segments[start : start + 2] = [Segment(start=start, stop=start + 2, mode=SegmentMode.RECOMPUTE)]
    replayed = scheduled(Simulator(graph).prepared, segments).replayed
    types = Counter(graph.ops[place].type for place in replayed)
    assert (types["Mean"], types["SquaredDifference"]) == (2, 1)


def test_integers_drawn_in_a_branch_are_pinned() -> None:
    """They were taken for what no seed decides: other types of operations draw integers than floats."""
    seed = keras.random.SeedGenerator(1)

    def drawn(x: Any) -> Any:
        return tf.cond(
            tf.reduce_sum(x) > 0.0,
            lambda: x * tf.cast(keras.random.randint(tf.shape(x), 0, 3, seed=seed), x.dtype),
            lambda: tf.tanh(x),
        )

    x = inputs = keras.Input((8,))
    x = layers.Dense(8, name="d0")(x)
    x = layers.Lambda(drawn, output_shape=(8,), name="branch")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    pinned = {unit.label: unit.pinned for unit in capture_graph(model, batch_size=64).units if unit.pinned}
    assert set(pinned) == {"branch", "head"} and "random numbers in a branch" in pinned["branch"]


def test_a_python_function_is_pinned() -> None:
    x = inputs = keras.Input((8,))
    x = layers.Dense(8, name="d0")(x)
    x = layers.Lambda(
        lambda t: tf.ensure_shape(tf.numpy_function(lambda a: a, [t], tf.float32), t.shape),
        output_shape=(8,),
        name="python",
    )(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    units = capture_graph(model, batch_size=64).units
    assert {unit.label for unit in units if unit.pinned} == {"python", "head"}


def test_losses_and_metrics_of_a_compiled_model_are_part_of_the_step() -> None:
    model = models.chain()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    graph = capture_graph(model, batch_size=16)
    assert any("CrossEntropy" in op.type or "Xent" in op.type for op in graph.ops)


def _subclassed() -> Any:
    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    return Own()


@pytest.mark.parametrize("build", [_subclassed, lambda: keras.Sequential([layers.Dense(2)])])
def test_models_that_are_not_captured(build: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        capture_graph(build(), batch_size=4)
    assert len(str(caught.value)) > 40


def test_nothing_to_train() -> None:
    model = models.chain()
    model.trainable = False
    with pytest.raises(UnsupportedModelError, match="trainable=True"):
        capture_graph(model, batch_size=4)


def test_a_model_with_a_batch_size_is_traced_for_any_as_fit_trains_it_with_any() -> None:
    """That only one will do, ``test_fixed_batch.py`` asks for where it is so."""

    def sizes(asked_for: int, batch_size: int | None) -> list[int]:
        inputs = keras.Input((5,), batch_size=batch_size)
        model = keras.Model(inputs, layers.Dense(2)(layers.Dense(5)(inputs)))
        return [value.nbytes for value in capture_graph(model, batch_size=asked_for).values]

    for size in (8, 4):
        assert sizes(size, 8) == sizes(size, None)


def test_hundreds_of_layers() -> None:
    model = models.chain(width=16, depth=300)
    graph = capture_graph(model, batch_size=64)
    assert len(graph.units) == 301 and len(graph.cuts) == 300


@pytest.mark.parametrize("granularity", ["layer", "op"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_integers_have_no_gradient(granularity: str, compiled: bool) -> None:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.ops.argmax(layers.Dense(4)(inputs), axis=-1), name="classes")
    if compiled:
        model.compile("sgd", "mse")
    with pytest.raises(UnsupportedModelError, match="no weight of 'classes' gets a gradient"):
        capture_graph(model, batch_size=4, granularity=granularity)
    with pytest.raises(UnsupportedModelError, match="no weight of 'classes' gets a gradient"):
        measure(model, batch_size=4, isolate=False)


def test_a_replay_of_noise_needs_nothing_of_what_it_is_for() -> None:
    """Its shape is read in the first run; the tensor was said to be made again, or kept."""
    x = inputs = keras.Input((64,))
    x = layers.Dense(128, name="wide")(x)
    model = keras.Model(inputs, layers.Dense(4)(layers.Dropout(0.5)(x)))
    graph = capture_graph(model, batch_size=16)
    segments = [Segment(start=unit, stop=unit + 1, mode=SegmentMode.STORE) for unit in range(len(graph.units))]
    dropout = next(unit.index for unit in graph.units if unit.kind == "Dropout")
    segments[dropout] = Segment(start=dropout, stop=dropout + 1, mode=SegmentMode.RECOMPUTE)
    schedule = scheduled(Simulator(graph).prepared, segments)
    types = [graph.ops[place].type for place in schedule.replayed]
    gates = [graph.values[step.touches[0]].name for step in schedule.steps if step.op < 0]
    assert "StatelessRandomUniformV2" in types and not any("/wide" in name for name in gates)


def test_embeddings_of_equal_paths_are_not_one() -> None:
    """Each is read once: no sparse gradient is a term of a sum."""
    inputs = keras.Input((5,), dtype="int32")
    towers = []
    for name in ("first", "second"):
        tokens = keras.Input((5,), dtype="int32")
        towers.append(keras.Model(tokens, keras.layers.Embedding(7, 4, name="same")(tokens), name=name))
    joined = keras.layers.Add()([tower(inputs) for tower in towers])
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(joined)))
    assert len({variable.path for variable in model.variables}) < len(model.variables)
    assert not [unit.pinned for unit in capture_graph(model, batch_size=4).units if "sparse" in (unit.pinned or "")]


def test_a_model_that_is_compiled_again_is_captured_again() -> None:
    """A loss that is gone may have the address of the next one."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    known = set()
    for count in range(20):
        model.compile("sgd", lambda y, p: keras.ops.mean((y - p) ** 2))
        known.update(model_step._how(model, 4, "layer") for _ in range(2))
        assert len(known) == count + 1
