"""A report's page in a real browser: no errors, no requests, light and dark, narrow and wide. No TensorFlow."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.display.reports import HOSTILE, report_of, step
from tf_memsaver.display.page import page

pytest.importorskip("plotly")
sync_api = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield Chromium: playwright's own, or the system's."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_api.sync_playwright() as playwright:
        try:
            # Root, as in a container, has no sandbox; the page is our own.
            launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(report_of(step(name=f"net {HOSTILE}"))), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens(browser: Any, file: Path, scheme: str, width: int) -> None:
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said, requests = list[str](), list[str]()
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto(file.as_uri())
    opened.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 6")

    assert said == []
    assert [url for url in requests if not url.startswith("data:")] == [file.as_uri()]
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    # Texts of the page and of the figures are seen on its background.
    paper, ink, tick = opened.evaluate(
        """() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
                  getComputedStyle(document.querySelector('#timeline .xtick text')).fill]"""
    )
    assert tick == ink and (paper == "rgb(255, 255, 255)") is (scheme == "light")

    box = opened.locator("#timeline").bounding_box()
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.wait_for_selector("#timeline .hoverlayer .hovertext")
    label = opened.locator("#timeline .hoverlayer .hovertext").first.text_content()
    assert "tensors alive" in label and "dense_" in label

    opened.get_by_role("button", name="Fold all", exact=True).click()
    assert opened.locator(".tree details[open]").count() == 0
    opened.get_by_role("button", name="Unfold all", exact=True).click()
    assert opened.locator(".tree details[open]").count() == opened.locator(".tree details").count()
    opened.close()
