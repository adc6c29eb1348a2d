"""The model that a command line names (a file, a function, or a short name of keras.applications), and its data."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h5py
import keras
from absl import logging

from tf_memsaver.command.arguments import SourceKind, check_application, kind_of
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
    if kind is SourceKind.APPLICATION:
        # Keras knows the names; building the model takes seconds.
        _check_names(optimizer, loss)
        model = _from_applications(source, input_shape)
    else:
        model = _from_file(source) if kind is SourceKind.FILE else _from_function(source)
    return _compiled(model, optimizer, loss)


def _from_file(path: str) -> keras.Model:
    is_whole = zipfile.is_zipfile if path.lower().endswith(".keras") else h5py.is_hdf5
    if not is_whole(path):
        raise InvalidRequestError(
            f"the model file '{path}' is damaged, incomplete, or not in the format that its name says. Save or copy "
            "it again."
        )
    # An optimized model is loaded through the classes that are registered here.
    importlib.import_module("tf_memsaver.api")
    what = f"load '{path}'"
    try:
        return _called(what, lambda: keras.models.load_model(path))
    except InvalidRequestError as error:
        with contextlib.suppress(InvalidRequestError):
            model = _called(what, lambda: keras.models.load_model(path, compile=False))
            logging.warning(
                "'%s' was compiled with something that cannot be loaded, so it is treated as not compiled. To "
                "compile it, use --optimizer and --loss (%s)",
                path,
                error,
            )
            return model
        raise


def load_data(source: str) -> Any:
    """Return the data that ``package.module:function`` returns.

    Raises:
      InvalidRequestError: there is no such function, or it fails.
    """
    return _run(f"load data from '{source}'", lambda: _called_by_name(source, lambda found: not callable(found)))


def _from_function(source: str) -> keras.Model:
    is_model = lambda found: isinstance(found, keras.Model)  # noqa: E731
    return _called(f"make a model from '{source}'", lambda: _called_by_name(source, is_model))


def _called_by_name(source: str, is_made: Callable[[Any], bool]) -> Any:
    """Return what ``package.module:function`` returns, or what has that name, if that is it already."""
    module_name, _, attribute = source.partition(":")
    with _working_folder_first():
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
        if is_made(found):
            return found
        _check_needs_nothing(found)
        return found()


def _check_needs_nothing(found: Any) -> None:
    if not callable(found):
        raise TypeError(f"it is a {type(found).__name__}, neither a function nor a keras.Model")
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return  # some classes do not say
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in kinds]
    if needed:
        raise TypeError(
            f"it is called without arguments, but needs {', '.join(needed)}. Give them default values, or name a "
            "function that needs none"
        )


@contextlib.contextmanager
def _working_folder_first() -> Iterator[None]:
    """Find modules in the working folder before all others, and then after all others.

    Whatever else lies there, such as a ``random.py``, must not be taken for a module of that name later on.
    """
    here = os.getcwd()
    if here in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
        sys.path.append(here)


def _from_applications(source: str, input_shape: Sequence[int] | None) -> keras.Model:
    name = check_application(source, [name for name in dir(keras.applications) if name[0].isupper()])
    shape = None if input_shape is None else tuple(input_shape)
    build = getattr(keras.applications, name)
    return _called(f"build keras.applications.{name}", lambda: build(weights=None, input_shape=shape))


def _run(what: str, code: Callable[[], Any]) -> Any:
    """Run somebody else's code; whatever it raises is bad input, not a fault of ours."""
    try:
        return code()
    except SystemExit as error:
        raise InvalidRequestError(
            f"cannot {what}: it ended the program (sys.exit({'' if error.code is None else repr(error.code)}))."
        ) from error
    except Exception as error:
        logging.debug("cannot %s", what, exc_info=True)
        raise InvalidRequestError(f"cannot {what}: {type(error).__name__}: {error}") from error


def _called(what: str, build: Callable[[], Any]) -> keras.Model:
    model = _run(what, build)
    if model is None:
        raise InvalidRequestError(f"cannot {what}: it returned None. It must return a keras.Model.")
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
            raise InvalidRequestError(f"Keras knows no {what} named '{name}'. Give a name of {where}.") from error
