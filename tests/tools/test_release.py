"""What a release says of itself: one version everywhere, and a page whose links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from tf_memsaver.compat.versions import __version__

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

page = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["page"]


def test_version_and_date_are_the_same_everywhere() -> None:
    changes = re.search(r"^## (\S+) \((\S+)\)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert changes is not None and changes[1] == __version__
    assert f"version: {__version__}\n" in citation and f'date-released: "{changes[2]}"\n' in citation


def test_without_an_address_nothing_leads_into_the_repository() -> None:
    text = page(README, "")
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []
    assert "tf_memsaver.optimize(model, data=train_ds)" in text and "[The guide]" not in text and "The guide" in text


def test_with_an_address_links_lead_there() -> None:
    text = page(README, "https://code.example/project/")
    assert "[The guide](https://code.example/project/blob/HEAD/docs/guide.md)" in text
    assert "](https://code.example/project/raw/HEAD/docs/timeline.svg)" in text
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []


def test_code_is_left_as_it_is() -> None:
    assert page("```python\na[0](b)\n```\n[a](b.md)\n", "") == "```python\na[0](b)\n```\na\n"
