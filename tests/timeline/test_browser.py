"""The page in a real browser.

``INFINIPIPE_BROWSER`` names a Chromium or Chrome that must exist and work: the tests fail without it. If it is not set, one
found on the path is used, and without any the tests are skipped.
"""

from __future__ import annotations

import html
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from infinipipe.timeline import Timeline
from infinipipe.timeline.describe import describe_chunks
from infinipipe.timeline.page import html_page
from infinipipe.timeline.themes import THEMES

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=3000",
    "--window-size=1400,900",
)

PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const canvas = document.querySelector("canvas"), panel = panels[0], seen = {};
  const box = canvas.getBoundingClientRect();
  const point = (x, y) => ({ bubbles: true, cancelable: true, clientX: box.left + x, clientY: box.top + y });
  const at = (time, y) => {
    canvas.dispatchEvent(new PointerEvent("pointermove", point(panel.x(time), y)));
    return tip.innerText;
  };
  const last = panel.timeline.stages[0].spans.find(s => s[0] === "B" && s[1] === 5);
  seen.backward = at((last[2] + last[3]) / 2, panel.rowTop(0) + 5);
  seen.bubble = at(1e-6, panel.rowTop(1) + 5);
  seen.memory = at(panel.timeline.makespan / 2, panel.curveTop(1) + 5);
  seen.whole = [view.from, view.to];
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -800, ...point(700, 20) }));
  seen.zoomed = [view.from, view.to];
  document.getElementById("reset").click();
  seen.reset = [view.from, view.to];
  const out = document.createElement("output");
  out.id = "probe";
  out.textContent = JSON.stringify(seen);
  document.body.append(out);
}, 200));
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    named = os.environ.get("INFINIPIPE_BROWSER")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if named and not found:
        pytest.fail(f"INFINIPIPE_BROWSER is {named!r}, which is not there")
    if not found:
        pytest.skip("no Chromium on the path; install one, or set INFINIPIPE_BROWSER")
    return found


def run_browser(browser: str, profile: Path, *arguments: str) -> str:
    command = [browser, *FLAGS, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(scope="module")
def page(simulated: Timeline, measured: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "timeline.html"
    path.write_text(html_page([simulated, measured]).replace("</body>", PROBE + "</body>"))
    return path


@pytest.fixture(scope="module")
def document(browser: str, page: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page's elements once its script has run."""
    return run_browser(browser, tmp_path_factory.mktemp("profile"), "--dump-dom", page.as_uri())


@pytest.fixture(scope="module")
def probed(document: str) -> dict[str, Any]:
    """What the page answered to a pointer and a wheel."""
    text = document.partition('<output id="probe">')[2].partition("</output>")[0]
    result: dict[str, Any] = json.loads(html.unescape(text))
    return result


def test_the_page_builds_both_panels_and_their_tables(document: str, simulated: Timeline) -> None:
    assert document.count("<canvas") == 2
    assert "<h2>simulated</h2>" in document
    assert "<h2>measured, step 3</h2>" in document
    assert document.count("<tr>") == 2 * (1 + simulated.num_stages)
    assert "exposed communication" in document


def test_hovering_tells_kind_and_slices(probed: dict[str, Any]) -> None:
    words = probed["backward"]
    assert "Backward of chunk 5 on stage 0" in words
    assert "2 layers recomputed in" in words
    assert "hybrid chunk of pipeline 0: 3,100 tokens after 3,000 of context" in words
    assert "sequence 1, slice 2 of 2, tokens 3,000 to 5,000 of 5,000" in words
    assert "Stage 1 idles: bubble" in probed["bubble"]
    assert "of the budget" in probed["memory"]


def test_the_wheel_zooms_and_the_button_shows_all(probed: dict[str, Any], measured: Timeline) -> None:
    assert probed["whole"] == probed["reset"] == [0, pytest.approx(measured.makespan)]
    begin, end = probed["zoomed"]
    assert 0 < begin < end < measured.makespan
    assert end - begin < measured.makespan / 3


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_shows_all_colours(theme: str, browser: str, page: Path, simulated: Timeline, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    run_browser(browser, tmp_path / "profile", f"--screenshot={picture}", f"{page.as_uri()}#theme={theme}")
    pixels = np.asarray(Image.open(picture).convert("RGB"), np.int64) @ [1 << 16, 1 << 8, 1]
    counts = {f"#{color:06x}": count for color, count in zip(*np.unique(pixels, return_counts=True), strict=True)}
    assert counts.get(THEMES[theme]["panel"], 0) > 100_000
    for name in ("bubble", "link", "memory-fill", "packed"):
        assert counts.get(THEMES[theme][name], 0) > 30, name
    for chunk in describe_chunks(simulated):
        assert counts[chunk.colors["F"]] > 20
        assert counts[chunk.colors["B"]] > 50
