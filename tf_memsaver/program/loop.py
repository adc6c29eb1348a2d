"""A loop of somebody's own as a model: its networks, and a ``train_step`` that is the step which the loop runs.

So a step that is a function is planned, measured and verified as the ``train_step`` of a model is.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_memsaver.compat import functions, keras_calls, keras_models
from tf_memsaver.errors import InvalidRequestError, UnsupportedModelError
from tf_memsaver.program.data import Batch, Data, data_of, unpacked
from tf_memsaver.program.reached_objects import Reached, reached_by
from tf_memsaver.units import shown


class LoopStep:
    """A function that a loop calls with each element of its data, and what it reaches.

    Keras looks into lists and dicts that a model has as attributes, and not into this.
    """

    def __init__(self, function: Callable[..., Any], structure: Any) -> None:
        """Take a step, and the models that it trains in their structure.

        Raises:
          InvalidRequestError: it is no function.
        """
        if not callable(function):
            raise InvalidRequestError(
                f"step must be the function that your loop calls with each element of data, got {shown(function)}."
            )
        self.function, self.structure = function, structure
        self.name = _name_of(function)
        self.reached: Reached = reached_by(function)
        self.run = functions.converted(function)

    def is_given_parts(self, element: Any) -> bool:
        """Whether the step is called with the parts of an element: ``step(*element)``, else ``step(element)``.

        Raises:
          InvalidRequestError: it can be called in neither way.
        """
        if not isinstance(element, tuple):
            self._check(element)
            return False
        if self._takes(*element):
            return True
        self._check(element)
        return False

    def _takes(self, *args: Any) -> bool:
        try:
            signature = inspect.signature(self._written)
        except (TypeError, ValueError):
            return True  # Some callables do not say.
        try:
            bound = signature.bind(*args).arguments
        except TypeError:
            return False
        # In step(batch, training=True), no part of an element is meant for the switch.
        return not any(isinstance(signature.parameters[name].default, bool) for name in bound)

    def _check(self, element: Any) -> None:
        if self._takes(element):
            return
        said = inspect.signature(self._written)
        parts = f"{len(element)} parts" if isinstance(element, tuple) else "one part"
        ways = "step(*element) and step(element)" if isinstance(element, tuple) else "step(element)"
        raise InvalidRequestError(
            f"step '{self.name}' takes {said}, but an element of data has {parts}: {ways} do not fit. Give data "
            "whose elements your loop passes to the step, or a function that takes such elements."
        )

    @property
    def _written(self) -> Any:
        is_traced = functions.is_tf_function(self.function)
        return functions.python_function(self.function) if is_traced else self.function


class Loop(keras.Model):
    """Networks that a step trains. Their calls go to these very objects, whichever the step knows them by.

    A step finds its networks by names, which may stand for the plain ones or for optimized ones over the same layers.
    """

    def __init__(self, step: LoopStep, networks: Sequence[Any]) -> None:
        """Take a step and the networks that calls go to."""
        super().__init__(name=re.sub(r"\W+", "_", step.name).strip("_") or "step")
        self.networks = list(networks)
        # Networks that the step trains beside those that were given have variables, too.
        keys = set(map(keras_models.identity, networks))
        self.others = [each for each in step.reached.layers if keras_models.identity(each) not in keys and each.built]
        self.memsaver_step = step

    @property
    def traced_as(self) -> str:
        """What errors call the step."""
        return f"step '{self.memsaver_step.name}'"

    def packed(self, networks: Sequence[Any]) -> Any:
        """Return networks in the structure in which they were given."""
        return _packed(self.memsaver_step.structure, networks)

    def data_of(self, given: Any, batch_size: int | None = None) -> Data:
        """Return what the loop goes over, with each element as a batch: two or three parts as Keras reads them.

        Raises:
          InvalidRequestError: the step cannot be called with such elements.
        """
        data = data_of(given, unpack=_unpacked, batch_size=batch_size)
        self.memsaver_step.is_given_parts(_element_of(data.specs))
        return data

    def left_out(self, network: Any) -> str:
        """Return why a network that the step calls is not planned for, or an empty string."""
        if any(network is each for each in self.networks):
            return ""
        return "was not given: give all networks that the step trains, optimize((one, other), data=..., step=...)"

    def check_called(self, layers: Sequence[Any]) -> None:
        """Check that all networks are among the layers that the step calls.

        Raises:
          UnsupportedModelError: one is not.
        """
        for network in self.networks:
            if not any(network is each for each in layers):
                called = ", ".join(dict.fromkeys(f"'{each.name}' ({type(each).__name__})" for each in layers))
                raise UnsupportedModelError(
                    f"{self.traced_as} does not call model '{network.name}' itself; it calls {called or 'no layer'}. "
                    f"Give the models that it calls, in the graph that it is traced in (under tf.distribute, the "
                    f"function that strategy.run is given). If it calls model.call or model.stateless_call, which run "
                    f"the layers alone, call model(x) instead."
                )

    def train_step(self, data: Any) -> Any:
        """Run the step on what ``keras.utils.pack_x_y_sample_weight`` makes of a batch; return what it returns."""
        element = _element_of(Batch(*keras.utils.unpack_x_y_sample_weight(data)))
        step = self.memsaver_step
        with keras_calls.layer_calls_go_to(_Routing(self.networks, keras_calls.layer_handler())):
            made = step.run(*element) if step.is_given_parts(element) else step.run(element)
        return {f"out_{place}": each for place, each in enumerate(keras.tree.flatten(made)) if tf.is_tensor(each)}


class _Routing:
    """Makes the calls of layers in a step (see ``keras_calls.layer_calls_go_to``): networks are the given ones."""

    def __init__(self, networks: Sequence[Any], outer: keras_calls.LayerHandler | None) -> None:
        self._networks, self._outer = {keras_models.identity(each): each for each in networks}, outer

    def __call__(self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if isinstance(layer, keras.Model):
            network = self._networks.get(keras_models.identity(layer), layer)
            if network is not layer:
                return network(*args, **kwargs)
        return call(*args, **kwargs) if self._outer is None else self._outer(layer, call, args, kwargs)


def loop_of(given: Any, function: Callable[..., Any]) -> Loop:
    """Return the loop that trains what was given, a model or several in a tuple, list or dict, by a step.

    Raises:
      UnsupportedModelError: something is no Keras model.
      InvalidRequestError: the step is no function.
    """
    if isinstance(given, Loop):
        return given
    networks = _flat(given)
    for each in networks:
        _check_network(each, function)
    return Loop(LoopStep(function, _packed(given, [None] * len(networks))), networks)


def mapped(function: Callable[[Any], Any], given: Any) -> Any:
    """Return what was given as models, one or several, with what a function returns for each."""
    return _packed(given, list(map(function, _flat(given))))


def _check_network(each: Any, step: Any) -> None:
    if isinstance(each, keras.Model):
        if keras_models.has_no_call(each):
            raise UnsupportedModelError(
                f"model '{each.name}' ({type(each).__name__}) has no call(), so {_name_of(step)} cannot call it. "
                "Give the networks that the step calls: optimize((one, other), data=..., step=...)."
            )
        return
    if isinstance(each, tf.Module):
        name = type(each).__name__
        raise UnsupportedModelError(
            f"step= is for Keras models, but {name} is a plain tf.Module. Optimize the function that your step "
            "calls, for the batches of your loop, and call the result instead: forward = "
            "tf_memsaver.optimize_function(module.__call__, tf.TensorSpec((32, ...)))."
        )
    raise UnsupportedModelError(
        f"with step=, give the keras.Model that the step trains, or a tuple, list or dict of several, got "
        f"{shown(each)}."
    )


def _flat(given: Any) -> list[Any]:
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, (tuple, list)) else [given]


def _packed(structure: Any, flat: Sequence[Any]) -> Any:
    if isinstance(structure, Mapping):
        return dict(zip(structure, flat, strict=True))
    return type(structure)(flat) if type(structure) in (tuple, list) else flat[0] if len(flat) == 1 else tuple(flat)


def _unpacked(element: Any) -> Batch:
    return unpacked(element) if isinstance(element, tuple) and len(element) in (2, 3) else Batch(element)


def _element_of(batch: Batch) -> Any:
    """Return a batch as the element of data that it was unpacked from."""
    parts = [part for part in batch if part is not None]
    return batch.x if len(parts) == 1 else tuple(parts)


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def warn_of_plain_networks(loop: Loop) -> None:
    """Warn where a step would keep the plain networks."""
    for each in loop.memsaver_step.reached.tf_functions:
        if functions.has_traces(each):
            logging.warning(
                "tf_memsaver: the tf.function '%s' is already traced, with the model that it had then. Calls with "
                "equal arguments keep running that trace, so this plan has no effect on them. Make a new "
                "tf.function, or call optimize before the first call.",
                _name_of(each),
            )
    for network, place in _networks_of(loop, fixed=True):
        logging.warning(
            "tf_memsaver: %s reads model '%s' as %s, which cannot be assigned. Make it again with the optimized model.",
            loop.traced_as,
            network.name,
            place,
        )


def places_of_networks(loop: Loop) -> list[str]:
    """Return in sentences where a step finds its networks, which is where the optimized ones are to be assigned."""
    found = _networks_of(loop, fixed=False)
    return [f"{loop.traced_as} finds model '{each.name}' as {place}: assign the result there" for each, place in found]


def _networks_of(loop: Loop, *, fixed: bool) -> Iterator[tuple[Any, str]]:
    """Yield networks, each with the place where the step finds it, which assignments change or, if fixed, do not."""
    reached = loop.memsaver_step.reached
    keys = {keras_models.identity(network): network for network in loop.networks}
    for layer in reached.layers:
        network = keys.get(keras_models.identity(layer)) if isinstance(layer, keras.Model) else None
        if network is not None and reached.places[id(layer)] and (id(layer) in reached.fixed) is fixed:
            yield network, reached.places[id(layer)]
