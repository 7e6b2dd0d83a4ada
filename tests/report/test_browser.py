"""The report in a real browser: it loads without a complaint, draws everything, and works by keyboard and on a phone."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import closing, contextmanager, nullcontext, suppress

import pytest

from fedflat.prepare import prepare
from fedflat.recipe import load
from fedflat.report.page import collect, page
from fedflat.run import execute

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("no chromium and chromedriver here (Debian: chromium, chromium-driver)", allow_module_level=True)

FLAGS = [
    "--headless", "--no-sandbox", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
]  # fmt: skip
TAB, SPACE, ENTER, RIGHT = "\ue004", " ", "\ue007", "\ue014"


class Browser:
    """Chromium by the WebDriver protocol, as far as these tests need it."""

    def __init__(self, address):
        options = {"binary": CHROMIUM, "args": FLAGS}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._address = f"{address}/session"
        found = self._post("", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/{found['sessionId']}"

    def _post(self, command, content):
        body = json.dumps(content).encode()
        request = urllib.request.Request(self._address + command, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def close(self):
        urllib.request.urlopen(urllib.request.Request(self._address, method="DELETE"), timeout=60).close()

    def run(self, script, *arguments):
        return self._post("/execute/sync", {"script": script, "args": arguments})

    def open(self, file, width, dark=False):
        """The page at a width, once all is drawn."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._devtools("Emulation.setEmulatedMedia", {"features": scheme})
        self._post("/url", {"url": file.as_uri()})
        self.wait("return document.documentElement.dataset.drawn === 'true'")

    def _devtools(self, command, parameters):
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def wait(self, script):
        """Until the script says so, or the test is hopeless."""
        end = time.monotonic() + 30
        while not self.run(script):
            assert time.monotonic() < end, f"this did not come true: {script}; {self.complaints()}"
            time.sleep(0.05)

    def press(self, *keys):
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def complaints(self):
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"}) if entry["level"] != "INFO"]

    def picture(self, file):
        shot = self._devtools("Page.captureScreenshot", {"captureBeyondViewport": True})
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromedriver(log):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as file:
        process = subprocess.Popen([DRIVER, f"--port={port}"], stdout=file, stderr=file)
    try:
        for _ in range(300):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromedriver(tmp_path_factory.mktemp("driver") / "log") as address, closing(Browser(address)) as found:
        yield found
