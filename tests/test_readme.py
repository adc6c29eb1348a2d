"""The README's Python blocks run, in order, in one process; its commands and links exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tf_memsaver.command.flags import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    found = blocks("python")
    assert len(found) >= 5
    for number, block in enumerate(found):
        exec(compile(block, f"README.md, block {number}", "exec"), names)
    assert (tmp_path / "plan.json").is_file() and (tmp_path / "exported" / "saved_model.pb").is_file()


def test_it_opens_with_commands_that_exist() -> None:
    for line in blocks("sh")[0].splitlines():
        assert (ROOT / line.split()[0]).stat().st_mode & 0o111


def test_command_lines_use_flags_that_exist() -> None:
    lines = [line.split() for block in blocks("sh") for line in block.splitlines() if line.startswith("tf-memsaver")]
    assert {words[1] for words in lines} == set(COMMANDS)
    for words in lines:
        used = {word[2:].split("=")[0] for word in words if word.startswith("--")}
        assert used <= set(COMMANDS[words[1]].flags)


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
