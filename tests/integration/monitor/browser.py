"""Drives a headless Chromium over the W3C WebDriver protocol with chromedriver."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.adaptive_timeouts import patient

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
_STARTS = 3
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip


class Browser:
    def __init__(self, base: str) -> None:
        self._base = base

    def open(self, url: str) -> None:
        self._post("/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, timeout_s: float = 30.0) -> Any:
        """Wait until a script, which the page runs repeatedly, returns a true value; return it."""
        waiting = f"""const done = arguments[0], ends = performance.now() + {1000 * timeout_s};
            const holds = () => {{ {script} }};
            const look = () => {{
                const result = holds();
                if (result || performance.now() > ends) done(result); else setTimeout(look, 50);
            }};
            look()"""
        self._post("/timeouts", {"script": int(1000 * (timeout_s + 10))})
        result = self._post("/execute/async", {"script": waiting, "args": []})
        assert result, f"did not hold: {script}\n{self.run('return document.body.innerText')}"
        return result

    def text(self, selector: str) -> str:
        return str(
            self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def hover(self, selector: str, x: int, y: int) -> str:
        """Move the pointer to a place within an element; return the tooltip's text."""
        script = """const box = document.querySelector(arguments[0]).getBoundingClientRect();
            return [Math.round(box.left), Math.round(box.top)]"""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        left, top = self.run(script, selector)
        move = {"type": "pointerMove", "duration": 0, "x": left + x, "y": top + y}
        pointer = {
            "type": "pointer",
            "id": "mouse",
            "parameters": {"pointerType": "mouse"},
            "actions": [move],
        }
        self._post("/actions", {"actions": [pointer]})
        return str(
            self.run(
                "const h = document.getElementById('hover'); return h.hidden ? '' : h.textContent"
            )
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._get("/screenshot")))

    def resize(self, width: int, height: int) -> None:
        self._post("/window/rect", {"width": width, "height": height})

    def console_errors(self) -> list[str]:
        """Return the errors and warnings in the browser's console."""
        entries = self._post("/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def _get(self, path: str) -> Any:
        return _call(f"{self._base}{path}", None)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _call(f"{self._base}{path}", body)


@contextmanager
def browser(width: int = 1280, height: int = 800, *, dark: bool = False) -> Iterator[Browser]:
    assert CHROMIUM is not None
    assert DRIVER is not None
    with tempfile.TemporaryDirectory(prefix="keepstep-browser-") as profile, _driver() as port:
        options = {
            "binary": CHROMIUM,
            "args": [*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
            + (["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []),
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        base = f"http://127.0.0.1:{port}/session"
        session = _call(base, {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(f"{base}/{session}")
        finally:
            _call(f"{base}/{session}", None, "DELETE")


@contextmanager
def _driver() -> Iterator[int]:
    """Run the driver; yield its port.

    It was seen to end at its start, on a loaded machine, before it said one.
    """
    for _ in range(_STARTS):
        driver = subprocess.Popen(
            [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert driver.stdout is not None
            found = (re.search(r"on port ([1-9]\d*)", line) for line in driver.stdout)
            port = next((int(match[1]) for match in found if match), None)
            if port is not None:
                yield port
                return
        finally:
            driver.terminate()
            driver.wait()
    raise AssertionError(f"{DRIVER} ended {_STARTS} times before it said its port")


def _call(url: str, body: dict[str, Any] | None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=patient(60)) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.read().decode()[:2000]}") from error
