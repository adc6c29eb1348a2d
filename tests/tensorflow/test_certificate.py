"""A plan is certified for the model that it is applied to, wherever it comes from."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import plan_of, segments_of
from tf_memsaver.capture import model_step
from tf_memsaver.errors import CertificationError, InvalidRequestError, MemsaverError, UnsupportedModelError
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.layer_calls import list_layer_calls
from tf_memsaver.rewrite.optimized_model import is_optimized
from tools.shared.models import small as models


@pytest.fixture
def words() -> Any:
    x = inputs = keras.Input((8,), dtype="int32")
    table = layers.Embedding(9, 16, name="embedding")
    # Read twice, its sparse gradient is a sum, and it is kept out of segments.
    x = layers.Add(name="both")([table(x), table(keras.ops.flip(x, 1))])
    for number in range(4):
        x = layers.Dense(16, activation="gelu", name=f"d{number}")(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(layers.GlobalAveragePooling1D(name="pool")(x)))


def edited(plan: Plan, *spans: Any) -> Plan:
    """Return the plan as a file with other segments, changed by hand, has it."""
    data = plan.to_json()
    other = plan_of(list_layer_calls(models.chain()), segments_of(plan.labels, spans)).to_json()
    return Plan.from_json({**data, "segments": other["segments"]})


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that are captured."""
    found: list[Any] = []
    traced = model_step.traced_graph

    def counted(source: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(source)
        return traced(source, *args, **kwargs)

    monkeypatch.setattr(model_step, "traced_graph", counted)
    return found


def test_a_pinned_layer_is_not_replayed(words: Any) -> None:
    plan = tf_memsaver.search_plan(words, batch_size=64, strategy="min_peak")
    assert tf_memsaver.apply_plan(words, edited(plan, ("d1", "d2"))).memsaver_plan.recomputed == ("d1", "d2")
    with pytest.raises(CertificationError, match=r"'embedding' lies in .*sparse gradient") as caught:
        tf_memsaver.apply_plan(words, edited(plan, ("embedding", "d2")))
    assert "search_plan" in str(caught.value) and caught.value.strategy == "min_peak"


def test_no_replay_ends_where_a_sum_would_change() -> None:
    x = inputs = keras.Input((16,))
    x = layers.Dense(16, "tanh", name="before")(x)
    many = [layers.Dense(16, "tanh", name=f"branch{number}")(x) for number in range(3)]
    model = keras.Model(inputs, layers.Dense(1, name="head")(layers.Add(name="all")([x, *many])))
    plan = tf_memsaver.search_plan(model, batch_size=8, strategy="min_peak")
    assert 2 in tf_memsaver.capture_graph(model, batch_size=8).joined
    with pytest.raises(CertificationError, match="between 'branch0' and 'branch1'"):
        tf_memsaver.apply_plan(model, edited(plan, ("before", "branch0")))
    assert is_optimized(tf_memsaver.apply_plan(model, edited(plan, ("before", "before"))))


def test_a_model_is_captured_once(words: Any, captures: list[Any]) -> None:
    plan = tf_memsaver.search_plan(words, batch_size=64, strategy="min_peak")
    for made in (plan, Plan.from_json(plan.to_json()), *tf_memsaver.memory_time_curve(words, batch_size=64, points=3)):
        tf_memsaver.apply_plan(words, made)
    assert len(captures) == 2  # search_plan's and memory_time_curve's
    words.get_layer("d1").trainable = False
    tf_memsaver.apply_plan(words, plan)
    assert len(captures) == 3
    words.compile("sgd", "mse")
    tf_memsaver.apply_plan(words, plan)
    assert len(captures) == 4


def save_with(model: Any, path: Path, plan: Plan) -> None:
    """Save an optimized model, and change the segments in the file."""
    whole = path.with_name("whole.keras")
    model.save(whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "config.json":
                config = json.loads(data)
                config["config"]["plan"]["segments"] = plan.to_json()["segments"]
                data = json.dumps(config).encode()
            target.writestr(name, data)


def test_the_plan_in_a_model_file_is_certified(words: Any, tmp_path: Path, captures: list[Any]) -> None:
    optimized = tf_memsaver.optimize(words, batch_size=64, strategy="min_peak")
    for spans, reason in (([("d1", "d2")], ""), ([("embedding", "d2")], "'embedding' lies in a recompute segment")):
        save_with(optimized, tmp_path / "edited.keras", edited(optimized.memsaver_plan, *spans))
        if not reason:
            assert keras.models.load_model(tmp_path / "edited.keras").memsaver_plan.recomputed == ("d1", "d2")
            continue
        with pytest.raises(CertificationError, match=reason):
            keras.models.load_model(tmp_path / "edited.keras")
    assert len(captures) == 3


def test_a_frozen_model_loads(words: Any, tmp_path: Path) -> None:
    """Nothing of it is trained, so that nothing can be captured, and nothing needs to be."""
    optimized = tf_memsaver.optimize(words, batch_size=64, strategy="min_peak")
    optimized.trainable = False
    optimized.save(tmp_path / "frozen.keras")
    assert keras.models.load_model(tmp_path / "frozen.keras").memsaver_plan == optimized.memsaver_plan


def two_headed() -> Any:
    x = inputs = keras.Input((16,))
    x = layers.Dense(16, "tanh", name="shared")(x)
    left = layers.Dense(16, "tanh", name="left")(x)
    middle, right = (layers.Dense(16, "tanh", name=name)(inputs) for name in ("middle", "right"))
    features = layers.Dense(2, name="features")(x)
    y = layers.Add(name="sum")([x, left, middle, right])
    return keras.Model(inputs, [layers.Dense(1, name="head")(y), features])


def test_a_model_file_loads_whatever_outputs_have_a_loss(tmp_path: Path) -> None:
    """Keras compiles a model after it is loaded: with a loss of each output, more sums would bar more cuts."""
    model = two_headed()
    plain = tf_memsaver.capture_graph(model, batch_size=8)
    model.compile("sgd", ["mse", None])
    position = next(iter(set(plain.joined) - set(tf_memsaver.capture_graph(model, batch_size=8).joined)))
    labels = [unit.label for unit in plain.units]
    plan = tf_memsaver.search_plan(model, batch_size=8, strategy="min_peak")
    optimized = tf_memsaver.apply_plan(model, edited(plan, (labels[0], labels[position - 1])))
    optimized.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").memsaver_plan == optimized.memsaver_plan
    model.compile("sgd", ["mse", "mse"])
    with pytest.raises(CertificationError, match="order of a sum"):
        tf_memsaver.apply_plan(model, optimized.memsaver_plan)


def test_what_cannot_be_traced_is_not_certified(words: Any) -> None:
    data = tf_memsaver.search_plan(words, batch_size=64).to_json()
    with pytest.raises(CertificationError, match="with batch size 2147483647 cannot be traced"):
        tf_memsaver.apply_plan(words, Plan.from_json({**data, "batch_size": 2**31 - 1}))


@pytest.mark.parametrize("granularity", ["layer", "op"])
def test_plans_of_operations_and_of_own_calls_are_certified(granularity: str) -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [layers.Dense(8, "tanh") for _ in range(3)]

        def call(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x * 2.0

    model = Own()
    plan = tf_memsaver.search_plan(
        model, batch_size=8, strategy="min_peak", granularity=granularity, inputs=tf.TensorSpec((None, 8))
    )
    assert is_optimized(tf_memsaver.apply_plan(model, Plan.from_json(plan.to_json())))
    whole = [{"start": 0, "stop": len(plan.labels), "mode": "recompute"}]
    with pytest.raises(MemsaverError, match=r"recompute segment|replays"):
        tf_memsaver.apply_plan(model, Plan.from_json({**plan.to_json(), "segments": whole}))


@pytest.mark.parametrize("thing", ["plan.json", None, 3, {}, Plan])
def test_what_is_no_plan(words: Any, thing: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"plan must be a Plan \(Plan\.load"):
        tf_memsaver.apply_plan(words, thing)


@pytest.mark.parametrize(("thing", "said"), [("m.keras", "load_model"), (Path("m.keras"), "load_model")])
def test_a_path_is_no_model(thing: Any, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        tf_memsaver.estimate(thing, batch_size=4)


def test_a_class_is_no_model() -> None:
    with pytest.raises(UnsupportedModelError, match="the class Sequential itself"):
        tf_memsaver.optimize(keras.Sequential, batch_size=4)


@pytest.mark.parametrize("steps", [0, -1, 1.5, None])
def test_no_steps_prove_nothing(words: Any, steps: Any) -> None:
    optimized = tf_memsaver.optimize(words, batch_size=4)
    with pytest.raises(InvalidRequestError, match="steps must be a whole number of 1 or more"):
        tf_memsaver.verify(words, optimized, batch_size=4, steps=steps)
    with pytest.raises(InvalidRequestError, match="steps must be a whole number of 1 or more"):
        tf_memsaver.measure(words, batch_size=4, steps=steps)
