"""What tests of reports share: results to report, and a browser to see the report in."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MODELS = ["attention(position=rope)*2", "h3*2", "lstm*2"]

SCORES = {
    "string_accuracy": {"10": 1.0, "20": 0.9, "40": 0.5},
    "bits_per_byte": {"256": 2.5, "1024": 2.25},
}

Results = dict[str, Any]


def task(**changes: Any) -> Results:
    return {
        "spec": "copying(max_len=10)",
        "name": "copying",
        "title": "Copying",
        "about": "Tells whether the model looks back; not whether it could learn to.",
        "metric": "string_accuracy",
        "higher_is_better": True,
        "solved_at": 0.95,
        "train_length": 10,
        "eval_lengths": [10, 20, 40],
        "data": {},
        "baselines": {},
    } | changes


def text_task(**changes: Any) -> Results:
    own = {
        "spec": "text(path=books)",
        "name": "text",
        "title": "Text",
        "metric": "bits_per_byte",
        "higher_is_better": False,
        "solved_at": None,
        "train_length": 256,
        "eval_lengths": [256, 1024],
        "data": {"sha256": "9f2c", "files": 12345, "held_out_files": ["a.txt", "b.txt"]},
        "baselines": {"gzip": 2.9, "xz": 2.7},
    }
    return task(**own | changes)


def run(model: str, of: Results, scores: dict[str, float], **changes: Any) -> Results:
    """A run whose metric at each length is given; it solves its task after 700 steps, if at all."""
    end = scores[str(of["train_length"])]
    solved = of["solved_at"] is not None and end >= of["solved_at"]
    return {
        "model": model,
        "task": of["spec"],
        "seed": 0,
        "d_model": 64,
        "parameters": 120_000,
        "parameters_wanted": 120_000,
        "steps": 700 if solved else 1600,
        "stopped": "solved" if solved else "finished",
        "seconds": 31.2,
        "tokens_per_second": 21_000.0,
        "steps_to_solve": 700 if solved else None,
        "curve": [
            {"step": 50, "loss": 2.1, "metric": None},
            {"step": 100, "loss": 1.1, "metric": end / 2},
            {"step": 700, "loss": 0.1, "metric": end},
        ],
        "by_length": {length: {of["metric"]: score} for length, score in scores.items()},
    } | changes


SPREAD = ("tokens_per_second", "low", "high")


def speed(model: str, **changes: Any) -> Results:
    """A record of speeds; the timings follow from the speeds of training and decoding."""
    made = {
        "model": model,
        "task": "text(path=books)",
        "d_model": 64,
        "parameters": 120_000,
        "train_tokens_per_second": {"256": 51_000.0, "1024": 40_000.0},
        "decode_tokens_per_second": {"256": 310.0, "1024": 290.0},
        "state_bytes": {"256": 131_072, "1024": 524_288},
        "flops_per_token": {"256": 300_000, "1024": 420_000},
    } | changes
    timings = [
        {"phase": phase, "length": int(n), "batch": 1} | dict.fromkeys(SPREAD, value)
        for phase in ("train", "decode")
        for n, value in made[f"{phase}_tokens_per_second"].items()
    ]
    return {"timings": timings} | made


def results(**changes: Any) -> Results:
    """Three models on copying and text, one seed each, all solved.

    Only records of the models and tasks that are listed are kept.
    """
    tasks = [task(), text_task()]
    made = {
        "format": "stateline-results-1",
        "command": "stateline compare 'h3*2' --tasks 'copying(max_len=10)'",
        "created": "2026-11-21T08:00:00+00:00",
        "finished": True,
        "environment": {"stateline": "0.1.0", "torch": "2.13.0+cpu", "threads": 2},
        "models": MODELS,
        "tasks": tasks,
        "runs": [run(model, of, SCORES[of["metric"]]) for model in MODELS for of in tasks],
        "speed": [speed(model) for model in MODELS],
    } | changes
    specs = [task["spec"] for task in made["tasks"]]
    made["speed"] = [entry for entry in made["speed"] if entry["model"] in made["models"]]
    made["runs"] = [
        run for run in made["runs"] if run["model"] in made["models"] and run["task"] in specs
    ]
    return made


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """Builders of results, tasks, runs and speed entries; keywords replace fields."""
    return SimpleNamespace(
        results=results,
        task=task,
        text_task=text_task,
        run=run,
        speed=speed,
        models=MODELS,
        scores=SCORES,
    )


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
    """One page of a browser without a window.

    Chromium is told what to do over a pipe, in the DevTools protocol: that needs nothing but it.
    """

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
        for domain in ("Page", "Runtime", "Log", "Network"):
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

    def wait(self, script: str) -> None:
        """Wait until an expression in the page is true."""
        for _ in range(100 * SECONDS):
            if self.ask(f"!!({script})"):
                return
            time.sleep(0.01)
        raise AssertionError(f"never true: {script}")

    def requests(self) -> list[str]:
        """The addresses that the page has asked for."""
        self.ask("0")
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def errors(self) -> list[dict[str, Any]]:
        """What the console of the page says: exceptions, refused scripts, missing files."""
        self.ask("0")  # what was said before has arrived when this is answered
        kinds = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
        return [event for event in self.events if event.get("method") in kinds]

    def point(self, element: str) -> tuple[float, float]:
        """Move the mouse to the middle of an element, given as an expression."""
        self.ask(f"{element}.scrollIntoView({{block: 'center', inline: 'center'}})")
        box = self.ask(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])({element}.getBoundingClientRect())"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        return box[0], box[1]

    def click(self, element: str) -> None:
        """Click with a mouse in the middle of an element, given as an expression."""
        x, y = self.point(element)
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": x, "y": y, "button": "left", "clickCount": 1}
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


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("there is no chromium: install it to see whether reports work in a browser")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
