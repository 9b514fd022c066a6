import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stateline.charts.style import VARIABLES, styled
from stateline.reports.html import legend
from stateline.reports.records import drawn_models
from stateline.reports.series import MEDIAN
from stateline.reports.trade_offs import BARS, FRONT
from stateline.runs.folder import read_results
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
    return page_of(make.results(), pictures=True)


def scripts(text):
    """What runs in a page: the bundle of Vega, and the page's own script."""
    return re.findall("<script>(.*?)</script>", text, flags=re.DOTALL)


def without_bundle(text):
    """A page without the script of Vega, in which addresses of name spaces stand."""
    bundle, _ = scripts(text)
    return text.replace(bundle, "")


def test_the_page_is_self_contained(page):
    own = without_bundle(page)
    assert "http://" not in own
    assert "https://" not in own
    assert "@import" not in own
    assert page.count("<script>") == 2
    assert page.count("<script type=") == own.count('<script type="application/json" id="charts">')
    assert all(reference.startswith("#") for reference in Page(page).references)


def test_only_the_scripts_of_the_page_may_run(page):
    digests = [hashlib.sha256(text.encode()).digest() for text in scripts(page)]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed} " in page
    assert "unsafe-eval" not in page


def test_every_reference_leads_to_one_element(page):
    parsed = Page(page)
    assert len(set(parsed.ids)) == len(parsed.ids)
    inside = {ref.removeprefix("#") for ref in parsed.references if not ref.startswith("#/")}
    assert inside <= set(parsed.ids)


def test_elements_nest(page):
    assert Page(page).open == []


def charts(page):
    """The specifications of the charts that a page makes interactive, by name."""
    text = page.partition('id="charts">')[2].partition("</script>")[0]
    return json.loads(text)


def test_every_chart_is_a_picture_and_a_specification(page):
    own = without_bundle(page)
    names = re.findall('data-chart="([^"]*)"', own)
    assert sorted(names) == sorted(charts(page))
    assert own.count('class="marks"') == len(names)


def test_a_report_goes_from_the_decision_to_the_details(page):
    headings = re.findall("<h2>([^<]*)</h2>", without_bundle(page))
    assert headings == [
        "Which one",
        "Score against cost",
        "Results",
        "Copying",
        "Text",
        "Cost",
        "Details",
    ]


def test_every_chart_says_what_it_shows(page):
    labels = re.findall('role="img" aria-label="([^.]*)[.]', page)
    assert labels == [
        "Copying: string accuracy by length",
        "Text: bits per byte by length",
        "Copying: string accuracy against state size",
        "Text: bits per byte against state size",
        "Copying: string accuracy against FLOPs per token",
        "Copying: string accuracy against decoding speed",
        "Text: bits per byte against FLOPs per token",
        "Text: bits per byte against decoding speed",
        "Copying: string accuracy during training",
        "Copying: loss during training",
        "Text: bits per byte during training",
        "Text: loss during training",
        "State size",
        "FLOPs per token",
        "Decoding speed",
        "Training speed",
    ]


@pytest.mark.parametrize("seeds", [1, 2])
def test_what_all_charts_of_a_section_have_in_common_is_said_once(make, seeds):
    """Medians and spreads over seeds are told only where there are several seeds."""
    results = make.results()
    results["runs"] = [run | {"seed": n} for run in results["runs"] for n in range(seeds)]
    for run in results["runs"]:
        run["by_length"] = {
            length: {name: value - run["seed"] / 100 for name, value in scores.items()}
            for length, scores in run["by_length"].items()
        }
    visible = re.sub('aria-label="[^"]*"', "", page_of(results))
    assert visible.count(FRONT) == 2  # scores against state, and against other costs
    assert visible.count(BARS) == 2 * (seeds - 1)
    assert visible.count(MEDIAN) == 3 * (seeds - 1)  # scores by length, and two tasks


def test_every_table_and_the_page_have_names_of_their_own(page):
    own = without_bundle(page)
    names = re.findall('role="(?:region|table)" aria-label="([^"]*)"', own)
    assert len(names) == len(set(names)) == own.count("<table")
    assert own.count("<main>") == 1
    assert "graphics-symbol" not in own


def test_a_model_has_one_colour_throughout(page):
    seen = {}
    for spec in charts(page).values():
        for layer in spec["layer"]:
            scale = layer["encoding"].get("color", {}).get("scale")
            for model, colour in zip(*scale.values(), strict=True) if scale else ():
                seen.setdefault(model, set()).add(colour)
    assert all(len(colours) == 1 for colours in seen.values())
    assert len(set.union(*seen.values())) == len(seen) == 3


def test_every_colour_of_a_chart_has_one_in_the_dark(page):
    pictures = "".join(re.findall(r"<svg .*?</svg>", without_bundle(page), flags=re.DOTALL))
    used = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]+|[a-z]+)"', pictures))
    assert used - {"none", "transparent"} <= VARIABLES.keys()


def test_baselines_and_the_training_length_are_drawn(page):
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert {"gzip 2.9", "xz 2.7", "solved 0.95", "trained"} <= set(drawn)


