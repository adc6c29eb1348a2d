"""What a function's code can reach: the objects that a training step of somebody's own works with.

They are found where Python looks names up: in a function's closure, its module's globals, its arguments' defaults, the
object that it is bound to; and so on through the functions and objects that are found.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import functions


@dataclass
class Reached:
    """What a function reaches, without what only libraries do.

    It has no slots: ``kept_objects`` finds what it holds as attributes.

    Attributes:
      objects: all but layers, functions and modules, and what layers and modules of TensorFlow hold as attributes.
      layers: the layers, models included, that no other one was asked for.
      places: by the id of such a layer, where the code finds it: text for people.
      fixed: ids of those that no assignment can replace there, such as an argument of a ``functools.partial``.
      tf_functions: the ``tf.function``s.
    """

    objects: list[Any] = field(default_factory=list)
    layers: list[Any] = field(default_factory=list)
    places: dict[int, str] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    tf_functions: list[Any] = field(default_factory=list)


def reached_by(function: Any) -> Reached:
    """Return what a function reaches."""
    found = Reached()
    seen: dict[int, Any] = {}
    waiting: list[tuple[Any, str, bool]] = [(function, "", False)]
    while waiting:
        each, place, is_fixed = waiting.pop(0)
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, keras.layers.Layer) and each is not function:
            found.layers.append(each)
            found.places[id(each)] = place
            if is_fixed:
                found.fixed.add(id(each))
        waiting.extend(_held(each, found))
    return found


def _held(each: Any, found: Reached) -> Iterator[tuple[Any, str, bool]]:
    """Yield what something holds, each with its place and whether it is fixed there; note what it is."""
    if functions.is_tf_function(each):
        found.tf_functions.append(each)
        yield functions.python_function(each), "", False
    elif isinstance(each, types.FunctionType):
        if not functions.is_library(each):
            yield from _of_function(each)
    elif isinstance(each, types.MethodType):
        yield each.__func__, "", False
        yield functions.bound_object(each), "", False
    elif isinstance(each, functools.partial):
        yield each.func, "", False
        for value in (*each.args, *each.keywords.values()):
            yield value, f"an argument of the functools.partial of '{_name_of(each.func)}'", True
    elif isinstance(each, (list, tuple)):
        found.objects.append(each)
        yield from ((value, "a list or tuple", False) for value in each)
    elif isinstance(each, dict):
        found.objects.append(each)
        yield from ((value, f"[{key!r}] of a dict", False) for key, value in each.items())
    elif not isinstance(each, (type, types.ModuleType, types.BuiltinFunctionType)):
        yield from _of_object(each, found)


def _of_function(function: types.FunctionType) -> Iterator[tuple[Any, str, bool]]:
    name = function.__qualname__
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield wrapped, "", False
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # It is empty.
            yield cell.cell_contents, f"the variable '{variable}' around '{name}'", False
    used = set(_names_in(function.__code__))
    for variable in sorted(used & function.__globals__.keys()):
        value = function.__globals__[variable]
        yield value, f"the global variable '{variable}'", False
        if isinstance(value, types.ModuleType) and not functions.is_library(value):
            for attribute in sorted(used & vars(value).keys()):
                yield vars(value)[attribute], f"'{variable}.{attribute}'", False
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield value, f"a default of an argument of '{name}'", True


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that code uses, with that of functions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _of_object(each: Any, found: Reached) -> Iterator[tuple[Any, str, bool]]:
    attributes = getattr(each, "__dict__", None)
    attributes = dict(attributes) if isinstance(attributes, Mapping) else {}
    is_own, is_layer = not functions.is_library(type(each)), isinstance(each, keras.layers.Layer)
    if is_layer:
        # What it is made of is its own; what it is trained with is not.
        attributes = {name: value for name, value in attributes.items() if _has_part_of_training(value)}
    elif isinstance(each, tf.Module):
        found.objects.extend(each.variables)
    else:
        found.objects.append(each)
    if is_own or is_layer or isinstance(each, tf.Module):
        for name, value in attributes.items():
            yield value, f"the attribute '{name}' of {type(each).__name__}", False
    if is_own:
        for base in type(each).__mro__:
            if not functions.is_library(base):
                yield from ((value, "", False) for value in vars(base).values() if isinstance(value, _CODE))


def _has_part_of_training(value: Any) -> bool:
    """Whether an attribute of a layer is, or holds, what it is trained with and no part of it."""
    values = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
    return any(isinstance(each, _OF_TRAINING) for each in values)


_OF_TRAINING = (keras.optimizers.Optimizer, keras.metrics.Metric, keras.losses.Loss)
_CODE = (types.FunctionType, functools.partial, tf.types.experimental.GenericFunction)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
