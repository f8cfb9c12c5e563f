"""The HTML page of the board. Its script fills it with data from the server."""

from pathlib import Path

from rollmill.pages import charts
from rollmill.pages.page import asset, escape_html, page

SOURCES = "connect-src 'self'; img-src 'self' data:; media-src 'self'; base-uri 'none'; form-action 'none'"
FRAME = """\
<header><h1>Runs in {folder}</h1>
<p class="dim" id="status" role="status">reading the folder …</p></header>
<div class="tools" id="states" role="group" aria-label="states"></div>
<div class="filters">
<input id="search" type="search" autocomplete="off" spellcheck="false" aria-label="filter"
 placeholder="filter: words, learning_rate=0.001, return>200">
<select id="algorithm" aria-label="algorithm"></select><select id="environment" aria-label="environment"></select>
<label><input id="flat" type="checkbox"> trials as rows</label>
</div>
<section id="compare" hidden><div class="tools">
<select id="metric" aria-label="metric"><option>episode/return</option></select>
<select id="axis" aria-label="axis"><option value="steps">over steps</option>
<option value="seconds">over seconds</option></select>
<label>smoothing <input id="smoothing" type="range" min="0" max="0.98" step="0.02" value="0"></label>
<label><input id="group" type="checkbox"> one line for all seeds</label>
<button id="clear" type="button">clear</button></div><div id="curves"></div></section>
<section id="details" hidden><div class="tools"><button id="close" type="button">close</button></div>
<div id="detail"></div></section>
<section><div class="scroll"><table id="runs"><thead></thead><tbody></tbody></table></div>
<p class="tools"><button id="more" type="button" hidden>more</button></p></section>
<section id="beside" hidden><h2>Other pages and pictures</h2><p class="links" id="files"></p></section>
<noscript><p>The board needs JavaScript; <code>rollmill runs</code> prints the same table.</p></noscript>"""


def board_page(folder: Path) -> str:
    """Returns the HTML page that shows the runs and sweeps of a folder."""
    script = asset(charts.__name__, "charts.js") + asset(__name__, "board.js")
    path = folder.absolute()
    body = [FRAME.format(folder=escape_html(str(path), most=100))]
    style = asset(__name__, "board.css")
    return page(f"Rollmill board: {path.name}", body, script=script, style=style, sources=SOURCES)
