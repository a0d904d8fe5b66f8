"""A real browser that looks at pages: one for all tests of a process, a page for each test."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

# It asks nobody for anything by itself.
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
)  # fmt: skip
SECONDS = 20.0  # that a page may take for anything
WIDTHS = (390, 1400)  # a telephone, a desk


@dataclass
class Seen:
    """A page, and all that it did and complained of."""

    page: Page
    requests: list[str] = field(default_factory=list)  # every address that it asked for
    failed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of the console, and exceptions

    def open(self, where: str | Path) -> Page:
        """Go to an address, or to a file."""
        self.page.goto(where.as_uri() if isinstance(where, Path) else where)
        return self.page

    def too_wide(self) -> int:
        """Pixels by which the page is wider than the window."""
        found: int = self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return found

    def blank(self) -> list[int]:
        """Canvases in which all pixels are alike, by their order."""
        found: list[int] = self.page.evaluate(BLANK)
        return found

    def violations(self) -> list[str]:
        """Violations of the rules of accessibility, by axe-core."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{rule['id']}: {node['target']} {node['failureSummary']}"
            for rule in found
            for node in rule["nodes"]
        ]

    def stops(self) -> list[str]:
        """The stops of the Tab key over the whole page, in its order; each with a visible focus."""
        self.page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")
        stops: list[str] = []
        while True:
            self.page.keyboard.press("Tab")
            name, outline, visible = self.page.evaluate(STOP)
            if not name or name in stops:
                return stops
            assert outline >= 2 and visible, name
            stops.append(name)

    def clean(self) -> None:
        """Nothing went wrong."""
        assert not self.errors and not self.failed


# The focused element's role and name, the width of its outline, and whether it is in the window.
STOP = """() => {
  const node = document.activeElement;
  if (node === document.body || !node) return ["", 0, false];
  const { outlineStyle, outlineWidth } = getComputedStyle(node);
  const { top, bottom } = node.getBoundingClientRect();
  const words = (node.getAttribute("aria-label") || node.innerText).split("\\n")[0];
  const kind = node.getAttribute("role") || node.tagName.toLowerCase();
  const width = outlineStyle === "none" ? 0 : parseFloat(outlineWidth);
  return [`${kind} ${words}`, width, bottom > 0 && top < innerHeight];
}"""
BLANK = """
[...document.querySelectorAll("canvas")].map((canvas, i) => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const pixels = new Uint32Array(data.buffer);
  return pixels.every((p) => p === pixels[0]) ? i : -1;
}).filter((i) => i >= 0)
"""


@pytest.fixture(
    scope="module"
)  # while the driver lives its loop runs in this thread, and no other can
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "there is no chromium: scripts/test installs it"
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture
def look(browser: Browser) -> Iterator[Callable[..., Seen]]:
    """Opens an empty page of a width; more is what playwright's new_context takes."""
    contexts = []

    def made(width: int = WIDTHS[1], height: int = 900, **more: Any) -> Seen:
        context = browser.new_context(viewport={"width": width, "height": height}, **more)
        contexts.append(context)
        context.set_default_timeout(1000 * SECONDS)
        page = context.new_page()
        seen = Seen(page)
        page.on("request", lambda request: seen.requests.append(request.url))
        # A page that is left ends its own requests.
        page.on("requestfailed", lambda request: request.failure == "net::ERR_ABORTED"
                or seen.failed.append(request.url))  # fmt: skip
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on(
            "console",
            lambda told: (
                seen.errors.append(told.text) if told.type in ("error", "warning") else None
            ),
        )
        return seen

    yield made
    for context in contexts:
        context.close()
