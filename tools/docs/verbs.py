"""For mkdocstrings: shows the options of a verb, which its decorator takes from the table, without TensorFlow.

A verb is written ``@takes(PlanOptions) def f(model, **options)``. Its signature and its section on arguments are made
when it is imported, which needs TensorFlow; the site is built without it. So both are made here, by the same code.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

from tf_memsaver.options import table, verbs

_TAKES = re.compile(r"takes\((\w+)\)")


class Verbs(griffe.Extension):
    """Puts the options of the table in the place of ``**options``."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Complete a function that is decorated with ``takes``."""
        groups = [found[1] for each in func.decorators if (found := _TAKES.fullmatch(str(each.value)))]
        if not groups or func.docstring is None:
            return
        group = getattr(table, groups[0])
        func.docstring.value = verbs.documented(func.docstring.value, group) or ""
        del func.parameters["options"]
        for name, option in table.options_of(group).items():
            func.parameters.add(
                griffe.Parameter(
                    name,
                    kind=griffe.ParameterKind.keyword_only,
                    default=ast.unparse(ast.parse(repr(option.default), mode="eval")),
                )
            )
