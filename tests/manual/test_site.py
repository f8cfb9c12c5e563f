"""The built manual in a real browser, at two widths and in two themes: it fits, and says and asks nothing."""

import re
import shutil
import subprocess
import sys
from itertools import product

import pytest

from browser import BROWSER, keep_picture, open_browser, served
from manual.snippets import ROOT

pytest.importorskip("zensical", reason="zensical is not installed: pip install 'rollmill[docs]'")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install 'rollmill[docs]'")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
WIDTHS, THEMES = (1280, 400), ("light", "dark")


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
    with served(site) as address:
        yield address


def pages_of(site):
    return sorted(f"/{page.parent.relative_to(site)}/".replace("/./", "/") for page in site.rglob("index.html"))


@pytest.mark.slow
@needs_browser
def test_every_page_fits_is_silent_and_asks_nobody_else(site, address, tmp_path):
    """ROLLMILL_SCREENSHOTS=FOLDER keeps a picture of each view there."""
    pages = pages_of(site)
    assert len(pages) >= 40
    wrong = []
    with open_browser(tmp_path) as browser:
        for page, width, theme in product(pages, WIDTHS, THEMES):
            seen = browser.look(address + page, width=width, theme=theme)
            wrong += [(page, width, theme, *problems(seen, address))] if any(problems(seen, address)) else []
            keep_picture(browser, f"manual{page.replace('/', '-')}{width}-{theme}.png")
    assert wrong == []


def problems(seen, address):
    """Returns what a page should not have: messages, requests to others, failures, overflow, raw marks."""
    others = [one for one in seen.requests if not one.startswith(address)]
    raw = [mark for mark in ("```", "<!--", "::: ", "--8<--") if mark in seen.text]
    return seen.console, others, seen.failed, seen.wide, raw, seen.scroll > seen.width


@pytest.mark.slow
@needs_browser
def test_what_is_wrong_would_be_seen(site, address, tmp_path):
    broken = (site / "index.html").read_text()
    far = '<img src="https://example.invalid/x.png"><div style="width: 3000px">wide</div>'
    far += "<p>::: raw</p><script>missing()</script>"
    (site / "broken").mkdir(exist_ok=True)
    (site / "broken/page.html").write_text(broken.replace("</article>", f"{far}</article>"))
    with open_browser(tmp_path) as browser:
        seen = browser.look(f"{address}/broken/page.html", width=400)
    console, others, failed, wide, raw, too_wide = problems(seen, address)
    assert "missing is not defined" in " ".join(console) and others == ["https://example.invalid/x.png"]
    assert "net::ERR_NAME_NOT_RESOLVED" in failed and "DIV wide" in wide and raw == ["::: "] and too_wide


@pytest.mark.slow
def test_the_index_for_language_models_names_pages_of_the_site(site):
    addresses = re.findall(r"\]\((\S+)\)", (site / "llms.txt").read_text())
    assert len(addresses) >= 40
    assert [one for one in addresses if not (site / one / "index.html").is_file()] == []
