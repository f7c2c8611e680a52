"""The report's page in a real browser: nothing overflows, everything is drawn, text can be read, and it prints.

Needs Chromium or Chrome: one on the path, or the one that BROWSER_BINARY names. Where there is none the tests are
skipped, and fail if REQUIRE_BROWSER is set.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from abft_tsm2.faults.analysis.report import as_html
from abft_tsm2.faults.analysis.summary import Summary
from tests.support.campaign_folders import clean, folder, lifelike, trial

pytestmark = pytest.mark.full

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (360, 1280)
SECONDS = 120  # far more than a browser takes
CONTRAST = 4.5  # of text, by WCAG 2.2, 1.4.3, level AA

# First in a page, so that it hears of every error; a resource that is missing is one too.
LISTEN = """<script>
var told = [];
addEventListener("error", e => told.push(String(e.message || (e.target && e.target.outerHTML) || e)), true);
addEventListener("unhandledrejection", e => told.push(String(e.reason)));
console.error = console.warn = (...words) => told.push(words.join(" "));
</script>"""

# Last in a page: measures it where it stands, and tells the page that shows it.
MEASURE = """<script>
addEventListener("load", () => {
  const root = document.documentElement, all = [...document.body.querySelectorAll("*")];
  const scrolls = e => e.closest(".wide, pre") !== null;
  const visible = e => e.checkVisibility() && e.getClientRects().length > 0;
  const numbers = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const luminance = rgb => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(e).backgroundColor);
      if (a > 0.99) return [r, g, b];
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
  };
  const texts = all.filter(e => visible(e) && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  const contrasts = texts.filter(e => !["SCRIPT", "STYLE"].includes(e.tagName)).map(e => {
    const style = getComputedStyle(e), colour = e instanceof SVGElement ? style.fill : style.color;
    const [one, other] = [numbers(colour).slice(0, 3), behind(e)].map(luminance);
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    return [ratio, e.tagName + " " + e.textContent.trim().slice(0, 40)];
  });
  parent.postMessage({
    name: NAME,
    width: innerWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    overflow: Math.max(root.scrollWidth, document.body.scrollWidth) - root.clientWidth,
    sticking: all.filter(e => visible(e) && !scrolls(e) && e.getBoundingClientRect().right > root.clientWidth + 0.5)
      .map(e => e.tagName + "." + e.getAttribute("class")).slice(0, 5),
    drawings: [...document.querySelectorAll("svg")].filter(e => e.closest("details:not([open])") === null)
      .map(e => e.getBoundingClientRect()).map(box => [box.width, box.height]),
    unreadable: contrasts.filter(pair => !(pair[0] >= LIMIT)).slice(0, 5),
    texts: contrasts.length,
    errors: told,
  }, "*");
});
</script>"""

SHOW = """<!DOCTYPE html><meta charset="utf-8"><style>:root { color-scheme: light dark }</style><pre id="result"></pre>
<script>
const found = [];
addEventListener("message", e => {
  found.push(e.data);
  document.getElementById("result").textContent = JSON.stringify(found);
});
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    named = os.environ.get("BROWSER_BINARY")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        why = f"there is no browser: BROWSER_BINARY is {named!r}, and looked for were {', '.join(BROWSERS)}"
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail(why)
        pytest.skip(why)
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A campaign that kept its promises, one that did not and is not finished, and one that has not begun."""
    broken = [trial(1600, outcome="sdc", note="C[3, 4] is off by 12, which was not said"), clean(1601, outcome="hang")]
    long = trial(1602, suite="a name without a space that is far too long for a telephone".replace(" ", "_"))
    campaigns: Mapping[str, dict[str, Any]] = {
        "kept": {"records": lifelike(1600)},
        "broken": {"records": [*lifelike(900), *broken, long], "trials": 5000, "finished": None},
        "empty": {"records": [], "trials": 100, "finished": None},
    }
    folders = {name: folder(tmp_path_factory.mktemp(name), **campaign) for name, campaign in campaigns.items()}
    return {name: as_html(Summary.read(path)) for name, path in folders.items()}


def run(browser: str, place: Path, page: Path, *options: str) -> str:
    """Show a page in a browser without a profile; what it prints."""
    command = [
        browser,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"),
        f"--user-data-dir={place / 'profile'}",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def measured(browser: str, place: Path, pages: Mapping[str, str], scheme: int) -> dict[tuple[str, int], dict[str, Any]]:
    """What a browser measures, by name and width; a frame is as narrow as asked for, which a window is not."""
    frames = []
    for name, text in pages.items():
        script = MEASURE.replace("NAME", json.dumps(name)).replace("LIMIT", str(CONTRAST))
        copy = text.replace("<head>", f"<head>{LISTEN}", 1).replace("</body>", f"{script}</body>", 1)
        assert copy.count("<script>") == text.count("<script>") + 2
        (place / f"{name}.html").write_text(copy, encoding="utf-8")
        frames += [f'<iframe src="{name}.html" width="{width}" height="900"></iframe>' for width in WIDTHS]
    (place / "show.html").write_text(SHOW + "".join(frames), encoding="utf-8")
    options = (f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=20000", "--dump-dom")
    shown = run(browser, place, place / "show.html", *options)
    result = re.search(r'<pre id="result">(.*?)</pre>', shown, re.DOTALL)
    assert result
    assert result[1], "no page has told anything"
    found = {(one["name"], one["width"]): one for one in json.loads(html.unescape(result[1]))}
    assert set(found) == {(name, width) for name in pages for width in WIDTHS}
    return found


def faults(found: Mapping[str, Any]) -> list[str]:
    """What is wrong with a page."""
    told = []
    if found["overflow"] > 0 or found["sticking"]:
        told.append(f"is {found['overflow']} px too wide: {found['sticking']}")
    if any(not (width > 5 and height > 5) for width, height in found["drawings"]):
        told.append(f"has a drawing of no size: {found['drawings']}")
    if found["unreadable"]:
        told.append(f"has text of too little contrast: {found['unreadable']}")
    if found["errors"]:
        told.append(f"has errors: {found['errors']}")
    return told


@pytest.fixture(scope="module")
def looks(browser: str, pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    """Measurements in the dark and in the light; which of the two numbers means which is the browser's affair."""
    both = [measured(browser, tmp_path_factory.mktemp("look"), pages, scheme) for scheme in (0, 1)]
    found = {next(iter(one.values()))["dark"]: one for one in both}
    assert set(found) == {True, False}
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["kept", "broken", "empty"])
def test_the_page_is_whole(looks, name, width, dark):
    found = looks[dark][name, width]
    assert found["dark"] is dark
    assert faults(found) == []
    assert found["texts"] > (50 if name == "empty" else 300)
    assert len(found["drawings"]) >= (8 if name == "empty" else 8 + 5)  # the swatches, and the charts


