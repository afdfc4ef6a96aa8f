"""The report, the overview and the figures, as a browser shows them."""

from pathlib import Path

import numpy as np
import pytest

from workflow.browser import Browser, drawn, with_clicks
from workflow.project import SWEEP, Project

CONTROLS = ("self_patch_0", "self_patch_1", "zero_steer", "full_donor")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return Browser(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module")
def reported(finished: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with report.html."""
    project = finished.copy(tmp_path_factory.mktemp("report") / "project")
    done = project.run("--report", "report.html")
    assert done.code == 0, done.out
    return project.root


def test_the_report_opens_with_its_text_and_categories(browser, reported):
    text = browser.text(reported / "report.html")
    assert "tiny , engine local : a sweep of interventions" in text
    for category in ("Figures", "Run"):
        assert f" {category} " in text


def test_the_report_lists_and_shows_the_figures(browser, reported, tmp_path):
    shown = with_clicks(reported / "report.html", tmp_path / "figure.html", "Figures", "")
    text = browser.text(shown)
    for measure in SWEEP["measures"]:
        assert f" {measure} local " in text + " "
    pixels = browser.picture(shown, tmp_path / "figure.png")
    # The figure stands alone on the right; the menu fills the left quarter.
    figure = pixels[:, pixels.shape[1] // 3 :]
    assert 0.01 < drawn(figure) < 0.9
    assert len(colours(figure)) > 20


def test_the_report_lists_the_page_of_the_run(browser, reported, tmp_path):
    page = with_clicks(reported / "report.html", tmp_path / "run.html", "Run")
    assert "provenance and null controls local" in browser.text(page)


def test_the_overview_stands_alone_with_the_null_controls(browser, finished, tmp_path):
    page = tmp_path / "overview.html"
    page.write_bytes((finished.results / "local" / "overview.html").read_bytes())
    text = browser.text(page)
    controls = text.split("Null controls", 1)[1].split("Where the numbers come from", 1)
    for name in CONTROLS:
        assert name in controls[0]
    assert controls[0].count(" holds ") == len(CONTROLS)
    assert "does not hold" not in controls[0]
    for word in ("torch", "nnsight", "transformers", "float32", "sdpa", "cpu"):
        assert word in controls[1]
    assert drawn(browser.picture(page, tmp_path / "overview.png")) > 0.02


@pytest.mark.parametrize("measure", SWEEP["measures"])
def test_every_figure_is_drawn_and_says_what_it_shows(browser, finished, tmp_path, measure):
    figure = finished.results / "local" / "figures" / f"{measure}.svg"
    text = browser.text(figure)
    for word in ("tiny", measure, "layer", "position", "subject", "last", "n = 5"):
        assert word in text
    pixels = browser.picture(figure, tmp_path / "figure.png", "800,500")
    assert drawn(pixels) > 0.02
    assert pixels.std() > 0.02
    # Top is 0 at every point of this random model: one colour, and its colour bar.
    assert len(colours(pixels)) > 20


def colours(pixels: np.ndarray) -> set[tuple[int, ...]]:
    """The distinct colours of a picture, greys of the lettering left out."""
    levels = (pixels[..., :3] * 255).astype(int)
    coloured = levels[(levels.max(-1) - levels.min(-1)) > 10]
    return {tuple(colour) for colour in np.unique(coloured, axis=0)}
