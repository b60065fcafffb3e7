"""The page in a real browser: no error, no request, no accessibility finding, nothing cut at phone, desktop and print.

Needs Chromium (`DSV32_CHROMIUM` names another one) and the extra `browser`; skipped with the reason elsewhere.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_worlds import make_bundle, whole_run

from dsv32_fuzz.events import Event, TableMade, VerdictReached
from dsv32_fuzz.faults import AREAS
from dsv32_fuzz.verdict import MARGIN_EDGES, Status, Verdict
from dsv32_ref.bounds import EDGES
from dsv32_reports.fold import fold
from dsv32_reports.html_page import render_history

pytestmark = pytest.mark.browser
CHROMIUM = os.environ.get("DSV32_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or ""
WIDTHS = {"phone": 360, "desktop": 1280, "print": 794}
NARROWEST_TEXT = "[...document.querySelectorAll('h1,h2,h3,p,li,.badge')].filter(e => e.checkVisibility())"


def pictured_run() -> list[Event]:
    """A failing run that has everything that the page draws."""
    flips = [0] * 5 + [3] + [0] * (len(MARGIN_EDGES) - 5)
    same = [1] * (len(MARGIN_EDGES) + 1)
    beyond = [900, *[0] * (len(EDGES) - 2), 99, 1]
    shown = {
        ("step", "stage_numerics"): {"budget used: attn_z": beyond},
        ("router", "router_precision"): {"router margin: same choice": same, "router margin: flipped": flips},
    }
    extra: list[Event] = [
        VerdictReached(
            phase=f"check:{family}",
            scope=check,
            verdict=Verdict(
                check=check, status=Status.PASSED, summary="seen", measured={"steps": 1}, histograms=histograms
            ),
        )
        for (family, check), histograms in shown.items()
    ]
    ratio: dict[str, float | int | str] = {"ratio": 0.97, "ratio_low": 0.96, "ratio_high": 0.98}
    faster = Verdict(check="latency", status=Status.PASSED, summary="faster", measured=ratio)
    extra.append(VerdictReached(phase="given", scope="latency", verdict=faster))
    steps = [{"traffic": "decode", "step": i, "forced": 1e-3 * (i + 1), "free": 2e-3} for i in range(3)]
    killers = [("key", "key_sufficiency"), ("key", ""), *((area, "router_choice") for area in AREAS)]
    fault = {"fault": "f", "story": "a defect", "reference": "a report", "examples": 1, "seconds": 0.1}
    extra.append(TableMade(name="drift", rows=steps))
    extra.append(TableMade(name="kill_matrix", rows=[{**fault, "area": a, "killed_by": k} for a, k in killers]))
    run = whole_run(failing=True, approver="A. N. Other")
    return [*run[:-1], *extra, run[-1]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="install the extra `browser`")
    if not CHROMIUM:
        pytest.skip("no Chromium found; install it or set DSV32_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module", params=["report", "history"])
def page_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    if request.param == "report":
        make_bundle(folder / "run", pictured_run())
        return folder / "run" / "report.html"
    report = fold(whole_run(), "x")
    points = {("in-tree, pr47766", "upper bound"): [(str(i), i / 10 + 0.1) for i in range(8)]}
    (folder / "history.html").write_text(render_history([], points, []))
    assert report.findings == []
    return folder / "history.html"


@pytest.fixture(params=["light", "dark"])
def opened(request: pytest.FixtureRequest, browser: Any, page_file: Path) -> Iterator[tuple[Any, list[str]]]:
    """The page, and everything that it complained of or asked the network for."""
    context = browser.new_context(color_scheme=request.param)
    page = context.new_page()
    seen: list[str] = []
    page.on("console", lambda message: seen.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: seen.append(f"error: {error}"))
    page.on("request", lambda asked: None if asked.url == page_file.as_uri() else seen.append(f"request: {asked.url}"))
    page.goto(page_file.as_uri())
    yield page, seen
    context.close()


def test_it_opens_without_error_or_request(opened: tuple[Any, list[str]]) -> None:
    page, seen = opened
    assert page.title()
    assert seen == []


def test_axe_finds_nothing_serious(opened: tuple[Any, list[str]]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="install the extra `browser`").Axe()
    page, _ = opened
    found = axe.run(page).response
    assert len(found["passes"]) > 10
    serious = [issue for issue in found["violations"] if issue["impact"] in ("serious", "critical")]
    assert serious == [], [(issue["id"], [node["html"] for node in issue["nodes"]][:3]) for issue in serious]


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_or_overlaps(opened: tuple[Any, list[str]], width: str) -> None:
    page, _ = opened
    page.set_viewport_size({"width": WIDTHS[width], "height": 900})
    page.emulate_media(media="print" if width == "print" else "screen")
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]
    cut = f"{NARROWEST_TEXT}.filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0).map(e => e.outerHTML)"
    assert page.evaluate(cut) == []
    beyond = """[...document.querySelectorAll('svg text')].filter(e => {
      const a = e.getBoundingClientRect(), b = e.ownerSVGElement.getBoundingClientRect();
      return a.width && (a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1);
    }).map(e => e.textContent)"""
    assert page.evaluate(beyond) == []
    boxes = f"{NARROWEST_TEXT}.filter(e => !e.children.length).map(e => e.getBoundingClientRect().toJSON())"
    placed = [box for box in page.evaluate(boxes) if box["width"] and box["height"]]
    assert len(placed) >= 3
    overlapping = [(a, b) for i, a in enumerate(placed) for b in placed[i + 1 :] if _overlap(a, b)]
    assert overlapping == []


def _overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    across = min(a["right"], b["right"]) - max(a["left"], b["left"])
    down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
    return across > 1 and down > 1


def test_every_section_is_there(browser: Any, tmp_path: Path) -> None:
    make_bundle(tmp_path / "run", pictured_run())
    page = browser.new_page()
    page.goto((tmp_path / "run" / "report.html").as_uri())
    headings = [heading.inner_text() for heading in page.query_selector_all("h2")]
    wanted = [
        "By traffic",
        "Gates",
        "Not judged",
        "Counterexamples",
        "Errors against their bounds",
        "Router margins",
        "Error over many steps",
        "How often the plan is reused",
        "Latency",
        "Would the checks have seen it?",
        "What the searches visited",
        "What each gate found",
        "Made with",
    ]
    assert [name for name in wanted if name not in headings] == []
    page.close()


def test_paper_shows_what_the_screen_folds_away(browser: Any, tmp_path: Path) -> None:
    make_bundle(tmp_path / "run", pictured_run())
    page = browser.new_page()
    page.goto((tmp_path / "run" / "report.html").as_uri())
    folded = "[...document.querySelectorAll('details:not([open]):not(.same) table')]"
    hidden = f"{folded}.filter(e => !e.checkVisibility()).length"
    assert page.evaluate(hidden) > 3
    page.emulate_media(media="print")
    assert page.evaluate(hidden) == 0
    page.close()


def test_the_probes_can_fail(browser: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="install the extra `browser`").Axe()
    page = browser.new_page()
    page.set_viewport_size({"width": 360, "height": 900})
    page.set_content(
        "<html><body><p style='color:#ddd;background:#fff'>pale</p><img src=x><h1 style='width:9999px'>w</h1>"
    )
    found = {issue["id"] for issue in axe.run(page).response["violations"]}
    assert {"color-contrast", "image-alt", "html-has-lang"} <= found
    assert page.evaluate("document.documentElement.scrollWidth") > 360
    page.close()
