"""For MkDocs: what is right on a code host is made right on the site, page by page.

Links that leave docs/ lead to the pages that are brought in, or to the code host (the environment's ``REPO_URL``), or
become plain text. Notebooks become pages. ``<!-- api: NAME ... -->`` becomes what the docstrings say.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]

FOR_DEVELOPERS = ("defects.md", "renovation.md")
"""Records of our own work in tools/results/, which the site leaves out."""

BROUGHT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    **{
        path.relative_to(ROOT).as_posix(): f"results/{path.name}"
        for path in sorted((ROOT / "tools" / "results").glob("*.md"))
        if path.name not in FOR_DEVELOPERS
    },
}
"""What lies outside of docs/ and has a page on the site. (The first page says what README says.)"""

SOURCES = {page: source for source, page in BROUGHT.items() if page != "index.md"}

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")
_FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_API = re.compile(r"<!-- api: ([\w. ]+) -->")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, and let notebooks be pages."""
    for page, source in SOURCES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "site.css", content=(ROOT / "tools" / "docs" / "site.css").read_text("utf-8")))
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            files.append(File.generated(config, page_of(file.src_uri), content=markdown_of(Path(file.abs_src_path))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's text as the site needs it."""
    here = page.file.src_uri
    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(lambda link: led(link, here), _API.sub(directives, part)) for part in parts[::2]]
    return "".join(parts)


def directives(names: re.Match[str]) -> str:
    """Return what mkdocstrings reads, for names of the package."""
    return "\n\n".join(f"::: tf_memsaver.{name}" for name in names[1].split())


def led(link: re.Match[str], here: str) -> str:
    """Return a link as the site has it; ``here`` is the page that it stands on."""
    text, target, anchor = link[1], link[2], link[3] or ""
    place = posixpath.normpath(posixpath.join(posixpath.dirname(SOURCES.get(here, f"docs/{here}")), target))
    if place in BROUGHT:
        page = BROUGHT[place]
    elif place.startswith("docs/"):
        page = page_of(place.removeprefix("docs/"))
    elif url := os.environ.get("REPO_URL"):
        return f"[{text}]({url.rstrip('/')}/{place}{anchor})"
    else:
        return text
    if page == "index.md":
        anchor = ""
    return f"[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"


def page_of(path: str) -> str:
    """Return the page of a file below docs/."""
    return re.sub(r"\.ipynb$", ".md", path)


def markdown_of(notebook: Path) -> str:
    """Return a notebook as a page: text, code and what was printed."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            text = output.get("text") or output.get("data", {}).get("text/plain", ())
            if text:
                parts.append("```text\n" + "".join(text).rstrip() + "\n```")
    return "\n\n".join(parts) + "\n"
