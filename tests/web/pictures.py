"""Draw the pictures of README and docs from what really runs: ``python tests/web/pictures.py [NAME ...]``.

``dashboard``: a daemon with sixty jobs. ``demo``: the timeline of ``rollmuxd demo``. ``tail``: a picture of ``rollmuxd
gateway demo``. ``weights``: one of ``rollmuxd weights bench``. They need Chromium, playwright, and root for the lines.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "shared")]

from test_dashboard import Screen  # noqa: E402

from conftest import BROWSERS, Cluster  # noqa: E402

DOCS: Final = HERE.parents[1] / "docs"


def dashboard(browser: Any, folder: Path) -> bytes:
    """Sixty jobs on forty nodes, after some rotations."""
    made = Cluster(folder, rollout=20, train=20)
    try:
        made.load(60)
        enough = "sixty jobs have had some iterations"
        made.until(enough, lambda: sum(job["iterations"] > 8 for job in made.get("/v1/jobs", limit=100)["items"]) > 55)
        screen = Screen(browser, made.url, made.key(), size={"width": 1480, "height": 1100})
        screen.drawn()
        screen.page.locator('[data-span="60"]').click()
        screen.page.wait_for_timeout(3000)
        return bytes(screen.page.screenshot())
    finally:
        made.close()


def demo(browser: Any, folder: Path) -> bytes:
    """The timeline of three jobs that share two GPUs, from the demo's own dashboard."""
    with subprocess.Popen(
        [sys.executable, "-m", "rollmuxd", "demo", "--no-sequential", "--keep", str(folder / "kept")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HOME": str(folder)},
    ) as process:
        assert process.stdout is not None
        found = next(
            found for line in process.stdout if (found := re.search(r"(http://\S+)/  \(log in with (\S+)\)", line))
        )
        screen = Screen(browser, found[1], found[2], size={"width": 1480, "height": 620})
        screen.drawn()
        screen.page.locator('[data-span="60"]').click()
        ready = "rollmux.jobs?.length === 3 && rollmux.jobs.every((job) => job.iterations >= 6)"
        screen.until("some iterations", ready)
        box = screen.page.locator(".picture").bounding_box()
        picture = bytes(screen.page.screenshot(clip={**box, "height": 300}))  # what is below has no rows
        process.terminate()
        return picture


def tail(browser: Any, folder: Path) -> bytes:
    """Rollouts of two jobs whose tails are gathered on few engines."""
    return _of_page(browser, folder, "gateway", "demo")


def weights(browser: Any, folder: Path) -> bytes:
    """The chunks of new weights as they come, over slow lines and then within the cluster."""
    return _of_page(browser, folder, "weights", "bench", "--namespaces", "--train", "4", "--rollout", "4", "--mb", "32")


def _of_page(browser: Any, folder: Path, *words: str) -> bytes:
    page = folder / "page.html"
    env = {**os.environ, "HOME": str(folder)}
    subprocess.run([sys.executable, "-m", "rollmuxd", *words, "--html", str(page)], env=env, check=True)
    tab = browser.new_page(viewport={"width": 1200, "height": 100})
    tab.goto(page.as_uri())
    return bytes(tab.screenshot(full_page=True))


PICTURES: Final[dict[str, Callable[[Any, Path], bytes]]] = {
    "dashboard": dashboard,
    "demo": demo,
    "tail": tail,
    "weights": weights,
}


def main(names: list[str]) -> None:
    """Write each picture to docs/."""
    from playwright.sync_api import sync_playwright

    path = next(found for name in BROWSERS if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for name in names or PICTURES:
            with tempfile.TemporaryDirectory() as folder:
                (DOCS / f"{name}.png").write_bytes(PICTURES[name](browser, Path(folder)))
            print(f"{name}: docs/{name}.png", flush=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
