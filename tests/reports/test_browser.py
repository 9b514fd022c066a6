"""The report in a browser: what a person sees, and can do, on a wide screen and on a phone.

Charts become interactive shortly before they are seen, so the tests scroll through the page.
"""

from pathlib import Path

import pytest

from stateline.reports.html import page as page_of
from stateline.runs.folder import read_results
from tests.reports.typed import merge, typed

pytestmark = pytest.mark.slow

GALLERY = Path(__file__).parents[2] / "docs" / "gallery" / "hybrids"

SIZES = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="module")
def page(make, tmp_path_factory):
    """The report of two runs, with all that a report can hold, and with names that are too long."""
    models = ["attention(position=hard_alibi, n_heads=8)*2 h3(d_state=64)*2", "h3*2", "lstm*2"]
    tasks = [make.task(), make.text_task(data={"sha256": "9f" * 32, "files": ["x" * 200] * 30})]
    training = {"steps": 1000, "lr": 0.004, "ssm_lr": None, "schedule": "cosine", "seed": 0}
    runs = [
        make.run(model, of, make.scores[of["metric"]], training=training, parameters=size)
        for size, model in zip((90_000, 120_000, 110_000), models, strict=True)
        for of in tasks
    ]
    runs[1] |= {"by_position": {"64": 3.1, "128": 2.8, "256": 2.6, "1024": 2.4}}
    runs[1] |= {"sample": "<b>\x00\udce9 " + "unbroken" * 50}
    command = "stateline compare " + " ".join(f"'{model}'" for model in models) + " x" * 40
    speed = [make.speed(model) for model in models]
    first = make.results(models=models, tasks=tasks, runs=runs, speed=speed, command=command)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page_of(merge({"first": first, "second": make.results(finished=False)})))
    return path


CHARTS = "[...document.querySelectorAll('[data-chart]')]"
SCATTER = "document.querySelector('[data-chart$=against-state-size]')"
"""All charts of the page."""


def show(browser, page, width=1280, scheme="light"):
    browser.open(page, width, scheme)
    browser.ask("document.querySelectorAll('details').forEach(d => d.open = true)")


def show_all(browser, page, width=1280, scheme="light"):
    """Show a page of which every chart has been seen."""
    show(browser, page, width, scheme)
    for number in range(browser.ask(f"{CHARTS}.length")):
        browser.ask(f"{CHARTS}[{number}].scrollIntoView()")
        browser.wait(f"'drawn' in {CHARTS}[{number}].dataset")
    browser.ask("scrollTo(0, 0)")


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_the_whole_page_is_drawn_in_silence_within_the_screen(browser, page, width, scheme):
    show_all(browser, page, width, scheme)
    assert browser.errors() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.ask("innerWidth") == width
    assert browser.ask("document.documentElement.scrollWidth") <= width
    wide = """[...document.body.querySelectorAll("*")].filter(
        e => !e.closest("svg, .scroll, .legend") && e.getBoundingClientRect().right > innerWidth
    ).map(e => e.outerHTML.slice(0, 80))"""
    assert browser.ask(wide) == []
    sizes = f"{CHARTS}.map(c => c.querySelector('svg').getBoundingClientRect())"
    drawn = browser.ask(f"{sizes}.map(b => [b.width, b.height])")
    assert len(drawn) == 9 + 3 + 4 + 3 + 4
    assert all(280 < w <= width and 180 < h < 400 for w, h in drawn)


def test_a_mistake_in_a_script_is_seen(browser, page, tmp_path):
    wrong = tmp_path / "wrong.html"
    text = page.read_text()
    for old, new in [
        ("</header>", '</header><img src="nowhere.png">'),
        ("</header>", "</header><script>nothing()</script>"),
        ('"use strict";', '"use strict"; nothing();'),
    ]:
        wrong.write_text(text.replace(old, new))
        show(browser, wrong)
        assert browser.errors()


def test_a_request_is_seen_and_refused(browser, page, tmp_path):
    asking = tmp_path / "asking.html"
    picture = '</header><img src="http://127.0.0.1:9/nowhere.png">'
    asking.write_text(page.read_text().replace("</header>", picture))
    show(browser, asking)
    assert any("Content Security Policy" in str(error) for error in browser.errors())


