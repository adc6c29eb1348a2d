"""Targets of the compiler for GPUs that are not there, and that its environment needs nothing of ours."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tools.gpu import compiler
from tools.shared.results import ROOT


@pytest.mark.parametrize("name", compiler.TARGETS)
def test_a_target_says_what_xla_asks_for(name: str) -> None:
    text = compiler.description(name)
    major, minor = compiler.TARGETS[name].capability
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in text
    assert text.count("{") == text.count("}")
    assert f"device_memory_size: {compiler.TARGETS[name].memory_bytes}" in text


def test_the_compiler_imports_nothing_that_its_environment_lacks() -> None:
    lock = (ROOT / "tools/gpu.lock").read_text(encoding="utf-8")
    there = {"jax", "jaxlib", "jax_plugins", "numpy", *sys.stdlib_module_names}
    tree = ast.parse(Path(compiler.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {name.partition(".")[0] for name in names} <= there
    assert "jax-cuda12-plugin==" in lock
