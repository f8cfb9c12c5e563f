"""The built manual in a real browser: no errors, no requests to others, nothing wider than its window."""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading

import pytest

from manual.snippets import ROOT

pytest.importorskip("zensical", reason="zensical is not installed: pip install 'rollmill[docs]'")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install 'rollmill[docs]'")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
WIDTHS = (1280, 400)
FRAMES = """<!doctype html><title></title><body><script>
const pages = PAGES, widths = WIDTHS, found = [];
const scrolls = (one) => {
  for (let at = one; at && at.tagName != "BODY"; at = at.parentElement)
    if (["auto", "scroll", "hidden", "clip"].includes(at.ownerDocument.defaultView.getComputedStyle(at).overflowX))
      return true;
  return false;
};
function look(page, width) {
  return new Promise((done) => {
    const frame = document.createElement("iframe");
    Object.assign(frame, {src: page, style: `border: 0; width: ${width}px; height: 900px`});
    frame.onload = () => setTimeout(() => {
      const inside = frame.contentDocument, view = frame.contentWindow;
      const wide = [...inside.querySelectorAll("article *, header *")].filter(
        (one) => one.getBoundingClientRect().right > width + 1 && !scrolls(one));
      const others = view.performance.getEntriesByType("resource").map((one) => one.name)
        .filter((name) => new URL(name).host != location.host);
      const text = inside.querySelector("article").innerText;
      const raw = ["```", "<!--", "::: ", "--8<--"].filter((mark) => text.includes(mark));
      found.push({page, width, scroll: inside.documentElement.scrollWidth, others, raw,
        wide: [...new Set(wide.map((one) => one.tagName + " " + one.innerText.slice(0, 30)))]});
      frame.remove();
      done();
    }, 100);
    document.body.append(frame);
  });
}
(async () => {
  for (const page of pages) for (const width of widths) await look(page, width);
  document.title = JSON.stringify(found);
  document.body.innerHTML = "";
})();
</script>"""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manual")
    for name in ("docs", "examples"):
        shutil.copytree(
            ROOT / name, folder / name
        )  # Zensical follows no links, and builds beside the real mkdocs.yml
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    (folder / "src").symlink_to(ROOT / "src")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def address(site):
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def browse(address, profile, *options):
    """The page as the browser made it, as HTML, and its lines on the console; no other host can be found."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
    command += ["--enable-logging=stderr", "--window-size=1400,1000", *options, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def pages_of(site):
    return sorted(f"/{page.parent.relative_to(site)}/".replace("/./", "/") for page in site.rglob("index.html"))


@pytest.mark.slow
@needs_browser
def test_every_page_fits_is_silent_and_asks_nobody_else(site, address, tmp_path):
    pages = pages_of(site)
    assert len(pages) >= 40
    frames = FRAMES.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "frames.html").write_text(frames)
    shown, console = browse(f"{address}/frames.html", tmp_path, "--virtual-time-budget=120000", "--dump-dom")
    assert console == []
    found = json.loads(html.unescape(re.findall("<title>(.*?)</title>", shown, re.S)[0]))
    assert [(one["page"], one["width"]) for one in found] == [(page, width) for page in pages for width in WIDTHS]
    assert [one for one in found if one["others"] or one["raw"]] == []
    assert [one for one in found if one["scroll"] > one["width"] or one["wide"]] == []


@pytest.mark.slow
@needs_browser
def test_what_is_wrong_would_be_seen(site, address, tmp_path):
    broken = (site / "index.html").read_text()
    far = '<img src="https://example.invalid/x.png"><div style="width: 3000px">wide</div>'
    far += "<script>missing()</script>"
    (site / "broken").mkdir(exist_ok=True)
    (site / "broken/page.html").write_text(broken.replace("</article>", f"{far}</article>"))
    frames = FRAMES.replace("PAGES", '["/broken/page.html"]').replace("WIDTHS", "[400]")
    (site / "frames.html").write_text(frames)
    shown, console = browse(f"{address}/frames.html", tmp_path, "--virtual-time-budget=20000", "--dump-dom")
    found = json.loads(re.findall("<title>(.*?)</title>", shown, re.S)[0])[0]
    assert found["others"] == ["https://example.invalid/x.png"] and "DIV wide" in found["wide"]
    assert any("missing is not defined" in line for line in console)


@pytest.mark.slow
def test_the_index_for_language_models_names_pages_of_the_site(site):
    addresses = re.findall(r"\]\((\S+)\)", (site / "llms.txt").read_text())
    assert len(addresses) >= 40
    assert [one for one in addresses if not (site / one / "index.html").is_file()] == []
