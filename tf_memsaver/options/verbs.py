"""A verb is a function with ``**options``: their names, defaults, checks and docs come from the table."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast, get_type_hints

from tf_memsaver.options.checks import did_you_mean
from tf_memsaver.options.table import checked, options_of, types_of

Verb = TypeVar("Verb", bound=Callable[..., Any])

_WIDTH = 116
_ARGS = "Args:\n"


def takes(group: Any) -> Callable[[Verb], Verb]:
    """Return a decorator for a function whose ``**options`` are those of ``group``, a class of the table.

    The function is called with all of them, checked, and as we use them. ``inspect.signature`` and ``help`` show each
    with its default; what the docstring's section on arguments does not say, is put after what it says.
    """

    def decorated(verb: Verb) -> Verb:
        signature = _signature(verb, group)

        @functools.wraps(verb)
        def call(*args: Any, **given: Any) -> Any:
            bound = _bound(verb.__name__, signature, args, given)
            taken = {name: bound.kwargs[name] for name in options_of(group)}
            return verb(*bound.args, **{**bound.kwargs, **checked(group, **taken)})

        call.__dict__["__signature__"] = signature
        call.__annotations__ = {
            **{parameter.name: parameter.annotation for parameter in signature.parameters.values()},
            "return": signature.return_annotation,
        }
        call.__doc__ = documented(verb.__doc__, group)
        return cast(Verb, call)

    return decorated


def _signature(verb: Callable[..., Any], group: Any) -> inspect.Signature:
    """Return the verb's signature with the options in the place of ``**options``."""
    own = inspect.signature(verb)
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=types_of(group)[name],
        )
        for name, option in options_of(group).items()
    ]
    kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    kept = [each.replace(annotation=_as_type(verb, each.annotation)) for each in kept]
    returned = _as_type(verb, own.return_annotation)
    return own.replace(parameters=[*kept, *options], return_annotation=returned)


def _as_type(verb: Callable[..., Any], annotation: Any) -> Any:
    """Return the type that an annotation of a verb's file names, or its text where that is known to checkers alone."""
    said = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(said, vars(inspect.getmodule(verb)))["it"]
    except NameError:
        return annotation


def _bound(name: str, signature: inspect.Signature, args: Any, given: dict[str, Any]) -> inspect.BoundArguments:
    """Return the arguments of a call, with defaults.

    Raises:
      TypeError: the arguments are not those of the signature; of a wrong keyword it names those that are close.
    """
    for keyword in given:
        if keyword not in signature.parameters:
            known = [each.name for each in signature.parameters.values() if each.kind is each.KEYWORD_ONLY]
            hint = did_you_mean(keyword, known) or f" It takes {', '.join(known)}."
            raise TypeError(f"{name}() got an unexpected keyword argument '{keyword}'.{hint}")
    try:
        bound = signature.bind(*args, **given)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None
    bound.apply_defaults()
    return bound


def documented(docstring: str | None, group: Any) -> str | None:
    """Return a docstring whose section on arguments has all options of a group."""
    if docstring is None:  # Python runs without docstrings.
        return None
    text = _with_arguments(inspect.cleandoc(docstring))
    before, _, rest = text.partition(_ARGS)
    own, gap, after = rest.partition("\n\n")
    options = {name: option for name, option in options_of(group).items() if f"  {name}: " not in own}
    lines = [_entry(name, option.description) for name, option in options.items()]
    return "".join([before, _ARGS, "\n".join(filter(None, [own.rstrip(), *lines])), gap, after])


def _with_arguments(text: str) -> str:
    """Return a docstring that has a section on arguments, if need be an empty one before what it returns and raises."""
    if _ARGS in text:
        return text
    places = [text.find(f"\n\n{section}:\n") for section in ("Returns", "Raises")]
    place = min((place for place in places if place >= 0), default=len(text))
    return f"{text[:place]}\n\n{_ARGS}{text[place:]}"


def _entry(name: str, description: str) -> str:
    return textwrap.fill(f"{name}: {description}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
