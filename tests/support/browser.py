"""A real browser for tests: headless Chromium, driven by the DevTools protocol through a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MACOS = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
HOW_TO_GET = (
    "no browser: install Chromium (Debian: apt-get install chromium; macOS: brew install --cask chromium), or name one "
    "in KVSTRATA_BROWSER"
)

FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
)

# Chromium reads from descriptor 3 and writes to 4: this program moves the pipes there and becomes Chromium.
BECOME = """
import os, sys
read, write = (os.dup(int(number)) for number in sys.argv[1:3])
os.dup2(os.dup(read), 3), os.dup2(os.dup(write), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

# Runs in the page: resolves as soon as the expression is true.
WAIT = """
new Promise((resolve, reject) => {
  const until = Date.now() + %d;
  const check = () => {
    const found = (() => { try { return %s } catch { return false } })();
    if (found) resolve(found);
    else if (Date.now() > until) reject(new Error('never true: ' + %s));
    else setTimeout(check, 50);
  };
  check();
})
"""


def find_browser() -> str | None:
    named = os.environ.get("KVSTRATA_BROWSER")
    if named:
        return named
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return found or (MACOS if Path(MACOS).exists() else None)


class Page:
    """A tab. `complaints` are errors and warnings of its console, and uncaught exceptions."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.resize(width, height)
        # An endless animation would draw frames for as long as the page is open.
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def run(self, expression: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 60) -> Any:
        return self.run(WAIT % (int(timeout_s * 1000), expression, json.dumps(expression)))

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """Click at the position of the element on the screen."""
        point = self.run(
            f"""(() => {{ const it = document.querySelector({json.dumps(selector)});
            it.scrollIntoView({{block: 'center'}});
            const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=point[0], y=point[1], button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def choose(self, selector: str, value: str) -> None:
        self.run(
            f"""(() => {{ const it = document.querySelector({json.dumps(selector)}); it.value = {json.dumps(value)};
            it.dispatchEvent(new Event('change', {{bubbles: true}})) }})()"""
        )

    def screenshot(self, file: Path, height: int | None = None) -> None:
        """Take a picture of the whole page, or of its first `height` pixels."""
        width = self.run("innerWidth")
        clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}} if height else {}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, **clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def record_complaint(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} ({params['entry'].get('url', '')})")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))


class Browser:
    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out = os.fdopen(to_browser, "wb")
        self._in = os.fdopen(from_browser, "rb")
        self._rest = b""
        self._num_sent = 0
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        self._pages[session] = page
        return page

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self._num_sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            page = self._pages.get(answer.get("sessionId", ""))
            if page is not None:
                page.record_complaint(answer["method"], answer["params"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = self._in.read1()
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.send("Browser.close")
        with contextlib.suppress(OSError):
            self._out.close()
        self._in.close()


@contextlib.contextmanager
def browsing(program: str, profile: Path) -> Iterator[Browser]:
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    # Chromium refuses to run as root with its sandbox.
    flags = (*FLAGS, *(("--no-sandbox",) if os.geteuid() == 0 else ()), f"--user-data-dir={profile}")
    become = [sys.executable, "-c", BECOME, str(read_there), str(write_there)]
    process = subprocess.Popen(
        [*become, program, *flags, "about:blank"],
        pass_fds=(read_there, write_there),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_there)
    os.close(write_there)
    browser = Browser(write_here, read_here)
    try:
        yield browser
    finally:
        browser.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
