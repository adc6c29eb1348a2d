"""What pyproject.toml cannot say: README as a package index shows it, where links into the repository lead nowhere.

The environment's ``REPO_URL`` is the repository's address, as for the site (``tools/docs/hook.py``). With it, links and
pictures lead there; without it, links become plain text and pictures are left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup

_FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def page(text: str, repository: str) -> str:
    """Return a page whose links into the repository lead to its address or, without one, are plain text."""

    def led(link: re.Match[str]) -> str:
        is_picture, words, target = link.groups()
        if not repository:
            return "" if is_picture else words
        return f"{is_picture}[{words}]({repository.rstrip('/')}/{'raw' if is_picture else 'blob'}/HEAD/{target})"

    parts = _FENCE.split(text)
    parts[::2] = [_LINK.sub(led, part) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=page(readme, os.environ.get("REPO_URL", "")),
        long_description_content_type="text/markdown",
    )
