"""The report in a browser: what a person sees, and can do, on a wide screen and on a phone.

Chromium is told what to do over a pipe, in the DevTools protocol: nothing is installed for it.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateline.reports import merge
from stateline.reports.html import page as page_of

SIZES = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]

PROGRAM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "chrome"])), None)
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--remote-debugging-pipe",),
]
SECONDS = 60
"""In which the browser must answer."""


def _high(descriptor: int) -> int:
    """The same file by a number out of the way of 3 and 4, which are those of the browser."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64)
    os.close(descriptor)
    return copy


class Browser:
    """One page of a browser without a window."""

    def __init__(self, profile: Path) -> None:
        commands, self.commands = map(_high, os.pipe())
        self.answers, answers = map(_high, os.pipe())
        copy = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", copy, str(PROGRAM), *OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.pending, self.number, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Tell the browser to do something, and wait until it is done."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.pending:
            assert select.select([self.answers], [], [], SECONDS)[0], "the browser does not answer"
            self.pending += (read := os.read(self.answers, 1 << 20))
            assert read, "the browser has gone"
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int, scheme: str) -> None:
        """Show a page, and wait until it is there; what went wrong before is forgotten."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.read())

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def errors(self) -> list[dict[str, Any]]:
        """What the console of the page says: exceptions, refused scripts, missing files."""
        self.ask("0")  # what was said before has arrived when this is answered
        kinds = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
        return [event for event in self.events if event.get("method") in kinds]

    def click(self, element: str) -> None:
        """Click with a mouse in the middle of an element, given as an expression."""
        self.ask(f"{element}.scrollIntoView({{block: 'center', inline: 'center'}})")
        box = self.ask(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])({element}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            code = {"Enter": 13, "Tab": 9}[key]
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more
            )

    def close(self) -> None:
        self.session = ""
        self.call("Browser.close")
        os.close(self.commands)
        self.process.wait(20)
        os.close(self.answers)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("there is no chromium: install it to see whether reports work in a browser")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(make: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def show(browser: Browser, page: Path, width: int = 1280, scheme: str = "light") -> None:
    browser.open(page, width, scheme)
    browser.ask("document.querySelectorAll('details').forEach(d => d.open = true)")


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_nothing_is_wider_than_the_screen(
    browser: Browser, page: Path, width: int, scheme: str
) -> None:
    show(browser, page, width, scheme)
    assert browser.ask("innerWidth") == width
    assert browser.ask("document.documentElement.scrollWidth") <= width
    wide = """[...document.body.querySelectorAll(":not(.scroll *)")].filter(
        e => !e.closest("svg, .scroll, .keys") && e.getBoundingClientRect().right > innerWidth
    ).map(e => e.outerHTML.slice(0, 80))"""
    assert browser.ask(wide) == []


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_the_console_is_silent(browser: Browser, page: Path, width: int, scheme: str) -> None:
    show(browser, page, width, scheme)
    assert browser.errors() == []


def test_the_console_would_tell_of_a_mistake(browser: Browser, page: Path, tmp_path: Path) -> None:
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
def test_every_picture_has_a_size(browser: Browser, page: Path, width: int) -> None:
    show(browser, page, width)
    assert browser.ask("[...document.images].every(i => i.complete && i.naturalWidth)")
    sizes = "[...document.querySelectorAll('figure > svg')].map(s => s.getBoundingClientRect())"
    drawn = browser.ask(f"{sizes}.map(b => [b.width, b.height])")
    assert len(drawn) == 3 + 4 + 3 + 4
    assert all(0 < w <= width and 150 < h < 400 for w, h in drawn)


def test_the_page_follows_the_scheme_of_the_reader(browser: Browser, page: Path) -> None:
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


def column(browser: Browser, number: int) -> list[str]:
    return browser.ask(f"{FIRST}.map(row => row.cells[{number}].textContent)")


def test_a_click_on_a_heading_sorts_up_then_down_then_as_given(
    browser: Browser, page: Path
) -> None:
    show(browser, page)
    heading = HEADING.format(1)
    given = column(browser, 1)
    assert sorted(given) != given
    up = ["†90k", "†110k", "120k", "120k", "120k", "120k"]
    for order, wanted in [("ascending", up), ("descending", up[::-1]), (None, given)]:
        browser.click(f"{heading}.firstChild")
        assert column(browser, 1) == wanted
        assert browser.ask(f"{heading}.getAttribute('aria-sort')") == order


def test_a_heading_is_reached_and_pressed_by_keys(browser: Browser, page: Path) -> None:
    show(browser, page)
    browser.ask(f"{HEADING.format(0)}.firstChild.focus()")
    browser.press("Tab")
    browser.press("Enter", "\r")
    assert browser.ask(f"{HEADING.format(1)}.getAttribute('aria-sort')") == "ascending"
    assert column(browser, 1)[0] == "†90k"


def test_only_one_column_is_said_to_sort(browser: Browser, page: Path) -> None:
    show(browser, page)
    for number in (1, 2):
        browser.click(f"{HEADING.format(number)}.firstChild")
    assert browser.ask("document.querySelectorAll('[aria-sort]').length") == 1
    assert browser.ask(f"{HEADING.format(2)}.getAttribute('aria-sort')") == "ascending"


@pytest.mark.parametrize("clicks", [1, 2])
def test_what_is_missing_comes_last_both_ways(
    browser: Browser, make: SimpleNamespace, tmp_path: Path, clicks: int
) -> None:
    results = make.results()
    del results["runs"][0]
    (tmp_path / "report.html").write_text(page_of(results))
    show(browser, tmp_path / "report.html")
    for _ in range(clicks):
        browser.click(f"{HEADING.format(2)}.firstChild")
    assert column(browser, 2)[-1] == "\N{EN DASH}"
    assert column(browser, 2)[0] != "\N{EN DASH}"


def test_models_sort_by_name(browser: Browser, page: Path) -> None:
    show(browser, page)
    browser.click(f"{HEADING.format(0)}.firstChild")
    names = column(browser, 0)
    assert names == sorted(names)


def test_without_scripts_the_page_is_complete(browser: Browser, page: Path) -> None:
    show(browser, page)
    text = "document.body.innerText.replace(/A click on a heading sorts./, '').replace(/\\s/g, '')"
    scripted = browser.ask(text)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show(browser, page)
        assert browser.ask("document.querySelector('thead button')") is None
        assert browser.ask(text) == scripted
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
