"""The pages in a real browser: no errors, no requests, nothing wider than its window, a timeline that zooms."""

import json
import re
import shutil
import subprocess

import pytest

from profiling.by_hand import process, profile
from profiling.pages import ReadPage
from rollmill.profiler.advice import with_advice
from rollmill.profiler.report.comparison import compare, comparison_page
from rollmill.profiler.report.html import profile_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
PROBE = """
<script>
addEventListener("load", () => {
  const read = () => document.querySelector(".lane svg")?.getAttribute("viewBox") ?? "";
  const buttons = [...document.querySelectorAll(".tools button")];
  const press = (text) => buttons.find((one) => one.textContent == text)?.click();
  const seen = [read()];
  for (const text of ["+", "→", "whole window"]) { press(text); seen.push(read()); }
  const wide = [...document.querySelectorAll("body *")]
    .filter((one) => !one.closest(".scroll, details:not([open])"))
    .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
    .map((one) => one.className || one.tagName);
  const requests = performance.getEntriesByType("resource").length;
  parent.postMessage(JSON.stringify([requests, seen, innerWidth, wide]), "*");
});
</script>
"""


WIDTHS = (1280, 400)
FRAMES = "".join(
    [
        "<!doctype html><title></title><script>",
        'const found = []; addEventListener("message", (event) => { found.push(JSON.parse(event.data)); ',
        "found.sort((one, other) => other[2] - one[2]); document.title = JSON.stringify(found); });</script>",
        *(
            f'<iframe src="page.html" style="border: 0; width: {width}px; height: 3000px"></iframe>'
            for width in WIDTHS
        ),
    ]
)
"""A page in frames of several widths, since windows have a smallest one; `PROBE` reports to its title."""


def browse(path, *options):
    """The page as the browser made it, as HTML, and its lines on the console."""
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={path.parent / 'browser'}",
    ]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update", *options]
    command += ["--hide-scrollbars", "--enable-logging=stderr", "--window-size=1400,3000", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def pages():
    named = profile(processes=[process("actor/0"), process("long-name-" * 12), process()])
    return {
        "one": profile_page(with_advice(profile())),
        "several": profile_page(with_advice(named)),
        "two": comparison_page(compare(profile(), named)),
    }


@pytest.mark.parametrize("name", ["one", "several", "two"])
def test_a_page_is_shown_without_errors(name, tmp_path):
    text = pages()[name]
    (tmp_path / "page.html").write_text(text)
    shown, console = browse(tmp_path / "page.html")
    assert console == []
    buttons = ReadPage(shown).tags.count("button")
    assert buttons == (5 if "<script>" in text else 0), "the page's policy lets its own script run"


@pytest.mark.parametrize("name", ["one", "several", "two"])
def test_a_page_fits_requests_nothing_and_zooms(name, tmp_path):
    text = re.sub("<meta http-equiv[^>]*>", "", pages()[name]).replace("</body>", f"{PROBE}</body>")
    (tmp_path / "page.html").write_text(text)
    (tmp_path / "frames.html").write_text(FRAMES)
    shown, console = browse(tmp_path / "frames.html", "--virtual-time-budget=3000")
    assert console == []
    views = ["0 0 20000 10", "5000 0 10000 10", "10000 0 10000 10", "0 0 20000 10"] if name != "two" else [""] * 4
    requests, too_wide = 0, []
    found = json.loads(re.findall("<title>(.*?)</title>", shown)[0])
    assert found == [[requests, views, width, too_wide] for width in WIDTHS]


def test_errors_would_be_seen(tmp_path):
    broken = profile_page(profile()).replace("</body>", '<script>missing()</script><img src="x.png"></body>')
    (tmp_path / "page.html").write_text(broken)
    _, console = browse(tmp_path / "page.html")
    assert len(console) == 2 and all("Content Security Policy" in line for line in console)