def test_the_legend_of_several_sizes_lists_architectures():
    results = read_results(Path("tests/runs/sweep"))
    keys = legend(results)
    assert [key.name for key in keys] == ["attention", "h3"]
    assert keys[1].members == ["h3", "h3 · 10k", "h3 · 30k", "h3 · 100k"]
    looks = drawn_models(results)
    assert len({(m.colour, m.shape) for m in looks.values()}) == 6
    assert len({m.colour for m in looks.values()}) == 2


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
    assert page.count("<script") == 3
    assert "alert(" not in scripts(page)[1]
    assert evil in "".join(Page(page).text)
    assert evil in json.dumps(charts(page), ensure_ascii=False).replace('\\"', '"').replace(
        "\\\\", "\\"
    )


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


def test_more_models_than_colours_differ_in_shape():
    models = styled([f"h3*{n}" for n in range(1, 31)])
    assert len({(model.colour, model.shape) for model in models}) == 30


def test_a_score_by_position_is_shown_where_a_run_has_it(make):
    results = make.results()
    title = "<figcaption>Text: bits per byte by position</figcaption>"
    assert title not in page_of(results)
    results["runs"][1]["by_position"] = {"64": 3.0, "256": 2.5, "512": None, "4096": 2.4}
    page = page_of(results)
    assert page.count(title) == 1
    spec = charts(page)["text-by-position"]
    rows = spec["datasets"][spec["data"]["name"]]
    assert [row["x"] for row in rows] == [64, 256, 4096]
    assert {row["model"] for row in rows} == {make.models[0]}


def test_what_a_model_wrote_is_shown_folded_and_escaped(make):
    results = make.results(speed=[])
    assert "Written by" not in page_of(results)
    results["runs"][1]["sample"] = "<b>\x00\udce9é\n\tx & y"
    page = page_of(results)
    summary = f"<details><summary>Written by {make.models[0]}, seed 0</summary>"
    assert f'{summary}<pre class="sample">&lt;b&gt;\ufffd\ufffdé\n\tx &amp; y</pre>' in page
    page.encode()


def test_the_training_configuration_of_every_run_is_shown_folded(make):
    results = make.results(speed=[])
    assert "Training configuration" not in page_of(results)
    for seed, run in enumerate(results["runs"]):
        run["training"] = {"lr": 0.001 + seed, "ssm_lr": None, "schedule": "cosine"}
    page = page_of(results)
    assert page.count("<details><summary>Training configuration</summary>") == 2
    assert all(f">{run['training']['lr']}</td>" in page for run in results["runs"])


def test_a_setting_that_all_runs_share_is_told_once_and_not_in_a_column(make):
    results = make.results(speed=[])
    for seed, run in enumerate(results["runs"]):
        run["training"] = {"lr": 0.001 + seed, "schedule": "cosine"}
    folded = page_of(results).split("<summary>Training configuration</summary>")[1:]
    assert len(folded) == 2
    for rest in folded:
        table, _, after = rest.partition("</table>")
        assert re.findall('<th scope="col" data-column[^>]*>([^<]*)', table) == ["lr"]
        assert "schedule cosine" in after.partition("</details>")[0]


def test_scores_that_are_all_equal_are_told_without_the_numbers_of_each_pair(make):
    """A page of six seeds; it speaks of six, and repeats no score of zero for each pair."""
    task = make.task()
    runs = [
        make.run(model, task, dict.fromkeys(["10", "20", "40"], 0.0), seed=seed)
        for model in make.models
        for seed in range(6)
    ]
    page = page_of(make.results(tasks=[task], runs=runs, speed=[]))
    words = re.sub("<[^>]*>", "", without_bundle(page))
    assert "6 seeds" in words
    assert "three seeds" not in words
    assert "3 seeds" not in words
    assert "0.000 and 0.000" not in words


def test_every_number_can_be_sorted_by(make):
    results = make.results()
    results["runs"][0]["by_length"]["10"] = {"string_accuracy": 0.5}
    page = page_of(results)
    cells = re.findall(r"<td[^>]*?(data-value=\"[^\"]*\")?>([^<]*)", page)
    assert len(cells) > 50
    own = page.partition('id="results"')[2].partition("All runs")[0]  # elsewhere cells are words
    cells = re.findall(r"<td[^>]*?(data-value=\"[^\"]*\")?>([^<]*)", own)
    assert {text for value, text in cells if not value} == {"never", "not solved"}


def test_columns_are_numbered_as_they_stand(page):
    tables = re.findall("<table>.*?</table>", without_bundle(page), flags=re.DOTALL)
    for table in tables:
        numbers = re.findall(r'data-column="(\d+)"', table)
        row = table.partition("<tbody>")[2].partition("</tr>")[0]
        assert sorted(map(int, numbers)) == list(range(1 + row.count("<td")))
    assert len(tables) == 7


def test_importing_reports_imports_neither_torch_nor_altair():
    check = "import sys, stateline.reports as _; print({'torch', 'altair'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
