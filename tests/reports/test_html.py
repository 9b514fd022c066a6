import re
import subprocess
import sys
from html.parser import HTMLParser

import matplotlib
import pytest

from stateline.reports import write_report

VOID = {"meta", "br", "wbr", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects ids, references, plots and text, and checks that elements nest."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.references, self.plots, self.text, self.open = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.references += [attrs[name] for name in ("href", "src") if name in attrs]
        self.references += re.findall(r"url\(([^)]*)\)", " ".join(map(str, attrs.values())))
        self.plots += [attrs["aria-label"]] if tag == "svg" and "role" in attrs else []
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def written(results, folder):
    write_report(results, folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(make, tmp_path_factory):
    return written(make.results(), tmp_path_factory.mktemp("page"))


def test_the_page_is_self_contained(page):
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
    assert "@import" not in page
    assert all(reference.startswith("#") for reference in Page(page).references)


def test_every_reference_leads_to_one_element(page):
    parsed = Page(page)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert {reference.removeprefix("#") for reference in parsed.references} <= set(parsed.ids)


def test_elements_nest(page):
    assert Page(page).open == []


def test_the_same_results_give_the_same_bytes(make, tmp_path):
    first = written(make.results(), tmp_path)
    with matplotlib.rc_context({"axes.labelsize": 30, "lines.dash_capstyle": "round"}):
        assert written(make.results(), tmp_path) == first


def test_settings_of_matplotlib_are_left_as_they_were(make, tmp_path):
    before = [(name, matplotlib.rcParams[name]) for name in matplotlib.rcParams]
    written(make.results(), tmp_path)
    assert [(name, matplotlib.rcParams[name]) for name in matplotlib.rcParams] == before


def test_plots_take_their_colours_from_the_page(page):
    plots = page[page.index('<div class="plots">') :]
    assert set(re.findall(r"(?:stroke|fill): ([^;\"]+)", plots)) == {
        "none",
        "currentColor",
        "var(--model-0)",
        "var(--model-1)",
        "var(--model-2)",
    }


def test_every_plot_says_what_it_shows(page):
    titles = [label.split(":")[0] for label in Page(page).plots]
    assert titles[3:] == [
        "String accuracy by length",
        "String accuracy while training",
        "Loss while training",
        "Bits per byte by length",
        "Bits per byte while training",
        "Loss while training",
        "State size",
        "Decoding speed",
        "Training speed",
        "FLOPs per token",
    ]


def test_baselines_and_the_training_length_are_drawn(page):
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert {"gzip 2.9", "xz 2.7", "solved 0.95", "trained"} <= set(drawn)


def test_a_model_that_did_not_solve_its_task_is_dashed(make, tmp_path):
    task = make.task()
    scores = {"10": 0.5, "20": 0.4, "40": 0.3}
    failed = make.results(tasks=[task], runs=[make.run("h3*2", task, scores)])
    dashed = r"stroke-dasharray: [^;]*; stroke-dashoffset: 0; stroke: var\(--model-1\)"
    assert re.search(dashed, written(failed, tmp_path))
    assert not re.search(dashed, written(make.results(), tmp_path))


def test_text_is_escaped(make, tmp_path):
    evil = '<script>alert("1")</script>\\g<0>&'
    task = make.text_task(
        spec=evil, title=evil, about=evil, metric=evil, baselines={evil: 2.0}, data={evil: [evil]}
    )
    runs = [make.run(evil, task, {"256": 2.5, "1024": 2.0})]
    results = make.results(
        tasks=[task],
        models=[evil],
        runs=runs,
        speed=[make.speed(evil)],
        command=evil,
        environment={"cpu": evil},
    )
    page = written(results, tmp_path)
    assert "<script" not in page
    assert evil in "".join(Page(page).text)


def test_unfinished_results_still_make_a_report(make, tmp_path):
    results = make.results(finished=False)
    for runs in (results["runs"][:1], []):
        page = written(results | {"runs": runs, "speed": []}, tmp_path)
        assert "This comparison has not finished" in page
        assert "No run on this task is there yet." in page
        assert "<h2>Cost</h2>" not in page


def test_speeds_measured_at_one_length_or_not_at_all_still_make_a_report(make, tmp_path):
    one = make.speed("h3*2", state_bytes={"256": 0}, flops_per_token={"256": 300_000})
    none = make.speed("lstm*2", decode_tokens_per_second={}, train_tokens_per_second={})
    assert "<h2>Cost</h2>" in written(make.results(speed=[one, none]), tmp_path)


def test_the_data_record_lists_the_held_out_files(page):
    assert "<summary>2 in all</summary><ul><li>a.txt</li><li>b.txt</li></ul>" in page
    assert "<dt>files</dt><dd>12,345</dd>" in page


def test_more_models_than_colours_differ_in_shape(make, tmp_path):
    models = [f"h3*{n}" for n in range(1, 11)]
    task = make.text_task()
    runs = [make.run(model, task, {"256": 2.5, "1024": 2.0}) for model in models]
    page = written(make.results(models=models, tasks=[task], runs=runs, speed=[]), tmp_path)
    keys = re.findall(r'<svg id="key-\d+".*?</svg>', page, flags=re.DOTALL)
    shapes = [re.sub(r"key-\d+|m[0-9a-f]{10}|aria-label=\"[^\"]*\"", "", key) for key in keys]
    assert len(set(shapes)) == 10


def test_a_failed_write_leaves_the_old_report_and_nothing_else(make, tmp_path, monkeypatch):
    old = written(make.results(), tmp_path)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(make.results(command="other"), tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == old


def test_importing_reports_imports_neither_torch_nor_pyplot():
    check = (
        "import sys, stateline.reports as _; print({'torch', 'matplotlib.pyplot'} & {*sys.modules})"
    )
    said = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
