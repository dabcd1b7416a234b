"""What tests of pages share: headless Chromium without a network, and what a page holds and would load."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

CHROMIUM = [
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=8000",
    "--window-size=1200,3000",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]


class Page(HTMLParser):
    """Text outside scripts, ids, and everything the page would load."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self._hidden = False
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden = tag in ("script", "style")
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data"):
                self.loads.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += f"{data.strip()}|"


def assert_drawn(page: Path, plots: dict[str, list[str]], scratch: Path) -> None:
    """Chromium draws traces of these kinds in each plot, and a picture of the page that is not empty."""
    picture = scratch / "page.png"
    common = [*CHROMIUM, f"--user-data-dir={scratch / 'profile'}"]
    url = page.as_uri()
    dump = subprocess.run(
        [*common, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True
    )
    body = dump.stdout[dump.stdout.index("<main>") :]
    for plot, kinds in plots.items():
        drawn = body[body.index(f'id="{plot}"') :]
        drawn = drawn[: drawn.index("<script")]
        assert 'class="main-svg"' in drawn, f"{plot}: plotly drew nothing"
        for kind in kinds:
            assert re.search(rf'class="trace {kind}\b', drawn), f"{plot}: no {kind}"
    subprocess.run([*common, f"--screenshot={picture}", url], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 100_000, "the page is all but empty"