@pytest.mark.parametrize("scripts", [True, False])
def test_the_page_and_its_charts_follow_the_scheme_of_the_reader(browser, page, scripts):
    fill = f"getComputedStyle({CHARTS}[0].querySelector('text')).fill"
    line = "getComputedStyle(document.querySelector('.mark-symbol path[fill^=\"#00\"]')).fill"
    seen = {}
    browser.call("Emulation.setScriptExecutionDisabled", value=not scripts)
    try:
        for scheme in ("light", "dark"):
            show_all(browser, page, scheme=scheme) if scripts else show(
                browser, page, scheme=scheme
            )
            back = "getComputedStyle(document.body).backgroundColor"
            seen[scheme] = [browser.ask(back), browser.ask(fill), browser.ask(line)]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert seen == {
        "light": ["rgb(255, 255, 255)", "rgb(28, 32, 36)", "rgb(0, 103, 168)"],
        "dark": ["rgb(20, 23, 27)", "rgb(228, 231, 235)", "rgb(74, 156, 224)"],
    }


KEYS = "document.querySelectorAll('.legend button')"


def faded(browser):
    """The models that are faded in a chart, and in the first table."""
    opacity = "getComputedStyle(p).opacity * (p.getAttribute('opacity') ?? 1)"
    lines = f"[...{CHARTS}[0].querySelectorAll('.mark-line path')]"
    drawn = browser.ask(f"{lines}.map(p => {opacity} < 0.1)")
    rows = browser.ask(f"{FIRST}.map(r => r.matches('.faded'))")
    return drawn, rows


def test_a_click_in_the_legend_isolates_a_model_in_charts_and_tables(browser, page):
    show_all(browser, page)
    charts, rows = faded(browser)
    assert not any(charts)
    assert not any(rows)
    n = len(rows)
    browser.click(f"{KEYS}[1]")
    assert browser.ask(f"{KEYS}[1].getAttribute('aria-pressed')") == "true"
    browser.wait("document.querySelector('.faded')")
    charts, rows = faded(browser)
    assert rows == [number != 1 for number in range(n)]
    assert charts.count(False) == 1
    browser.click(f"{KEYS}[2]")  # one more
    assert faded(browser)[1].count(False) == 2
    browser.click(f"{KEYS}[1]")
    browser.click(f"{KEYS}[2]")
    charts, rows = faded(browser)
    assert not any(charts)
    assert not any(rows)


def test_a_key_of_the_legend_is_pressed_without_a_mouse(browser, page):
    show(browser, page)
    browser.ask(f"{KEYS}[0].focus()")
    browser.press("Enter", "\r")
    assert browser.ask(f"{KEYS}[0].getAttribute('aria-pressed')") == "true"


def test_a_mark_tells_its_values_and_a_click_on_it_isolates_its_model(browser, page):
    show_all(browser, page)
    mark = f"{SCATTER}.querySelector('.mark-symbol path')"
    browser.point(mark)
    browser.wait("document.querySelector('#vg-tooltip-element.visible')")
    told = browser.ask("document.querySelector('#vg-tooltip-element').innerText")
    assert "model" in told
    assert "string accuracy at length 40" in told
    assert "bytes per sequence, at 256 tokens" in told
    browser.click(mark)
    browser.wait(f"[...{KEYS}].filter(k => k.getAttribute('aria-pressed') == 'true').length == 1")


def test_a_hostile_name_is_text_everywhere(browser, make, tmp_path):
    evil = "<img src=x onerror=alert(1)>\"'</script><script>nothing()</script>${nothing()}"
    task = make.text_task(title=evil, about=evil, metric=evil, baselines={evil: 2.0})
    runs = [
        make.run(evil, task, {"256": 2.5, "1024": 2.0}),
        make.run("h3", task, {"256": 2.0, "1024": 1.0}),
    ]
    results = make.results(
        models=[evil, "h3"], tasks=[task], runs=runs, speed=[make.speed(evil), make.speed("h3")]
    )
    path = tmp_path / "evil.html"
    path.write_text(page_of(typed(results)))
    show_all(browser, path)
    browser.point(f"{SCATTER}.querySelector('.mark-symbol path')")
    browser.wait("document.querySelector('#vg-tooltip-element.visible')")
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert "<img" in browser.ask("document.querySelector('#vg-tooltip-element').innerText")
    browser.click(f"{KEYS}[0]")
    assert browser.errors() == []


