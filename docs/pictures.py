"""Takes the pictures in docs/pictures of the page of a bundle, at the width of a phone, a desktop and paper.

python docs/pictures.py signoff-pr42982-.../    # needs Chromium and the extra `browser`
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parent / "pictures"
SIZES = {"phone": (390, 1600), "desktop": (1280, 1500), "print": (794, 1600)}
CHARTS = ("budget", "margins", "faults", "coverage")


def main(bundle: Path) -> None:
    """Take them all.

    Raises:
        SystemExit: no page in the bundle, or no Chromium.
    """
    chromium = os.environ.get("DSV32_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    page_file = (bundle / "report.html").resolve()
    if not chromium or not page_file.is_file():
        sys.exit(f"pictures: {'no Chromium; set DSV32_CHROMIUM' if not chromium else f'{page_file} is missing'}")
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="light")
        page.goto(page_file.as_uri())
        for name, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(media="print" if name == "print" else "screen")
            page.screenshot(path=FOLDER / f"report-{name}.png")
        page.emulate_media(media="screen", color_scheme="dark")
        page.set_viewport_size({"width": 1280, "height": 1500})
        for section in CHARTS:
            found = page.query_selector(f"section[aria-labelledby={section}] figure")
            if found:
                found.screenshot(path=FOLDER / f"{section}-dark.png")
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/pictures.py BUNDLE")
    main(Path(sys.argv[1]))
