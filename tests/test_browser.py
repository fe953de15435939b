"""Pages in a real browser, where there is one: no errors, nothing wider than a phone, both colour schemes."""

from pathlib import Path

import pytest

from tests.pages import CHROMIUM, browse, run_browser
from tests.train.run_folders import write_run
from train.run_page import write_page

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
    pytest.mark.slow,  # a browser takes its seconds to start, on a busy machine many
]
WIDTH = "page.documentElement.scrollWidth"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(write_run(tmp_path_factory.mktemp("run"), positions=8), pictures=False)


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(page: Path, tmp_path: Path, width: int) -> None:
    assert browse(page, tmp_path, width, WIDTH) == str(width)


def test_the_check_of_width_can_fail(page: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide.html"
    wide.write_text(page.read_text().replace("<main>", '<main><div style="width: 500px">x</div>'))
    assert int(browse(wide, tmp_path, 360, WIDTH)) >= 500


def test_light_and_dark(page: Path, tmp_path: Path) -> None:
    paper = "f.contentWindow.getComputedStyle(page.body).backgroundColor"
    assert browse(page, tmp_path, 360, paper) == "rgb(255, 255, 255)"
    assert browse(page, tmp_path, 360, paper, dark=True) == "rgb(20, 24, 31)"


def test_letters_in_charts_can_be_read_on_a_phone(page: Path, tmp_path: Path) -> None:
    heights = "Math.min(...[...page.querySelectorAll('svg text')].map(one => one.getBoundingClientRect().height))"
    assert float(browse(page, tmp_path, 360, heights)) > 11


def test_rejected_drafts_are_shown_on_demand(page: Path, tmp_path: Path) -> None:
    seen = "getComputedStyle(page.querySelector('.marked del')).display"
    assert browse(page, tmp_path, 360, seen) == "none"
    assert browse(page, tmp_path, 360, f"(page.querySelector('.texts input').click(), {seen})") == "inline"


def test_the_console_stays_silent(page: Path, tmp_path: Path) -> None:
    """Of the page as it is, with its own rule against loading anything."""
    found = run_browser(tmp_path, ["--dump-dom", page.as_uri()])
    assert "</html>" in found.stdout
    assert "CONSOLE" not in found.stderr
    loud = tmp_path / "loud.html"
    loud.write_text(page.read_text().replace("</main>", '<img src="file:///x.png"></main>'))
    assert "CONSOLE" in run_browser(tmp_path, ["--dump-dom", loud.as_uri()]).stderr
