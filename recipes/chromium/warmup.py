"""Start the browser, show it a page, and offer `visit`, `js`, `screenshot` and `cdp` to agents.

The browser runs as a user of its own, inside its own sandbox.  The page is driven over the Chrome
DevTools Protocol: a WebSocket whose connection goes on in every child, with the browser of that
child.
"""

import base64
import itertools
import json
import subprocess
import time
import urllib.request
from pathlib import Path

import websocket

PROGRAM = "chromium-headless-shell"
PORT = 9222
START_TIMEOUT_S = 1200.0
PROFILE = "/var/lib/browser/profile"
LOG = Path("/run/browser.log")

FLAGS = (
    f"--remote-debugging-port={PORT}",
    f"--user-data-dir={PROFILE}",
    "--window-size=1280,720",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-hang-monitor",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-first-run",
    "--password-store=basic",
)


class Page:
    """A tab of the browser."""

    def __init__(self, address):
        self._socket = websocket.create_connection(address, suppress_origin=True)
        self._numbers = itertools.count(1)
        self._events = []
        self.send("Page.enable")
        self.send("Page.setLifecycleEventsEnabled", {"enabled": True})

    def send(self, method, params=None, timeout_s=60.0):
        """Return the result of a method of the protocol.

        Raises `RuntimeError` with the browser's words if it refuses, and `TimeoutError`.
        """
        number = next(self._numbers)
        asked = {"id": number, "method": method, "params": params or {}}
        self._socket.send(json.dumps(asked))
        end = time.monotonic() + timeout_s
        while (said := self._hear(method, end)).get("id") != number:
            if "method" in said:
                self._events.append(said)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']['message']}")
        return said["result"]

    def open(self, url, timeout_s):
        """Go to an address; return once it has loaded.  Raises as `send`."""
        self._events.clear()
        went = self.send("Page.navigate", {"url": url}, timeout_s)
        if "errorText" in went:
            raise RuntimeError(f"{url}: {went['errorText']}")
        if "loaderId" not in went:  # another place on the same page
            return
        end = time.monotonic() + timeout_s
        while not any(_is_loaded(event, went["loaderId"]) for event in self._events):
            self._events = [self._hear(url, end)]

    def _hear(self, what, end):
        try:
            self._socket.settimeout(max(0.001, end - time.monotonic()))
            return json.loads(self._socket.recv())
        except websocket.WebSocketTimeoutException:
            raise TimeoutError(f"the browser had no answer in time: {what}") from None


def _is_loaded(event, loader):
    params = event.get("params", {})
    lifecycle = event.get("method") == "Page.lifecycleEvent"
    return lifecycle and (params["name"], params["loaderId"]) == ("load", loader)


def _start():
    """Start the browser; return the address of its page."""
    with LOG.open("wb") as log:
        browser = subprocess.Popen(
            [PROGRAM, *FLAGS, "about:blank"],
            user="browser",
            group="browser",
            extra_groups=[],
            cwd="/var/lib/browser",
            env={"HOME": "/var/lib/browser", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and browser.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/json/list", timeout=60) as said:
                pages = [each for each in json.load(said) if each["type"] == "page"]
        except OSError:
            time.sleep(0.1)
            continue
        if pages:
            return pages[0]["webSocketDebuggerUrl"]
    raise RuntimeError(f"the browser does not answer: {LOG.read_text()}")


_page = Page(_start())


def cdp(method, **params):
    """Return the result of any method of the DevTools protocol, such as `Page.printToPDF`."""
    return _page.send(method, params)


def js(expression, timeout_s=60.0):
    """Return the value of JavaScript in the page; a promise is awaited."""
    asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
    said = _page.send("Runtime.evaluate", asked, timeout_s)
    if "exceptionDetails" in said:
        details = said["exceptionDetails"]
        raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
    return said["result"].get("value")


def visit(url, timeout_s=60.0):
    """Go to an address; return the `url`, `title` and `text` of the page once it has loaded."""
    _page.open(url, timeout_s)
    return js("({url: location.href, title: document.title, text: document.body.innerText})")


def screenshot(path="/tmp/page.png"):
    """Draw what the window shows into a PNG file; return its path."""
    Path(path).write_bytes(base64.b64decode(cdp("Page.captureScreenshot", format="png")["data"]))
    return path


visit("data:text/html,<title>warm</title><h1>Warm</h1><p style='font-family:serif'>A page.<canvas>")
js("new Promise((done) => requestAnimationFrame(() => done([1, 2].map((n) => n * 2))))")
screenshot("/tmp/warm.png")
Path("/tmp/warm.png").unlink()
visit("about:blank")
