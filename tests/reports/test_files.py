"""What a report leaves on the disk: the page, and its plots as files for a paper."""

import re

import matplotlib
import PIL.Image
import PIL.ImageChops
import pytest

from stateline.errors import InputError
from tests.reports.typed import write_report


def written(results, folder):
    write_report(results, folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(make, tmp_path):
    written(make.results(), tmp_path / "a")
    with matplotlib.rc_context({"axes.labelsize": 30, "lines.dash_capstyle": "round"}):
        written(make.results(), tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(contents(tmp_path / "a")) == 1 + 2 * 10


@pytest.mark.slow
def test_settings_of_matplotlib_are_left_as_they_were(make, tmp_path):
    before = [(name, matplotlib.rcParams[name]) for name in matplotlib.rcParams]
    written(make.results(), tmp_path)
    assert [(name, matplotlib.rcParams[name]) for name in matplotlib.rcParams] == before


def test_nothing_is_written_if_the_plots_cannot_be(make, tmp_path):
    (tmp_path / "plots").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*/plots/plot.svg: Not a directory"):
        write_report(make.results(), tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["plots"]


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_report_and_nothing_else(make, tmp_path, full_disk):
    written(make.results(), tmp_path)
    old = contents(tmp_path)
    with full_disk(1000), pytest.raises(InputError, match=r"cannot write .*report.html: File too"):
        write_report(make.results(command="other"), tmp_path / "report.html")
    assert contents(tmp_path) == old


def test_every_plot_lies_beside_the_page_as_png_and_svg(make, tmp_path):
    page = written(make.results(), tmp_path)
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    shown = re.findall("<figcaption>", page)
    assert len(names) == 2 * len(shown)
    assert {name.partition(".")[2] for name in names} == {"png", "svg"}
    assert {"copying-by-length.png", "text-while-training.svg", "cost-state-size.svg"} <= names
    assert "10 plots of this page are in the folder <code>plots</code> next to it" in page


def test_a_plot_for_a_paper_is_sharp_on_white_and_in_real_colours(make, tmp_path):
    written(make.results(), tmp_path)
    with PIL.Image.open(tmp_path / "plots" / "copying-by-length.png") as picture:
        assert [round(dots) for dots in picture.info["dpi"]] == [300, 300]
        assert picture.getpixel((0, 0)) == (255, 255, 255, 255)
        colours = {colour[:3] for _, colour in picture.getcolors(1 << 20)}
    assert {(0x00, 0x67, 0xA8), (0xD1, 0x50, 0x0A), (0x00, 0x87, 0x5F)} <= colours


@pytest.mark.parametrize("model", ["h3", "attention(position=hard_alibi, n_heads=8)*2 h3*2 " * 3])
def test_a_plot_for_a_paper_has_its_legend_inside(make, tmp_path, model):
    task = make.task()
    runs = [make.run(model, task, {"10": 1.0, "20": 1.0, "40": 1.0})]
    write_report(
        make.results(models=[model], tasks=[task], runs=runs, speed=[]), tmp_path / "report.html"
    )
    with PIL.Image.open(tmp_path / "plots" / "copying-by-length.png") as picture:
        white = PIL.Image.new("RGB", picture.size, "white")
        left, _, right, _ = PIL.ImageChops.difference(picture.convert("RGB"), white).getbbox()
        below = picture.crop((0, 3 * picture.height // 4, *picture.size))
    assert 0 < left < right < picture.width
    assert (0x00, 0x67, 0xA8) in {colour[:3] for _, colour in below.getcolors(1 << 20)}
