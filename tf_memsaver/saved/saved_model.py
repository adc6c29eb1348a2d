"""A SavedModel with its training endpoints in recompute segments; all else of it is carried over.

No Python code of the model is needed. The result is loaded with TensorFlow alone; whoever takes gradients through a
rewritten endpoint trains in the smaller memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.functions import python_signature
from tf_memsaver.compat.messages import first_line
from tf_memsaver.errors import InvalidRequestError, MemsaverError, UnsupportedModelError
from tf_memsaver.files.targets import REWRITTEN_PLANS, TargetKind, check_target
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.function_calls import FunctionCalls
from tf_memsaver.rewrite.optimized_function import SegmentedFunction
from tf_memsaver.saved.folders import write_saved_model
from tf_memsaver.tfgraph.emission import SEGMENT

_TRAINING_ARGUMENTS = ("training", "is_training", "train")

PlanMaker = Callable[[FunctionCalls], Plan]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One traced signature of a function of the SavedModel: ``key`` names it, ``training`` says what it is for."""

    key: str
    attribute: str
    concrete: Any
    training: bool


def rewrite(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    planner: PlanMaker,
    *,
    functions: Sequence[str] = (),
    overwrite: bool = False,
) -> dict[str, Plan]:
    """Write the SavedModel in ``source`` to ``target`` with ``planner``'s segments; return the plans by endpoint.

    Args:
      source: the folder of a SavedModel.
      target: the folder to write, beside and renamed.
      planner: makes a plan for an endpoint.
      functions: names of the functions to rewrite; all that can be trained through if none is named.
      overwrite: whether a SavedModel at ``target`` may be replaced.

    Raises:
      InvalidRequestError: ``source`` is no SavedModel or cannot be read, or has no such function; or ``target`` can be
        no target (an empty path, a folder in use, the source).
      OutputExistsError: ``target`` exists and ``overwrite`` is false, or it holds more than a SavedModel.
      OutputError: it cannot be written.
      UnsupportedModelError: nothing in it can be trained.
    """
    place = check_target(target, TargetKind.FOLDER, overwrite=overwrite, sources=[source])
    root = _load(os.fspath(source))
    endpoints = list(_endpoints(root, functions))
    chosen = {endpoint.key: endpoint for endpoint in endpoints if endpoint.training or functions}
    if not chosen:
        raise UnsupportedModelError(
            f"'{source}' has no function that can be trained; it has "
            f"{', '.join(sorted({e.attribute for e in endpoints})) or 'none'}. Save it with a function of the "
            "inputs that was traced for training."
        )
    plans: dict[str, Plan] = {}
    rewritten: dict[str, SegmentedFunction] = {}
    refused: list[MemsaverError] = []
    for key, endpoint in chosen.items():
        try:
            calls = FunctionCalls(endpoint.concrete)
            plans[key] = planner(calls)
        except UnsupportedModelError as error:
            refused.append(error)
            continue
        rewritten[key] = SegmentedFunction(calls, plans[key])
    if not plans:
        raise refused[0]
    for attribute in dict.fromkeys(endpoint.attribute for endpoint in endpoints if endpoint.key in rewritten):
        own = [endpoint for endpoint in endpoints if endpoint.attribute == attribute]
        setattr(root, attribute, _function(getattr(root, attribute), own, rewritten))
    signatures = dict(getattr(root, "signatures", {})) or None
    write_saved_model(root, place, signatures, {REWRITTEN_PLANS: {key: plan.to_json() for key, plan in plans.items()}})
    return plans


def _load(source: str) -> Any:
    if not os.path.isdir(source) or not tf.saved_model.contains_saved_model(source):
        raise InvalidRequestError(
            f"'{source}' is not a SavedModel: it has no saved_model.pb. Name the folder that contains that file."
        )
    try:
        if SEGMENT.encode() in Path(source, "saved_model.pb").read_bytes():
            raise InvalidRequestError(
                f"the SavedModel '{source}' was written by tf_memsaver and already has a plan. Rewrite the "
                "SavedModel that it was made from, or optimize the Keras model."
            )
        return tf.saved_model.load(source)
    except MemsaverError:
        raise
    except Exception as error:  # TensorFlow has no family of errors for files that are damaged.
        raise InvalidRequestError(
            f"the SavedModel '{source}' cannot be loaded: {first_line(error)}. It may be damaged or incomplete. Save "
            "or copy it again."
        ) from error


def _endpoints(root: Any, functions: Sequence[str]) -> Iterator[Endpoint]:
    """Yield the traced signatures of the functions of a loaded SavedModel."""
    attributes = {name: getattr(root, name, None) for name in dir(root)}
    found: dict[str, Any] = {name: f for name, f in attributes.items() if hasattr(f, "concrete_functions")}
    unknown = sorted(set(functions) - set(found))
    if unknown:
        raise InvalidRequestError(f"the SavedModel has no function {unknown[0]!r}; it has {', '.join(sorted(found))}")
    for name in functions or found:
        concretes = found[name].concrete_functions
        for number, concrete in enumerate(concretes):
            key = name if len(concretes) == 1 else f"{name}#{number + 1}"
            yield Endpoint(key, name, concrete, _is_for_training(concrete))


def _is_for_training(concrete: Any) -> bool:
    """Whether gradients may be taken through a function: by its ``training`` argument, else by what it uses."""
    args, kwargs = concrete.structured_input_signature
    named = {**dict(zip(concrete.function_type.parameters, args, strict=False)), **kwargs}
    for name in _TRAINING_ARGUMENTS:
        if isinstance(named.get(name), bool):
            return bool(named[name])
    return any(v.trainable for v in concrete.graph.variables) and any(t.dtype.is_floating for t in concrete.outputs)


def _function(source: Any, endpoints: Sequence[Endpoint], rewritten: dict[str, SegmentedFunction]) -> Any:
    """Return a tf.function with all signatures of ``source``: rewritten where there is a plan, else as it was."""
    listed = [(e, rewritten[e.key].calls if e.key in rewritten else FunctionCalls(e.concrete)) for e in endpoints]

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        for endpoint, calls in listed:
            try:
                flat = calls.flat_arguments(args, kwargs)
            except (TypeError, InvalidRequestError):
                continue
            if not calls.accepts(flat):
                continue
            if endpoint.key not in rewritten:
                return endpoint.concrete(*args, **kwargs)
            return rewritten[endpoint.key](flat)
        raise InvalidRequestError("the arguments fit no signature of the function")

    dispatched.__signature__ = python_signature(source)  # type: ignore[attr-defined]
    function = tf.function(dispatched, autograph=False)
    for endpoint in endpoints:
        args, kwargs = endpoint.concrete.structured_input_signature
        function.get_concrete_function(*args, **kwargs)
    return function
