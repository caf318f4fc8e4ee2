"""A headless Chromium for tests of pages: the WebDriver protocol of `chromedriver`, by the standard library alone."""

import base64
import io
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
MISSING = (
    "" if CHROMIUM and DRIVER else "no chromium with chromedriver here; on Debian: apt-get install chromium-driver"
)
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
START_SECONDS, CALL_SECONDS = 60, 120


class Browser:
    """A page in a browser without a window."""

    def __init__(self, address: str, profile: Path, width: int, height: int) -> None:
        self._session = f"{address}/session"
        options = {
            "binary": CHROMIUM,
            "args": [*ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},{height}"],
        }
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs, "browserName": "chrome"}
        made = self._call("", {"capabilities": {"alwaysMatch": wanted}})
        self._session += f"/{made['sessionId']}"

    def _call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._session + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path | str) -> None:
        """Load a file and wait until it has been drawn."""
        self._call("/url", {"url": page if isinstance(page, str) else page.resolve().as_uri()})
        self.until("return document.readyState === 'complete'")

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self._call("/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, seconds: float = 30.0) -> None:
        """Wait until a script returns something true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"still false after {seconds:g} s: {script}"
            time.sleep(0.05)

    def tool(self, command: str, **parameters: Any) -> Any:
        """A command of the developer tools."""
        return self._call("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Messages since the last call: `browser` (the console) or `performance` (the network among others)."""
        found: list[dict[str, Any]] = self._call("/se/log", {"type": kind})
        return found

    def picture(self, element: str = "") -> np.ndarray:
        """The window, or the part of it that shows an element, by its selector, as RGB values."""
        shot = self.tool("Page.captureScreenshot")["data"]
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB"), dtype=float)
        if not element:
            return pixels
        box = "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
        left, top, right, bottom = self.run(f"{box} return [b.left, b.top, b.right, b.bottom].map(Math.round)", element)
        return pixels[max(top, 0) : bottom, max(left, 0) : right]

    def mouse(self, kind: str, x: float, y: float, *, pressed: bool = False) -> None:
        """Move, press or release the mouse at a place in the window."""
        button = {"button": "left", "buttons": 1, "clickCount": 1} if pressed else {}
        self.tool("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def key(self, name: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": name} if kind == "keyDown" and len(name) == 1 else {}
            self.tool("Input.dispatchKeyEvent", type=kind, key=name, code=name, **text)

    def close(self) -> None:
        """End the browser."""
        self._call("", method="DELETE")


@contextmanager
def browser(profile: Path, width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """A browser with a new profile, ended afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{address}/status", timeout=5):
                    break
            except OSError:
                assert time.monotonic() < end, "chromedriver does not answer"
                time.sleep(0.1)
        window = Browser(address, profile, width, height)
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait(timeout=30)
