"""What README.md and docs/ show is so: Python blocks run, in order; commands, flags, links, paths and names exist."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from tf_memsaver.command.flags import COMMANDS
from tf_memsaver.errors import MissingExtraError
from tf_memsaver.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

FOLLOWED = "adding"
"""The page whose blocks are files and changes: ``test_adding`` follows it."""

PACKAGE = ROOT / "tf_memsaver"
ROOMS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


RUN = [page for page in PAGES if blocks(page, "python") and page.stem != FOLLOWED]

OPTIONAL = ("keras_hub",)
"""Packages that some blocks need and the tools' environment lacks: the rest of such a page is skipped without them."""


# Keras 3.15 says so of every dataset that is given to fit.
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {"__name__": page.stem}
    for number, block in enumerate(blocks(page, "python")):
        for package in re.findall(r"^import (\w+)$", block, flags=re.MULTILINE):
            if package in OPTIONAL:
                pytest.importorskip(package)
        # A block stops where it needs an extra that is not installed here; what follows needs nothing of it.
        with contextlib.suppress(MissingExtraError):
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_the_first_screen_says_what_it_is_and_what_to_type() -> None:
    screen = "\n".join(README.read_text(encoding="utf-8").splitlines()[:50])
    for needed in (
        "gradient checkpointing",
        "rematerialization",
        "pip install",
        "optimize(",
        "tools/demo",
        "tools/test",
    ):
        assert needed in screen


def test_the_first_table_is_as_measured() -> None:
    rows = json.loads((ROOT / "tools" / "results" / "bench_models.json").read_text(encoding="utf-8"))["rows"]
    measured = {(row["model"], row["variant"]): row for row in rows}
    shown = re.findall(r"^\| (.*?) \| (.*?iB) \| (.*?iB) \| (\d+%) \| (.*?) \| identical \|$", README.read_text(), re.M)
    assert len(shown) == 5
    for name, plain_peak, peak, saved, step in shown:
        plain, optimized = (measured[name.replace("-", ""), variant] for variant in ("plain", "auto"))
        assert (plain_peak, peak) == (format_bytes(plain["peak_bytes"]), format_bytes(optimized["peak_bytes"]))
        assert saved == f"{1 - optimized['peak_bytes'] / plain['peak_bytes']:.0%}"
        assert step == f"{optimized['step_ratio']:.2f}×" and optimized["parity"]["identical"]


def test_commands_and_flags_exist() -> None:
    lines = [line.split() for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    assert {words[1] for words in lines if words[0] == "tf-memsaver"} == set(COMMANDS)
    for words in lines:
        if words[0] == "tf-memsaver":
            used = {word[2:].split("=")[0] for word in words if word.startswith("--")}
            assert used <= set(COMMANDS[words[1]].flags)
        elif words[0].startswith("tools/"):
            assert (ROOT / words[0]).stat().st_mode & 0o111


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        found = page.parent / target if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), anchor
    new = re.findall(r"^```python\n# (.*)$", text, flags=re.MULTILINE) if page.stem == FOLLOWED else []
    for path, name, others in re.findall(r"`([\w.]+/[\w./]*)(?:::?\s*([\w.]+))?[^`]*`((?:,\s+`\w+`(?!:))*)", text):
        found = file_named(path)
        if found is not None and path not in new:
            assert found.exists(), path
            # Names that follow that of one in a file are in the file, too.
            named = [*name.split("."), *re.findall(r"\w+", others if name else "")]
            for part in filter(None, named):
                assert re.search(rf"\b{part}\b", found.read_text(encoding="utf-8")), part
    for module in re.findall(r"python -m (tools[\w.]*)", text):
        found = ROOT / module.replace(".", "/")
        assert found.with_suffix(".py").exists() or (found / "__main__.py").exists(), module


def test_the_tables_that_recipes_name_exist() -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / "adding.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    tables = sorted(set(re.findall(r"`(_?[A-Z][A-Z_]+)`", text)))
    assert len(tables) > 8
    assert [name for name in tables if not re.search(rf"^{name}\b.* =", sources, re.M)] == []


def file_named(path: str) -> Path | None:
    """The file or folder of ours that a page names, from the root or within the package; None if it is another's."""
    first = path.split("/")[0]
    if first in ("docs", "tests", "tools", "tf_memsaver"):
        return ROOT / path
    return PACKAGE / path if first in ROOMS else None


SOURCES = [path for folder in ("tf_memsaver", "tests", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_docstrings_name_modules_that_exist() -> None:
    wrong = []
    for source in SOURCES:
        for name in re.findall(r"``((?:\w+[./])+\w+)(?:\.py)?``", source.read_text(encoding="utf-8")):
            room, module, *_ = re.split("[./]", name)
            if room in ROOMS and not (source.parent / f"{room}.py").exists():
                of_room = (PACKAGE / room / "__init__.py").read_text(encoding="utf-8")
                if not (PACKAGE / room / f"{module}.py").exists() and not re.search(rf"\b{module}\b", of_room):
                    wrong.append(f"{source.relative_to(ROOT)} names ``{name}``")
    assert not wrong
