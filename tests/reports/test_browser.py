"""The report in a browser: what a person sees, and can do, on a wide screen and on a phone."""

import pytest

from stateline.reports.html import page as page_of
from tests.reports.typed import merge, typed

pytestmark = pytest.mark.slow

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


def show(browser, page, width=1280, scheme="light"):
    browser.open(page, width, scheme)
    browser.ask("document.querySelectorAll('details').forEach(d => d.open = true)")


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_nothing_is_wider_than_the_screen(browser, page, width, scheme):
    show(browser, page, width, scheme)
    assert browser.ask("innerWidth") == width
    assert browser.ask("document.documentElement.scrollWidth") <= width
    wide = """[...document.body.querySelectorAll("*")].filter(
        e => !e.closest("svg, .scroll, .keys") && e.getBoundingClientRect().right > innerWidth
    ).map(e => e.outerHTML.slice(0, 80))"""
    assert browser.ask(wide) == []


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_the_console_is_silent(browser, page, width, scheme):
    show(browser, page, width, scheme)
    assert browser.errors() == []


def test_the_console_would_tell_of_a_mistake(browser, page, tmp_path):
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


@pytest.mark.parametrize("width", [1280, 390])
def test_every_picture_has_a_size(browser, page, width):
    show(browser, page, width)
    assert browser.ask("[...document.images].every(i => i.complete && i.naturalWidth)")
    sizes = "[...document.querySelectorAll('figure > svg')].map(s => s.getBoundingClientRect())"
    drawn = browser.ask(f"{sizes}.map(b => [b.width, b.height])")
    assert len(drawn) == 3 + 4 + 3 + 4
    assert all(0 < w <= width and 150 < h < 400 for w, h in drawn)


def test_the_page_follows_the_scheme_of_the_reader(browser, page):
    seen = set()
    for scheme in ("light", "dark"):
        show(browser, page, scheme=scheme)
        text = "getComputedStyle(document.querySelector('figure text')).fill"
        seen.add(
            (browser.ask("getComputedStyle(document.body).backgroundColor"), browser.ask(text))
        )
    assert seen == {
        ("rgb(255, 255, 255)", "rgb(28, 32, 36)"),
        ("rgb(20, 23, 27)", "rgb(228, 231, 235)"),
    }


HEADING = "document.querySelectorAll('thead th[data-column]')[{}]"
"""In the first table: 0 is the models, 1 their parameters, 4 the steps to solve."""
FIRST = "[...document.querySelector('tbody').rows]"


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


def test_models_sort_by_name(browser, page):
    show(browser, page)
    browser.click(f"{HEADING.format(0)}.firstChild")
    names = column(browser, 0)
    assert names == sorted(names)


def test_without_scripts_the_page_is_complete(browser, page):
    show(browser, page)
    text = "document.body.innerText.replace(/Click a heading to sort./, '').replace(/\\s/g, '')"
    scripted = browser.ask(text)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show(browser, page)
        assert browser.ask("document.querySelector('thead button')") is None
        assert browser.ask(text) == scripted
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
