"""A real Chromium without a network, and what a page did in it."""

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium(served: bool = False) -> Iterator[Any]:
    """Provide a headless Chromium that reaches no host, or this machine alone
    (`served`); skips where there is no Chromium.
    """
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed"
    )
    binary = next(filter(None, map(shutil.which, _NAMES)), None)
    chromedriver = shutil.which("chromedriver")
    if binary is None or chromedriver is None:
        pytest.skip(
            "Chromium and chromedriver are not installed (Debian: "
            "apt-get install chromium chromium-driver)"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND" + ", EXCLUDE 127.0.0.1" * served,
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(
        options, webdriver.ChromeService(executable_path=chromedriver)
    )
    try:
        driver.execute_cdp_cmd("Network.enable", {})
        if not served:
            driver.execute_cdp_cmd(
                "Network.emulateNetworkConditions",
                {
                    "offline": True,
                    "latency": 0,
                    "downloadThroughput": 0,
                    "uploadThroughput": 0,
                },
            )
        yield driver
    finally:
        driver.quit()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Provide the address of a folder on this machine."""
    handler = partial(Quiet, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def open_address(driver: Any, address: str, width: int) -> None:
    """Load a page at a screen of that width, and wait until its formulas are drawn."""
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    resize(driver, width)
    driver.get(address)
    wait(driver, "return document.readyState == 'complete'")
    driver.execute_script("return window.MathJax?.startup.promise.then(() => true)")
    settle(driver)


def open_page(driver: Any, path: Path, width: int) -> None:
    """Load a file from disk at a screen of that width, and wait until every widget has
    drawn.
    """
    open_address(driver, path.as_uri(), width)
    wait(
        driver,
        (
            "return [...document.querySelectorAll('[data-circuitsvis]')].every(div "
            "=> div.children.length)"
        ),
    )
    settle(driver)


def loaded(driver: Any, css: str) -> list[list[int]]:
    """Return the sizes of pictures, also of those that load when they are seen."""
    return driver.execute_async_script(
        "const done = arguments[1],"
        "  all = [...document.querySelectorAll(arguments[0])];"
        "Promise.all(all.map(one => { one.loading = 'eager'; return one.decode(); }))"
        "  .then(() => done(all.map(one => [one.naturalWidth, one.naturalHeight])))"
        "  .catch(error => done([[0, 0]]))",
        css,
    )


def resize(driver: Any, width: int, height: int = 900) -> None:
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": width < 600,
        },
    )


def wait(driver: Any, script: str, seconds: float = 20) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, seconds, poll_frequency=0.05).until(
        lambda d: d.execute_script(script), script
    )


def settle(driver: Any) -> None:
    """Two frames: layout, then what was observed of it (charts take their size
    then).
    """
    driver.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
    )


def requested(driver: Any) -> list[str]:
    """Every address asked for since the page was opened."""
    messages = [
        json.loads(entry["message"])["message"]
        for entry in driver.get_log("performance")
    ]
    return [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]


def complaints(driver: Any) -> list[str]:
    """Errors and warnings on the console since the page was opened."""
    return [
        entry["message"]
        for entry in driver.get_log("browser")
        if entry["level"] in ("SEVERE", "WARNING")
    ]


def move_to(driver: Any, x: float, y: float) -> None:
    """Move the pointer to a place on the screen."""
    for at in ((x - 2, y - 1), (x, y)):
        driver.execute_cdp_cmd(
            "Input.dispatchMouseEvent", {"type": "mouseMoved", "x": at[0], "y": at[1]}
        )
    settle(driver)


def scrolls_sideways(driver: Any) -> bool:
    return driver.execute_script(
        "return document.documentElement.scrollWidth > "
        "window.innerWidth || document.body.scrollWidth > innerWidth"
    )


def spilling(driver: Any) -> list[str]:
    """Charts that reach beyond the place they were given."""
    return driver.execute_script(
        "return [...document.querySelectorAll('[data-circuitsvis] canvas')].filter(canvas => {"
        "  const chart = canvas.getBoundingClientRect(),"
        "    place = canvas.closest('[data-circuitsvis]').getBoundingClientRect();"
        "  return chart.left < place.left - 1 || chart.right > "
        "place.right + 1; }).map(canvas => canvas.outerHTML)"
    )


def screenshot(driver: Any, path: Path, max_height: float = float("inf")) -> None:
    """Take a picture of the page from top to bottom, or to a height, as PNG."""
    size = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    clip = {
        "x": 0,
        "y": 0,
        "width": size["width"],
        "height": min(size["height"], max_height),
        "scale": 1,
    }
    png = driver.execute_cdp_cmd(
        "Page.captureScreenshot",
        {"captureBeyondViewport": True, "optimizeForSpeed": True, "clip": clip},
    )["data"]
    path.write_bytes(base64.b64decode(png))
