"""Chromium without a window, driven by its DevTools protocol over two pipes: no package and no port."""

import base64
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENSHOTS = os.environ.get("ROLLMILL_SCREENSHOTS")
"""Folder that keeps a picture of each view of a test."""
SECONDS = 60
"""Seconds until an answer of the browser counts as missing."""
WIDE = """(() => {
  const scrolls = (one) => {
    for (let at = one; at && at.tagName != "BODY"; at = at.parentElement)
      if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(at).overflowX)) return true;
    return false;
  };
  const wide = [...document.querySelectorAll("body *")].filter((one) =>
    one.getBoundingClientRect().right > innerWidth + 1 && one.getBoundingClientRect().width && !scrolls(one));
  return {
    scroll: document.documentElement.scrollWidth, text: document.body.innerText,
    wide: [...new Set(wide.map((one) => one.tagName + " " + (one.textContent || "").trim().slice(0, 30)))]
  };
})()"""


class Seen(NamedTuple):
    """A page as a browser of one width and theme shows it."""

    page: str
    width: int
    theme: str
    text: str
    scroll: int
    """Width in pixels of all that it shows."""
    wide: list[str]
    """Elements that reach beyond the window, and that nothing around them scrolls."""
    console: list[str]
    """Warnings, errors and exceptions."""
    requests: list[str]
    """Addresses that it asked for, without `data:`."""
    failed: list[str]
    """Requests that failed, or that a server answered with an error."""


class Chromium:
    """A browser of one page. No name of another host can be resolved."""

    def __init__(self, profile) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        os.set_inheritable(to_browser, True)
        os.set_inheritable(from_browser, True)
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
        pipes = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", pipes, "chromium", *command, "--remote-debugging-pipe"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers, self._buffer, self._session = count(1), b"", None
        self._events: list[dict] = []
        self._page = ("about:blank", 0, "light")
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **params):
        """Calls a method of the protocol, and returns its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next_message()).get("id") != number:
            self._events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def look(self, address, *, width, theme="light", height=900, deficiency="none", wait=0.15) -> Seen:
        """Opens a page in a window of this width and in a theme, and returns what it shows and did."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.ask("Emulation.setEmulatedVisionDeficiency", type=deficiency)
        self._events.clear()
        self.ask("Page.navigate", url=address)
        self._page = (address, width, theme)
        self._until("Page.loadEventFired")
        self.rest(wait)
        return self.seen()

    def seen(self) -> Seen:
        """Returns what the page shows now and did since it was opened."""
        shown = self.value(WIDE)
        events = [(event.get("method"), event.get("params", {})) for event in self._events]
        return Seen(*self._page, shown["text"], shown["scroll"], shown["wide"], *_told(events))

    def value(self, expression):
        """Returns the value of an expression of JavaScript, awaited if it is a promise."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.ask("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path, *, whole=True) -> None:
        """Writes a PNG of the page, whole or as the window shows it."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def rest(self, seconds) -> None:
        """Lets the page go on for a while."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            if self._buffer.count(b"\0") or select.select([self._read], [], [], left)[0]:
                self._events.append(self._next_message())

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        self._process.wait(20)
        os.close(self._read)
        os.close(self._write)

    def _until(self, method):
        while True:
            self._events.append(self._next_message())
            if self._events[-1].get("method") == method:
                return

    def _next_message(self):
        ends = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], max(0.0, ends - time.monotonic()))[0], "no answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def _told(events):
    console, requests, failed = [], [], []
    for method, params in events:
        match method:
            case "Runtime.consoleAPICalled":
                console.append(f"{params['type']}: {[one.get('value') for one in params['args']]}")
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                console.append(str(details.get("exception", details).get("description", details)))
            case "Log.entryAdded":
                console.append(f"{params['entry']['level']}: {params['entry']['text']}")
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith(("data:", "blob:")):
                requests.append(params["request"]["url"])
            case "Network.loadingFailed" if not params.get("canceled"):
                failed.append(params["errorText"])
            case "Network.responseReceived" if params["response"]["status"] >= 400:
                failed.append(f"{params['response']['status']} {params['response']['url']}")
    return console, requests, failed


@contextmanager
def open_browser(profile):
    """Opens a browser with a folder for its profile, and ends it."""
    browser = Chromium(profile)
    try:
        yield browser
    finally:
        browser.close()


def keep_picture(browser, name) -> None:
    """Writes a picture of a view where somebody wants to look at them."""
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(exist_ok=True)
        browser.picture(Path(SCREENSHOTS) / name, whole=False)


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def served(folder):
    """Serves a folder on this machine, and yields its address."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
