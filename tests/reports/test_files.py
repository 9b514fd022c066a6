"""What a report leaves on the disk: the page, and its charts as files if they are asked for."""

import resource

import pytest

from stateline.charts import draw
from stateline.errors import InputError
from stateline.reports import export_charts
from tests.reports.typed import merge, page_of, typed, write_report


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(make, tmp_path):
    for name in ("a", "b"):
        draw._drawn.clear()
        write_report(make.results(), tmp_path / name / "report.html")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_report_is_one_file(make, tmp_path):
    small = make.results(tasks=[make.text_task()], speed=[])
    write_report(small, tmp_path / "report.html")
    assert list(contents(tmp_path)) == ["report.html"]


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_report_and_nothing_else(make, tmp_path, full_disk):
    write_report(make.results(), tmp_path / "report.html")
    old = contents(tmp_path)
    with full_disk(1000), pytest.raises(InputError, match=r"cannot write .*report.html: File too"):
        write_report(make.results(command="other"), tmp_path / "report.html")
    assert contents(tmp_path) == old


@pytest.mark.slow
def test_every_chart_of_the_page_is_exported(make, tmp_path):
    results = make.results()
    files = export_charts(typed(results), tmp_path, ["csv", "json"])
    page = page_of(results)
    assert len(files) == 2 * page.count("<figcaption>")
    assert all(f'data-chart="{path.stem}"' in page for path in files)
    assert (tmp_path / "copying-by-length.csv").read_text().splitlines()[1] == (
        "attention(position=rope)*2,10,1.0,1.0,1.0,1"
    )


def test_a_slide_of_each_task_is_exported_as_an_image(make, tmp_path):
    files = export_charts(typed(make.results(tasks=[make.text_task()])), tmp_path, ["svg"])
    assert tmp_path / "text-slide.svg" in files
    drawn = (tmp_path / "text-slide.svg").read_text()
    assert "Text: bits per byte by length" in drawn
    assert "Text: bits per byte against state size" in drawn


def test_a_page_tells_how_to_export_its_charts(make):
    one = make.results(tasks=[make.text_task()], speed=[])
    assert ">stateline report . --export charts</pre>" in page_of(one)
    both = merge({"my runs": one, "b": make.results(tasks=[make.task()], speed=[])})
    assert ">stateline report &#39;my runs&#39; b --export charts</pre>" in page_of(both)


def test_images_that_cannot_be_drawn_never_cost_the_page(make, tmp_path, caplog):
    """V8 dies where address space is limited, as by batch systems."""
    draw._drawn.clear()
    results, (soft, hard) = typed(make.results()), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (20 << 30, hard))
    try:
        write_report(make.results(), tmp_path / "report.html")
        with pytest.raises(InputError, match=r"^the process that draws images ended with code"):
            export_charts(results, tmp_path, ["svg"])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    page = (tmp_path / "report.html").read_text()
    assert "The charts are given as numbers: the process that draws images ended" in page
    assert "ulimit -v unlimited" in caplog.text
    assert page.count("model,x,y") == page.count("<figcaption>") > 5
    assert "<svg" not in page
    assert "vegaEmbed = " not in page
