"""The model that a command line names: a file, a function, or a short name of keras.applications."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
from absl import logging

from tf_memsaver.command.arguments import Kind, check_application, kind_of
from tf_memsaver.errors import InvalidRequestError


def load_model(
    source: str,
    *,
    input_shape: Sequence[int] | None = None,
    optimizer: str | None = None,
    loss: str | None = None,
) -> keras.Model:
    """Return the model that ``source`` names.

    Args:
      source: a ``.keras`` or ``.h5`` file, ``package.module:function`` (called without arguments; the current directory
        is importable), or a name of keras.applications in any spelling of its case and separators (``resnet50``), which
        is built without trained weights.
      input_shape: shape of one example, for a model of keras.applications.
      optimizer: name of an optimizer; the model is compiled with it, and with ``loss``.
      loss: name of a loss.

    Raises:
      InvalidRequestError: nothing is found under that name, or what is found fails or is not a Keras model.
    """
    kind = kind_of(source)
    if kind is Kind.APPLICATION:
        # Keras knows the names; building the model takes seconds.
        _check_names(optimizer, loss)
        model = _from_applications(source, input_shape)
    else:
        model = _from_file(source) if kind is Kind.FILE else _from_function(source)
    return _compiled(model, optimizer, loss)


def _from_file(path: str) -> keras.Model:
    # An optimized model is loaded through the classes that are registered here.
    importlib.import_module("tf_memsaver.api")
    return _called(f"load '{path}'", lambda: keras.models.load_model(path))


def _from_function(source: str) -> keras.Model:
    module_name, _, attribute = source.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)

    def build() -> Any:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found if isinstance(found, keras.Model) else found()

    return _called(f"make a model from '{source}'", build)


def _from_applications(source: str, input_shape: Sequence[int] | None) -> keras.Model:
    name = check_application(source, [name for name in dir(keras.applications) if name[0].isupper()])
    shape = None if input_shape is None else tuple(input_shape)
    build = getattr(keras.applications, name)
    return _called(f"build keras.applications.{name}", lambda: build(weights=None, input_shape=shape))


def _called(what: str, build: Callable[[], Any]) -> keras.Model:
    """Run somebody else's code; whatever it raises is bad input, not a fault of ours."""
    try:
        model = build()
    except Exception as error:
        logging.debug("cannot %s", what, exc_info=True)
        raise InvalidRequestError(f"cannot {what}: {type(error).__name__}: {error}") from error
    if not isinstance(model, keras.Model):
        raise InvalidRequestError(f"cannot {what}: it gave a {type(model).__name__}, not a keras.Model.")
    return model


def _compiled(model: keras.Model, optimizer: str | None, loss: str | None) -> keras.Model:
    if optimizer is None and loss is None:
        return model
    _check_names(optimizer, loss)

    def compile_model() -> keras.Model:
        model.compile(optimizer=optimizer or "sgd", loss=loss)
        return model

    return _called(f"compile with optimizer={optimizer!r}, loss={loss!r}", compile_model)


def _check_names(optimizer: str | None, loss: str | None) -> None:
    """Check that Keras knows an optimizer and a loss; ``compile`` takes the name of a loss that it does not know."""
    for what, name, get, where in (
        ("optimizer", optimizer, keras.optimizers.get, "keras.optimizers"),
        ("loss", loss, keras.losses.get, "keras.losses"),
    ):
        try:
            if name is not None:
                get(name)
        except Exception as error:
            logging.debug("no such %s", what, exc_info=True)
            raise InvalidRequestError(
                f"{what}='{name}' is no {what} that Keras can make. Give a name of {where}."
            ) from error
