"""The programs of the networks that a step calls: one for all calls of a network with inputs of the same sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tf_memsaver.compat import keras_models
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.program.data import with_free_batch
from tf_memsaver.program.model_call import is_constant
from tf_memsaver.program.networks import TWICE, HeardCall
from tf_memsaver.program.program import ModelProgram, Wanted
from tf_memsaver.program.signature import Given, callable_as, knows_inputs, note_inputs, usual_arguments, usual_call

_TWICE_ELSEWHERE = "is differentiated twice in another call"

_KEEPS_FOR_OTHERS = "makes a tensor that code around it reads, and that its call does not return"

_IN_SEVERAL_WAYS = "is not always called alike, and a plan of operations is for one kind of call"

_IN_FUNCTION = "is called in a tf.function inside the step, which adds up gradients in an order of its own"

_BY_OBJECTS = "is given something that is no number, text or flag, and a plan of operations is for one value"

_HAS_MASKS = "is given a tensor with a Keras mask, which plans that cut inside layers do not pass on"

_DRAWS = "draws random numbers without a seed, after others in the step"


class NetworkPrograms:
    """Makes the programs of networks, each when it is first asked for."""

    def __init__(self, wanted: Wanted, heard: Sequence[HeardCall]) -> None:
        """Take how networks are to be cut, and all calls that a step makes."""
        self._wanted = wanted._replace(opened=_known(wanted.opened, [each.path for each in heard]))
        self._heard = [each for each in heard if each.given is not None and not each.plain]
        self._twice = {id(each.layer) for each in heard if each.plain == TWICE}
        self._made: dict[str, ModelProgram] = {}

    def of(self, heard: HeardCall) -> ModelProgram:
        """Return the program of a network's call.

        Raises:
          UnsupportedModelError: it cannot be traced.
        """
        calls = [each for each in self._heard if each.layer is heard.layer]
        if keras_models.inner_functional(heard.layer) is None:
            with_inputs_alone = [each for each in calls if not _given(each).tensors]
            if with_inputs_alone and heard is with_inputs_alone[0]:
                with contextlib.suppress(UnsupportedModelError):  # It may need more than its inputs.
                    note_inputs(heard.layer, _given(heard).inputs)
            calls = [each for each in calls if _sizes(_given(each)) == _sizes(_given(heard))]
        path = calls[0].path
        if path not in self._made:
            self._made[path] = self._program(path, calls)
        return self._made[path]

    def _program(self, path: str, calls: Sequence[HeardCall]) -> ModelProgram:
        """Return the program for such calls, the first of which has this name."""
        network, wanted, ways = calls[0].layer, self._wanted, [_given(each).arguments for each in calls]
        has_constants = all(is_constant(value) for way in ways for value in way.values())
        is_one_way = has_constants and all(way == ways[0] for way in ways)
        given = _given(calls[0])
        if not is_one_way:
            # A graph says what a Functional model needs; a call of somebody's own may need what it is given.
            needed = {} if keras_models.inner_functional(network) is not None else ways[0]
            given = given._replace(arguments={**needed, **usual_arguments(network)})
        wanted = wanted._replace(given=_as_noted(network, given) or callable_as(network, given))
        refused = {
            _KEEPS_FOR_OTHERS: any(each.keeps_for_others for each in calls),
            _DRAWS: any(each.draws_after_others for each in calls),
            _BY_OBJECTS: not has_constants,
            _HAS_MASKS: any(each.has_masks for each in calls),
        }
        unsuited = {
            _TWICE_ELSEWHERE: id(network) in self._twice,
            _IN_FUNCTION: any(each.in_function for each in calls),
            _IN_SEVERAL_WAYS: not is_one_way or not all(each.is_as_at_rest for each in calls),
        }
        reasons = {"auto": refused | unsuited, "op": refused}.get(wanted.granularity, {})
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None and wanted.granularity == "op":
            raise UnsupportedModelError(f"{reason}: only plans by layers (granularity='layer') run its code")
        if reason is not None:
            return wanted.by_layers(network).noted(f"by layers in '{path}', since it {reason}")
        opened = None if wanted.opened is None else _below(path, wanted.opened)
        return wanted.of_call(network, wanted._replace(opened=opened))


def _given(heard: HeardCall) -> Given:
    assert heard.given is not None, "it is known what a network is called with"
    return heard.given


def _as_noted(network: Any, given: Given) -> Given | None:
    """Return how a network is called with the inputs that were noted for it, if these are such inputs."""
    if given.tensors or not knows_inputs(network):
        return None
    noted = given._replace(inputs=usual_call(network).inputs)
    is_noted = keras_models.inner_functional(network) is not None or _sizes(noted) == _sizes(given)
    return noted if is_noted else None


def _sizes(given: Given) -> Any:
    """Return the specs of what a network is called with, but for the first dimension, which may be the batch."""
    free = given.mapped(with_free_batch)
    return free.inputs, free.tensors


def _below(path: str, names: Iterable[str]) -> list[str]:
    """Return those names that are of something inside what has a path, as they are there."""
    return [name.removeprefix(f"{path}/") for name in names if name.startswith(f"{path}/")]


def _known(opened: Collection[str] | None, paths: Sequence[str]) -> Collection[str] | None:
    """Return the layers that a plan has opened, or None where a name is of no call of the step.

    In another copy of the model, Keras may name networks otherwise: what pays there is what paid for its plan.
    """
    if opened is None or not all(any(_below(path, [name]) for path in paths) for name in opened):
        return None
    return opened
