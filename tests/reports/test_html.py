import base64
import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.reports.typed import page_of

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


@pytest.fixture(scope="module")
def page(make):
    return page_of(make.results())


def test_the_page_is_self_contained(page):
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert page.count("<script") == page.count("<script>") == 1
    assert all(reference.startswith("#") for reference in Page(page).references)


def test_only_the_script_of_the_page_may_run(page):
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def test_every_reference_leads_to_one_element(page):
    parsed = Page(page)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert {reference.removeprefix("#") for reference in parsed.references} <= set(parsed.ids)


def test_elements_nest(page):
    assert Page(page).open == []


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
        "String accuracy during training",
        "Loss during training",
        "Bits per byte by length",
        "Bits per byte during training",
        "Loss during training",
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
    assert re.search(dashed, page_of(failed))
    assert not re.search(dashed, page_of(make.results()))


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
    page = page_of(results)
    assert page.count("<script") == 1
    assert evil in "".join(Page(page).text)


def test_unfinished_results_still_make_a_report(make, tmp_path):
    results = make.results(finished=False)
    for runs in (results["runs"][:1], []):
        page = page_of(results | {"runs": runs, "speed": []})
        assert "This comparison has not finished" in page
        assert "No run on this task has finished yet." in page
        assert "<h2>Cost</h2>" not in page


def test_speeds_measured_at_one_length_or_not_at_all_still_make_a_report(make, tmp_path):
    one = make.speed("h3*2", state_bytes={"256": 0}, flops_per_token={"256": 300_000})
    none = make.speed("lstm*2", decode_tokens_per_second={}, train_tokens_per_second={})
    assert "<h2>Cost</h2>" in page_of(make.results(speed=[one, none]))


def test_the_data_record_lists_the_held_out_files(page):
    assert "<summary>2 in all</summary><ul><li>a.txt</li><li>b.txt</li></ul>" in page
    assert "<dt>files</dt><dd>12,345</dd>" in page


def test_more_models_than_colours_differ_in_shape(make, tmp_path):
    models = [f"h3*{n}" for n in range(1, 11)]
    task = make.text_task()
    runs = [make.run(model, task, {"256": 2.5, "1024": 2.0}) for model in models]
    page = page_of(make.results(models=models, tasks=[task], runs=runs, speed=[]))
    keys = re.findall(r'<svg id="key-\d+".*?</svg>', page, flags=re.DOTALL)
    shapes = [re.sub(r"key-\d+|m[0-9a-f]{10}|aria-label=\"[^\"]*\"", "", key) for key in keys]
    assert len(set(shapes)) == 10


def test_a_score_by_position_is_shown_where_a_run_has_it(make):
    results = make.results()
    title = "<figcaption>Bits per byte by position</figcaption>"
    assert title not in page_of(results)
    results["runs"][1]["by_position"] = {"64": 3.0, "256": 2.5, "512": None, "4096": 2.4}
    page = page_of(results)
    assert page.count(title) == 1
    figure = page[page.index(title) :].partition("</figure>")[0]
    assert figure.count("<li>") == 1
    assert {"64", "256", "4096", "trained"} <= set(re.findall(r"<text[^>]*>([^<]*)</text>", figure))


def test_what_a_model_wrote_is_shown_folded_and_escaped(make):
    results = make.results()
    assert "Written by" not in page_of(results)
    results["runs"][1]["sample"] = "<b>\x00\udce9é\n\tx & y"
    page = page_of(results)
    summary = f"<details><summary>Written by {make.models[0]}, seed 0</summary>"
    assert f'{summary}<pre class="sample">&lt;b&gt;\ufffd\ufffdé\n\tx &amp; y</pre>' in page
    page.encode()


def test_the_training_configuration_of_every_run_is_shown_folded(make):
    results = make.results()
    assert "Training configuration" not in page_of(results)
    for seed, run in enumerate(results["runs"]):
        run["training"] = {"lr": 0.001 + seed, "ssm_lr": None, "schedule": "cosine"}
    page = page_of(results)
    assert page.count("<details><summary>Training configuration</summary>") == 2
    assert all(f">{run['training']['lr']}</td>" in page for run in results["runs"])


def test_every_number_can_be_sorted_by(make):
    results = make.results()
    results["runs"][0]["steps_to_solve"] = None
    page = page_of(results)
    cells = re.findall(r"<td[^>]*?(data-value=\"[^\"]*\")?>([^<]*)", page)
    assert len(cells) > 50
    assert {text for value, text in cells if not value} == {"never"}


def test_columns_are_numbered_as_they_stand(page):
    tables = re.findall("<table>.*?</table>", page, flags=re.DOTALL)
    for table in tables:
        numbers = re.findall(r'data-column="(\d+)"', table)
        row = table.partition("<tbody>")[2].partition("</tr>")[0]
        assert sorted(map(int, numbers)) == list(range(1 + row.count("<td")))
    assert len(tables) == 6


def test_importing_reports_imports_neither_torch_nor_pyplot():
    check = (
        "import sys, stateline.reports as _; print({'torch', 'matplotlib.pyplot'} & {*sys.modules})"
    )
    said = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
