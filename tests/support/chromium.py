"""A headless chromium, driven by the DevTools protocol over a pair of pipes: no driver and no port.

python tests/support/chromium.py file:///PAGE.html PICTURE.png HEIGHT
"""

import base64
import fcntl
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE = 60.0  # seconds that one answer may take on a busy machine
# chromium reads commands from descriptor 3 and answers on 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """A running chromium with a profile of its own, emptied at the end. A context manager."""

    def __init__(self) -> None:
        self._number, self._rest = 0, b""
        self.page: Page | None = None

    def __enter__(self) -> "Browser":
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        # Above 9, so that moving them to 3 and 4 overwrites neither.
        passed = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (theirs_in, theirs_out)]
        os.close(theirs_in)
        os.close(theirs_out)
        command = ["chromium", *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, passed), *command],
            pass_fds=passed,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in passed:
            os.close(descriptor)
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self.send(None, "Browser.close")
            self._process.wait(_PATIENCE)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def open(
        self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False, script: bool = True
    ) -> "Page":
        """A tab of that size, as a context manager; one at a time."""
        return Page(self, url, width=width, height=height, dark=dark, script=script)

    def send(self, session: str | None, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command to a tab, or to the browser, and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _PATIENCE
        while (answer := self.read(until)).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def read(self, until: float) -> dict[str, Any]:
        """The next message; the open page keeps what concerns it."""
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("chromium does not answer")
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise BrokenPipeError("chromium has ended")
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if self.page is not None:
            self.page.note(message)
        return message


class Page:
    """One open page: what it logged, what it asked for, and what can be done to it. A context manager."""

    def __init__(self, browser: Browser, url: str, *, width: int, height: int, dark: bool, script: bool):
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._browser, self._url, self._width, self._height = browser, url, width, height
        self._dark, self._script, self._session, self._events = dark, script, None, []

    def __enter__(self) -> "Page":
        self._target = self._browser.send(None, "Target.createTarget", url="about:blank")["targetId"]
        attached = self._browser.send(None, "Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        self._browser.page = self
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(self._height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not self._script)
        self._events.clear()
        self.send("Page.navigate", url=self._url)
        until = time.monotonic() + _PATIENCE
        while "Page.loadEventFired" not in self._events:
            self._browser.read(until)
        return self

    def __exit__(self, *_: Any) -> None:
        self._browser.page = None
        self._browser.send(None, "Target.closeTarget", targetId=self._target)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        return self._browser.send(self._session, method, **parameters)

    def resize(self, height: int) -> None:
        """Change the height of the window."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=self._width, height=height, deviceScaleFactor=1, mobile=False
        )

    def note(self, message: dict[str, Any]) -> None:
        """Keep what the page complains about and asks for."""
        event, said = message.get("method", ""), message.get("params", {})
        self._events.append(event)
        if message.get("sessionId") != self._session:
            return
        if event == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled":
            self.errors.append(f"console.{said['type']}: {[one.get('value') for one in said['args']]}")
        elif event == "Log.entryAdded" and said["entry"]["level"] in ("warning", "error"):
            self.errors.append(said["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, as JSON has it."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", expression))
        return answer["result"].get("value")

    def _centre(self, selector: str) -> tuple[float, float]:
        x, y = self.run(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "found.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = found.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return x, y

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        x, y = self._centre(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        self.hover(selector)
        x, y = self._centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press and release a key, by its name in JavaScript."""
        text = {"Enter": "\r"}.get(key, "")
        code = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else "",
                      windowsVirtualKeyCode=code)  # fmt: skip

    def screenshot(self, path: Path) -> None:
        """Write what is seen as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


def main(url: str, picture: str, height: str) -> None:
    """Take a picture of the top of a page, 1200 pixels wide."""
    with Browser() as browser, browser.open(url, height=int(height)) as page:
        page.screenshot(Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])
