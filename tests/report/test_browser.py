"""The report in a real browser: it loads without an error, draws everything, works by keyboard and on a phone."""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import closing, contextmanager, nullcontext, suppress

import numpy as np
import pytest

from fedflat.flatness import Film, Landscape
from fedflat.recipe import load
from fedflat.report.page import collect, page
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("no chromium and chromedriver here (Debian: chromium, chromium-driver)", allow_module_level=True)

FLAGS = [
    "--headless", "--no-sandbox", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
]  # fmt: skip
TAB, SPACE, ENTER, LEFT, RIGHT, CONTROL = "\ue004", " ", "\ue007", "\ue012", "\ue014", "\ue009"


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
        self._devtools("Emulation.setTouchEmulationEnabled", {"enabled": width < 600})
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
        """All keys down, then up again."""
        strokes = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp") for key in keys]
        self._post("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def complaints(self):
        """What the console says is an error, since the last time."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]


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


def bowl(height):
    axis = np.linspace(-1, 1, 5)
    return Landscape(np.stack([axis, axis]), 0.5 + height * (axis[:, None] ** 2 + axis[None, :] ** 2), 0.5)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page with every section: two methods, one of them with two seeds."""
    base = tmp_path_factory.mktemp("runs")
    settings = ["split.clients=5", "split.alpha=0.5", "model.hidden=[8]", "server.rounds=4", "engine=inline"]
    settings += ['evaluation.measures=["consistency","local","classes"]', "evaluation.target=0.3"]
    for name, more in {"a": ["seed=0"], "b": ["seed=1"], "c": ["method=fedsam", "admission.max_ratio=1.01"]}.items():
        problem = prepare(load(None, [*settings, *more]))
        execute(problem, base / name)
    for name, height in (("a", 1.0), ("c", 3.0)):
        Film([0, 2, 4], [bowl(height * k) for k in (3, 2, 1)]).save(base / name / "landscapes-eigen.npz")
    file = base / "report.html"
    file.write_bytes(page(collect([base], lambda _: nullcontext(), measure=True)))
    return file


SEEN = "return [...document.querySelectorAll('.canvas')].map({})"
THEME = "return [document.documentElement.dataset.theme, document.getElementById('theme').ariaPressed]"


@pytest.fixture(scope="module")
def desk(browser, report):
    """The page on a wide screen; a test that changes it changes it back."""
    browser.open(report, 1440)
    return browser


def drawn_in_full(browser):
    asked = browser.run("return figures.map((figure) => figure.data.length)")
    assert len(asked) >= 14
    assert browser.run(SEEN.format("(c) => c.data.length")) == asked
    marks = ".trace path, .heatmaplayer image, .contourlayer path, .gl-container canvas"
    return all(browser.run(SEEN.format(f"(c) => c.querySelectorAll('{marks}').length")))


def overflowing(browser, width):
    """How much is wider than the screen; `innerWidth` would grow with it on a phone."""
    outside = f"(e) => e.getBoundingClientRect().right > {width}"
    boxes = browser.run(f"return [...document.querySelectorAll('figure, .box, pre, h1')].filter({outside}).length")
    return boxes + browser.run(f"return document.documentElement.scrollWidth > {width}")


def test_on_a_wide_screen_all_is_drawn_and_the_console_is_silent(desk):
    assert drawn_in_full(desk)
    assert not overflowing(desk, 1440)
    assert desk.complaints() == []


def test_the_first_keys_lead_to_the_content_the_theme_the_sections_and_the_lines(desk):
    desk.run("document.body.tabIndex = -1; document.body.focus()")
    links = desk.run("return document.querySelectorAll('nav a').length")
    reached = []
    for _ in range(links + 4):
        desk.press(TAB)
        reached.append(desk.run("const e = document.activeElement; return e.id || e.dataset.switch || e.hash"))
    assert (reached[:2], reached[-2:]) == (["#content", "theme"], ["0", "1"])
    assert all(name.startswith("#") for name in reached[2:-2])


def test_a_key_changes_the_theme_of_page_and_plots(desk):
    ink = "getComputedStyle(document.querySelector('.xtick text')).fill"
    seen = [desk.run(f"return {ink}")]
    desk.run("document.getElementById('theme').focus()")
    for expected in (["dark", "true"], ["light", "false"]):
        desk.press(SPACE)
        assert desk.run(THEME) == expected
        desk.wait(f"return {ink} !== {json.dumps(seen[-1])}")
        seen.append(desk.run(f"return {ink}"))
    assert seen[0] == seen[2]
    assert desk.complaints() == []


def test_a_line_is_switched_off_and_on_by_keyboard_in_plots_surfaces_and_tables(desk):
    visible = "canvases.flatMap((c) => c.data).filter((t) => t.meta === 1).map((t) => t.visible)"
    parts = "[...document.querySelectorAll('[data-line=\"1\"]')].map((e) => e.hidden)"
    assert len(desk.run(f"return {visible}")) >= 8
    assert len(desk.run(f"return {parts}")) >= 6
    desk.run("document.querySelector('[data-switch=\"1\"]').focus()")
    for hidden in (True, False):
        desk.press(SPACE)
        desk.wait(f"return {visible}.every((v) => v === {json.dumps(not hidden)})")
        assert set(desk.run(f"return {parts}")) == {hidden}
    assert desk.complaints() == []


def test_surfaces_turn_together_by_arrow_keys_and_become_maps_and_surfaces_again(desk):
    eyes = "surfaces.map((c) => c.layout.scene.camera.eye.x)"
    before = desk.run(f"return {eyes}")
    assert len(before) == 4 and len({*before}) == 1
    desk.run("surfaces[0].focus()")
    desk.press(RIGHT)
    desk.wait(f"const [a, ...others] = {eyes}; return a !== {before[0]} && others.every((b) => a === b)")
    desk.run("document.getElementById('form').focus()")
    for pressed, shape in (("true", ".contourlayer path"), ("false", ".gl-container canvas")):
        desk.press(ENTER)
        desk.wait(f"return surfaces.every((c) => c.querySelector('{shape}'))")
        assert desk.run("return document.getElementById('form').ariaPressed") == pressed
    assert desk.complaints() == []


TOPS = "[...document.querySelectorAll('.film .canvas')].map((c) => Math.max(...c.data[0].z.flat()))"


def test_the_slider_shows_one_round_in_all_surfaces_by_keyboard_and_keeps_the_camera(desk):
    assert desk.run(f"return {TOPS}") == [2.5, 6.5]
    eyes = desk.run("return surfaces.map((c) => c.layout.scene.camera.eye.x)")
    desk.run("document.querySelector('.film input').focus()")
    for key, told, tops in ((LEFT, "2", [4.5, 12.5]), (LEFT, "0", [6.5, 18.5])):
        desk.press(key)
        desk.wait(f"return {TOPS}.join() === '{','.join(map(str, tops))}'")
        assert desk.run("return document.querySelector('.film output').textContent") == told
    assert desk.run("return surfaces.map((c) => c.layout.scene.camera.eye.x)") == eyes
    desk.run("document.querySelector('.play').click()")
    assert desk.run("return document.querySelector('.play').textContent") == "Pause"
    desk.wait(f"return {TOPS}.join() === '2.5,6.5' && document.querySelector('.play').textContent === 'Play'")
    assert desk.complaints() == []


def test_the_recipe_is_copied_by_its_button(desk):
    desk.run("document.querySelector('#repeat details').open = true; document.querySelector('.copy').focus()")
    desk.press(ENTER)
    desk.wait("return document.getElementById('said').textContent === 'copied'")
    desk.run("document.body.append(document.createElement('textarea')); document.querySelector('textarea').focus()")
    desk.press(CONTROL, "v")
    desk.wait("return document.querySelector('textarea').value !== ''")
    pasted = desk.run("const area = document.querySelector('textarea'); area.remove(); return area.value")
    assert pasted.startswith('seed = 0\nmethod = "fedavg"\n')


def test_on_a_phone_it_begins_in_the_systems_theme_and_nothing_is_wider_than_the_screen(browser, report):
    browser.open(report, 390, dark=True)
    assert browser.run(THEME) == ["dark", "true"]
    assert drawn_in_full(browser)
    assert browser.run("return surfaces.map((c) => c.data[0].type)") == ["contour"] * 4  # a finger scrolls
    browser.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert not overflowing(browser, 390)
    assert browser.complaints() == []
