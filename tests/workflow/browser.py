"""A headless Chromium: the text of a page as its scripts leave it, and its picture."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def chromium() -> str:
    """The browser's path. A browser is no part of the environment that `make test` installs, and
    nothing but the look of the report needs one; `.ci/run` installs it, and there it must be.
    """
    for name in ("chromium", "google-chrome", "chromium-browser"):
        found = shutil.which(name)
        if found:
            return found
    missing = "no Chromium on this machine: install chromium to check the report in a browser"
    pytest.fail(missing) if "NNSWEEP_CI" in os.environ else pytest.skip(missing)


CLICKS = """<script>
function press(text) {
  const links = [...document.querySelectorAll("nav a")];
  const named = (link) => link.textContent.trim() === text;
  (text ? links.find(named) : document.querySelector("nav table a")).click();
}
STEPS
</script>"""


class Browser:
    """One profile folder, any number of pages."""

    def __init__(self, profile: Path) -> None:
        self.command = [chromium(), *FLAGS, f"--user-data-dir={profile}"]

    def _open(self, page: Path, *arguments: str) -> str:
        command = [*self.command, "--virtual-time-budget=10000", *arguments, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def text(self, page: Path) -> str:
        """What the page's body says, tags and scripts left out, after its scripts have run."""
        dom = self._open(page, "--dump-dom")
        bare = re.sub(r"<(script|style)\b.*?</\1>", " ", dom, flags=re.DOTALL)
        return " ".join(re.sub(r"<[^>]*>", " ", bare).split())

    def picture(self, page: Path, output: Path, size: str = "1200,900") -> np.ndarray:
        """The page as pixels (height, width, colours) between 0 and 1."""
        self._open(page, f"--screenshot={output}", f"--window-size={size}")
        return matplotlib.image.imread(output)


def with_clicks(page: Path, output: Path, *texts: str) -> Path:
    """A copy of a page that clicks on links by their text; an empty text is the first icon."""
    steps = "".join(
        f"setTimeout(() => press({text!r}), {500 * (step + 1)});" for step, text in enumerate(texts)
    )
    output.write_text(page.read_text(encoding="utf-8") + CLICKS.replace("STEPS", steps))
    return output


def drawn(pixels: np.ndarray) -> float:
    """The share of pixels that differ from the background (the first pixel)."""
    return float((np.abs(pixels - pixels[0, 0]).max(axis=-1) > 0.05).mean())
