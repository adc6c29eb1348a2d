"""What ``import tf_memsaver`` gives, and what it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap

import pytest

import tf_memsaver
from tf_memsaver import api, errors
from tf_memsaver.compat.versions import versions


def test_importing_loads_neither_tensorflow_nor_numpy() -> None:
    loaded = (
        "import sys, tf_memsaver; dir(tf_memsaver); sys.exit(bool({'tensorflow', 'keras', 'numpy'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", loaded], check=True)


@pytest.mark.parametrize("name", tf_memsaver.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(tf_memsaver, name) is not None and name in dir(tf_memsaver)


def test_all_verbs_and_errors_are_at_the_root() -> None:
    family = [item for _, item in inspect.getmembers(errors, inspect.isclass) if item.__module__ == errors.__name__]
    for item in [*family, *(getattr(api, name) for name in api.__all__)]:
        assert getattr(tf_memsaver, item.__name__) is item


def test_another_name_is_none_of_it() -> None:
    with pytest.raises(AttributeError, match="module 'tf_memsaver' has no attribute 'optimise'"):
        tf_memsaver.optimise  # noqa: B018
    assert not [name for name in dir(tf_memsaver) if name not in tf_memsaver.__all__ and not name.startswith("__")]


def test_versions() -> None:
    found = dict(versions())
    assert found["tf_memsaver"] == tf_memsaver.__version__ and list(found) == sorted(found)


@pytest.mark.parametrize("name", [name for name in api.__all__ if inspect.isfunction(getattr(api, name))])
def test_every_verb_says_what_its_keywords_are(name: str) -> None:
    verb = getattr(api, name)
    parameters = inspect.signature(verb).parameters.values()
    keywords = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    assert "options" not in keywords
    arguments = inspect.getdoc(verb).partition("\nArgs:\n")[2].partition("\nRaises:\n")[0]
    assert all(f"\n  {keyword}: " in f"\n{arguments}" for keyword in keywords)


def test_the_help_of_optimize_stands_by_itself() -> None:
    text, signature = inspect.getdoc(tf_memsaver.optimize), inspect.signature(tf_memsaver.optimize)
    assert text is not None
    _, _, rest = text.partition("Example::\n")
    example, _, rest = rest.partition("\nArgs:\n")
    compile(textwrap.dedent(example), "the example", "exec")
    assert "tf_memsaver.optimize(model, data=" in example and "budget=" in example
    assert all(f"  {name}: " in rest for name in signature.parameters)
    assert not any(isinstance(each.annotation, str) for each in signature.parameters.values())
    assert inspect.signature(tf_memsaver.search_plan).return_annotation is tf_memsaver.Plan
