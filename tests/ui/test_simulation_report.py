"""The report of `greenroom simulate` in a browser: at two widths, light and dark, and on paper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from greenroom.core.model import TenantId
from greenroom.sim.cases import cases, play
from greenroom.sim.config import SimConfig
from greenroom.sim.results.report import html
from greenroom.sim.workloads import Mix, Poisson, zipf
from tests.sim.settings import gpu, names, setting, sim_model

# The text area of A4 with margins of a centimetre, in CSS pixels.
PAPER_PX = 718
WIDER_THAN_PAGE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
# Headings that are shown although nothing below them is.
EMPTY = """[...document.querySelectorAll("h2")].filter(one => one.checkVisibility() &&
  (!one.nextElementSibling?.checkVisibility() || one.nextElementSibling.tagName == "H2")).map(one => one.textContent)"""


# Bars that are drawn shorter than they are, or that leave no space for what is written at their end.
SQUEEZED = """[...document.querySelectorAll(".bars div")].filter(one => one.scrollWidth > one.clientWidth ||
  [...one.querySelectorAll("i")].some(part => getComputedStyle(part).flexShrink != "0")).length"""


# Texts of a plot that cover each other.
COVERED = """[...document.querySelectorAll("figure > svg")].flatMap(svg => {
  const boxes = [...svg.querySelectorAll("text")].map(one => [one.textContent, one.getBoundingClientRect()]);
  return boxes.flatMap(([one, a], number) => boxes.slice(number + 1).filter(([, b]) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom - 2 && b.top < a.bottom - 2).map(([two]) => [one, two]));
})"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every column, many cases, and requests that are lost."""
    models = [*(sim_model(name) for name in names(5)), sim_model("a-model-with-a-rather-long-name", 90_000)]
    base: SimConfig = setting(*models, devices=(gpu(24_576),))
    mix = Mix(
        zipf([str(model.spec.id) for model in models]), {TenantId("x"): 1.0, TenantId("y"): 2.0}, {0: 1.0, 1: 4.0}
    )
    compared = cases(["default"], [1, 2], [0, 131_072], [24_576, 81_920], [4, 16])
    results = [play(case, base, Poisson(mix, 1.0, 600.0)) for case in compared]
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(html(results, ["600 requests over 600 s.", "Loads take 5 s."]), encoding="utf-8")
    return file


@contextmanager
def opened(browser: Browser, report: Path, width: int, scheme: str) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    try:
        page = context.new_page()
        page.goto(report.as_uri())
        yield page
    finally:
        context.close()


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(("scheme", "colour"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 28)")])
def test_it_fits_the_screen_result_first(browser: Browser, report: Path, width: int, scheme: str, colour: str) -> None:
    with opened(browser, report, width, scheme) as page:
        assert not page.evaluate(WIDER_THAN_PAGE) and page.evaluate(EMPTY) == []
        assert page.evaluate(SQUEEZED) == 0 and page.evaluate(COVERED) == []
        assert background(page) == colour
        assert page.locator(".bottom").bounding_box()["y"] < 300  # type: ignore[index]
        assert page.locator("th[title]").count() == page.locator("th").count() - page.locator("details th").count()
        assert page.locator("circle.mark title").count() > 50


def test_on_paper_it_is_light_small_and_whole(browser: Browser, report: Path) -> None:
    with opened(browser, report, PAPER_PX, "dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert background(page) == "rgb(255, 255, 255)"
        assert not page.evaluate(WIDER_THAN_PAGE), "the table is cut off"
        assert page.evaluate(EMPTY) == [] and page.evaluate(SQUEEZED) == 0
        # Browsers leave out backgrounds, which bars are made of.
        assert page.evaluate("getComputedStyle(document.querySelector('.bars i')).printColorAdjust") == "exact"
        sizes = page.evaluate(
            "[...document.querySelectorAll('td, li, .bars span, figcaption, p')].map("
            "one => parseFloat(getComputedStyle(one).fontSize))"
        )
        assert max(sizes) <= 16, "none is larger than 12 pt"
