"""The table of kinds of models: which program a model gets, and that a new kind is a class and an entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import keras
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.options.table import Granularity
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program import kinds
from tf_memsaver.program.calls import CallSequence
from tf_memsaver.program.kinds import KINDS, Kind, program_of
from tf_memsaver.program.layer_calls import LayerCall, Slot
from tf_memsaver.program.layer_program import LayerProgram
from tf_memsaver.program.operation_program import OperationProgram
from tf_memsaver.program.program import ModelProgram, SegmentedCalls, Segmenter, TrainingCall
from tf_memsaver.program.signature import note_inputs
from tf_memsaver.program.sublayer_program import SublayerProgram
from tools.shared.models import small as models
from tools.shared.training import assert_trains_alike

WIDTH = 64


class Tower(keras.Model):
    """Layers on top of each other, which Keras sees as any model with a ``call``."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.steps = [layers.Dense(WIDTH, activation="tanh", name=f"step{number}") for number in range(depth)]

    def call(self, x: Any) -> Any:
        for step in self.steps:
            x = step(x)
        return x


class TowerProgram(ModelProgram):
    """A tower as calls of its steps: what a module of a new kind consists of."""

    def __init__(self, model: Tower) -> None:
        calls = [
            LayerCall(
                number=number,
                operation=step,
                label=step.name,
                args=(Slot(number),),
                kwargs={},
                inputs=(number,),
                outputs=(number + 1,),
                enclosing=(),
                home=None,
                signature=f"step of {step.units}",
            )
            for number, step in enumerate(model.steps)
        ]
        count = len(calls)
        self.sequence = CallSequence(calls=tuple(calls), inputs=(0,), outputs=(count,), slot_count=count + 1)

    def enter(self, inputs: Any) -> list[Any]:
        return [inputs]

    def finish(self, flat: Sequence[Any]) -> Any:
        return flat[0]

    def in_segments(self, plan: Plan, segmenter: Segmenter) -> TrainingCall:
        return TowerInSegments(segmenter.prepare(self.sequence, plan.segments))


class TowerInSegments:
    def __init__(self, calls: SegmentedCalls) -> None:
        self.calls, self.runs = calls, 0

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.runs += 1
        return self.calls([args[0]], training=True)[0]


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", (Kind("layer", lambda m: isinstance(m, Tower), TowerProgram), *KINDS))


def test_a_new_kind_is_a_class_and_an_entry(towers: None) -> None:
    model = Tower()
    optimized = tf_memsaver.optimize(model, batch_size=1024, strategy="min_peak", inputs=tf.TensorSpec((None, WIDTH)))
    plan = optimized.memsaver_plan
    assert plan.labels == tuple(step.name for step in model.steps) and plan.recomputed_units
    assert_trains_alike(model, optimized)
    assert optimized._memsaver.run.runs > 0
    again = tf_memsaver.apply_plan(model, Plan.from_json(plan.to_json()))
    assert isinstance(again._memsaver.run, TowerInSegments)


def test_a_model_and_a_granularity_tell_the_kind() -> None:
    chain, tower = models.chain(), Tower()
    note_inputs(tower, tf.TensorSpec((None, WIDTH)))
    assert isinstance(program_of(chain, "layer"), LayerProgram)
    assert isinstance(program_of(tower, "layer"), SublayerProgram)
    assert isinstance(program_of(chain, "op"), OperationProgram)
    assert isinstance(program_of(tower, "op"), OperationProgram)


def test_each_granularity_has_a_kind_for_every_call() -> None:
    last = {kind.granularity: kind for kind in KINDS if not kind.program.runs_step}
    assert set(last) == set(get_args(Granularity)) and all(kind.holds(object()) for kind in last.values())