@pytest.mark.parametrize("width", [1280, 390])
def test_a_name_without_a_space_stays_within_the_screen(browser, make, tmp_path, width):
    models = ["long" * 30, "lengthy" * 20]
    speed = [make.speed(model) for model in models]
    runs = [
        make.run(model, of, make.scores[of["metric"]], seed=seed)
        for model in models
        for of in (make.task(), make.text_task())
        for seed in range(2)
    ]
    path = tmp_path / "long.html"
    path.write_text(page_of(typed(make.results(models=models, runs=runs, speed=speed))))
    show(browser, path, width)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    over = """[...document.querySelectorAll("th.model code")].filter(code =>
        code.getBoundingClientRect().right > code.closest("th").getBoundingClientRect().right)"""
    assert browser.ask(f"{over}.length") == 0
    score = "document.querySelectorAll('#results thead th[data-column]')[2]"
    assert browser.ask(f"{score}.getBoundingClientRect().right") <= width  # beside the name


HEADING = "document.querySelectorAll('thead th[data-column]')[{}]"
"""In the first table: 0 is the models, 1 their parameters, 4 the steps to solve."""
FIRST = "[...document.querySelector('#results tbody').rows]"


def column(browser, number):
    return browser.ask(f"{FIRST}.map(row => row.cells[{number}].textContent)")


def test_a_click_on_a_heading_sorts_up_then_down_then_as_given(browser, page):
    show(browser, page)
    heading = HEADING.format(1)
    given = column(browser, 1)
    assert sorted(given) != given
    up = ["†90k", "†110k", "120k", "120k", "120k", "120k"]
    for order, wanted in [("ascending", up), ("descending", up[::-1]), (None, given)]:
        browser.click(f"{heading}.firstChild")
        assert column(browser, 1) == wanted
        assert browser.ask(f"{heading}.getAttribute('aria-sort')") == order


def test_a_heading_is_reached_and_pressed_by_keys(browser, page):
    show(browser, page)
    browser.ask(f"{HEADING.format(0)}.firstChild.focus()")
    browser.press("Tab")
    browser.press("Enter", "\r")
    assert browser.ask(f"{HEADING.format(1)}.getAttribute('aria-sort')") == "ascending"
    assert column(browser, 1)[0] == "†90k"


def test_only_one_column_is_said_to_sort(browser, page):
    show(browser, page)
    for number in (1, 2):
        browser.click(f"{HEADING.format(number)}.firstChild")
    assert browser.ask("document.querySelectorAll('[aria-sort]').length") == 1
    assert browser.ask(f"{HEADING.format(2)}.getAttribute('aria-sort')") == "ascending"


@pytest.mark.parametrize("clicks", [1, 2])
def test_what_is_missing_comes_last_both_ways(browser, make, tmp_path, clicks):
    results = make.results()
    del results["runs"][0]
    (tmp_path / "report.html").write_text(page_of(typed(results)))
    show(browser, tmp_path / "report.html")
    for _ in range(clicks):
        browser.click(f"{HEADING.format(2)}.firstChild")
    assert column(browser, 2)[-1] == "\N{EN DASH}"
    assert column(browser, 2)[0] != "\N{EN DASH}"


def test_models_sort_by_name_and_not_by_their_marks(browser, make, tmp_path):
    models = ["lstm*2", "H3*2", "attention*10", "attention*2", "s4d"]
    results = make.results(models=models, runs=[], speed=[make.speed(model) for model in models])
    (tmp_path / "report.html").write_text(page_of(typed(results)))
    show(browser, tmp_path / "report.html")
    browser.click(f"{HEADING.format(0)}.firstChild")
    names = [name[1:] for name in column(browser, 0)]
    assert names == ["attention*2", "attention*10", "H3*2", "lstm*2", "s4d"]