def test_the_measures_find_what_is_wrong(browser, tmp_path):
    wrong = {
        "wide": ('<div style="width: 2000px">wide</div>', "px too wide"),
        "sticking": ('<div style="position: relative; left: 4rem; height: 1px">sticks out</div>', "px too wide"),
        "pale": ('<p style="color: #999; background: #fff">pale</p>', "too little contrast"),
        "drawn": ('<svg><text y="20" style="fill: #888">axis</text></svg>', "too little contrast"),
        "flat": ('<svg width="0" height="20"></svg>', "drawing of no size"),
        "script": ("<script>nowhere()</script>", "has errors"),
        "lost": ('<img alt="" src="lost.png">', "has errors"),
    }
    head = '<!DOCTYPE html><html lang="en"><head><title>x</title></head><body style="background: #fff; color: #000">'
    pages = {name: f"{head}<p>text</p>{part}</body></html>" for name, (part, _) in wrong.items()}
    found = measured(browser, tmp_path, pages | {"good": f"{head}<p>text</p></body></html>"}, 1)
    for name, (_, told) in wrong.items():
        assert [told in text for text in faults(found[name, 360])] == [True], (name, faults(found[name, 360]))
    assert faults(found["good", 360]) == []


def printed(browser: str, place: Path, text: str) -> bytes:
    place.mkdir()
    (place / "page.html").write_text(text, encoding="utf-8")
    run(browser, place, place / "page.html", "--no-pdf-header-footer", f"--print-to-pdf={place / 'page.pdf'}")
    return (place / "page.pdf").read_bytes()


def sheets(pdf: bytes) -> int:
    return len(re.findall(rb"/Type\s*/Page\b", pdf))


def test_it_prints_and_what_is_folded_is_printed_too(browser, pages, tmp_path):
    whole = pages["kept"]
    folded = re.sub(r"<details>.*?</details>", "", whole, flags=re.DOTALL)
    assert folded != whole
    pdfs = [printed(browser, tmp_path / name, text) for name, text in (("whole", whole), ("less", folded))]
    assert all(pdf.startswith(b"%PDF-") for pdf in pdfs)
    assert len(pdfs[0]) > 20_000
    assert sheets(pdfs[0]) > sheets(pdfs[1]) > 2


def test_a_picture_of_it_is_dark_in_the_dark(browser, pages, tmp_path):
    import matplotlib.image

    brightness = []
    for scheme in (0, 1):
        place = tmp_path / str(scheme)
        place.mkdir()
        (place / "page.html").write_text(pages["broken"], encoding="utf-8")
        look = (f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1280,1600")
        run(browser, place, place / "page.html", *look, f"--screenshot={place / 'page.png'}")
        picture = matplotlib.image.imread(place / "page.png")[..., :3]
        assert picture.shape[1] == 1280
        assert picture.std() > 0.05  # something is drawn
        brightness.append(float(picture.mean()))
    assert min(brightness) < 0.3
    assert max(brightness) > 0.8
