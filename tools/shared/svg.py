"""What the pictures of the docs have in common: their frame and their colours, on light pages and on dark ones."""

from __future__ import annotations

from collections.abc import Iterable

_STYLE = """
 text { font: 13px system-ui, sans-serif; fill: #444 }
 .title { font-size: 15px; font-weight: 600 }
 .grid { stroke: #999; stroke-width: 1; fill: none; opacity: .25 }
 @media (prefers-color-scheme: dark) { text { fill: #ccc } }
"""

RED, BLUE, GREY, GREEN = ("#c8553d", "#f08a72"), ("#2a6f97", "#6db6e0"), ("#7a7a7a", "#aaa"), ("#2b8a5b", "#6cc79a")
"""Colours on a light page and on a dark one."""


def coloured(selector: str, properties: Iterable[str], colour: tuple[str, str]) -> str:
    """Return the style that gives something a colour in some of its properties, such as ``fill``."""
    light, dark = ("; ".join(f"{name}: {each}" for name in properties) for each in colour)
    return f" {selector} {{ {light} }}\n @media (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}\n"


def picture(width: int, height: int, label: str, style: str, parts: Iterable[str]) -> str:
    """Return an SVG picture of some parts; ``label`` says what it shows to those who cannot see it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    return "\n".join([head, f"<style>{_STYLE}{style}</style>", *parts, "</svg>\n"])