def test_a_column_of_words_sorts_by_them(browser, page):
    show(browser, page)
    heading = "document.querySelector('#details thead th[data-column=\"1\"]')"
    tasks = "[...document.querySelector('#details tbody').rows].map(r => r.cells[1].textContent)"
    given = browser.ask(tasks)
    assert given != sorted(given)
    for wanted in (sorted(given), sorted(given, reverse=True), given):
        browser.click(f"{heading}.firstChild")
        assert browser.ask(tasks) == wanted


def test_what_has_no_bound_is_the_largest(browser, make, tmp_path):
    entries = [
        make.speed(m, longest_copy=n) for m, n in zip(make.models, [None, 7, 9], strict=True)
    ]
    (tmp_path / "report.html").write_text(page_of(typed(make.results(speed=entries))))
    show(browser, tmp_path / "report.html")
    last = browser.ask("document.querySelectorAll('#results thead th[data-column]').length") - 1
    heading = f"document.querySelector('#results thead th[data-column=\"{last}\"]').firstChild"
    for wanted in (["7", "9", "any"], ["any", "9", "7"]):
        browser.click(heading)
        assert column(browser, last) == wanted


def test_without_scripts_the_page_has_its_pictures_and_words(browser, page):
    show(browser, page)
    words = "document.querySelector('#details').innerText.replace(/\\s/g, '')"
    scripted = browser.ask(words)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show(browser, page)
        assert browser.ask("document.querySelector('button')") is None
        assert browser.ask(words) == scripted
        assert browser.ask(f"{CHARTS}.every(c => c.querySelector('svg').clientHeight > 150)")
        said = browser.ask("document.querySelector('.legend').innerText")
        assert "Without JavaScript the charts are pictures" in said
        assert "Click" not in said
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """The page of a real comparison."""
    path = tmp_path_factory.mktemp("gallery") / "report.html"
    path.write_text(page_of(read_results(GALLERY)))
    return path


COVERED = """[...document.querySelectorAll("[data-chart]")].flatMap(chart => {
    const texts = [...chart.querySelectorAll("text")].filter(t => t.textContent.trim());
    const boxes = texts.map(t => t.getBoundingClientRect());
    return texts.flatMap((text, n) => texts.slice(0, n).filter((_, m) =>
        boxes[m].left + 1 < boxes[n].right && boxes[n].left + 1 < boxes[m].right &&
        boxes[m].top + 1 < boxes[n].bottom && boxes[n].top + 1 < boxes[m].bottom
    ).map(other => [chart.dataset.chart, text.textContent, other.textContent]));
})"""
"""Pairs of texts in a chart that cover one another."""


@pytest.mark.parametrize("name", ["page", "gallery"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_text_of_a_chart_covers_another(browser, request, name, width):
    show_all(browser, request.getfixturevalue(name), width)
    assert browser.ask("document.querySelectorAll('[data-chart] text').length") > 100
    assert browser.ask(COVERED) == []


def test_a_text_that_covers_another_is_found(browser, gallery):
    show_all(browser, gallery)
    browser.ask(
        f"{SCATTER}.querySelectorAll('.mark-text text').forEach("
        "t => t.setAttribute('transform', 'translate(0, 0)'))"
    )
    assert browser.ask(COVERED)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_first_screen_has_the_answers(browser, gallery, width):
    """On a wide screen the whole table; on a phone, where a row is a card, who solved each task."""
    browser.open(gallery, width, "light")
    places = ".decisions tbody tr" if width == 1280 else "#decision > ul.solvers li"
    rows = f"[...document.querySelectorAll('{places}')]"
    ends = browser.ask(f"{rows}.map(row => row.getBoundingClientRect().bottom)")
    assert len(ends) >= 3
    assert [end for end in ends if end > 900] == []


def test_whatever_takes_the_focus_has_a_name(browser, gallery):
    show_all(browser, gallery)
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    focusable = [
        node
        for node in tree
        if not node["ignored"]
        and any(p["name"] == "focusable" and p["value"]["value"] for p in node["properties"])
        and node["role"]["value"] != "RootWebArea"
    ]
    assert len(focusable) > 50
    assert [node["role"] for node in focusable if not node.get("name", {}).get("value")] == []
