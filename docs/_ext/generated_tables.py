"""Directives that generate their content from the code when the pages are built.

``command-table``, ``command-options``, ``layer-table``, ``layer-cost``, ``task-table`` and
``script-output``.
"""

import subprocess
import sys
import tempfile
from argparse import SUPPRESS, Action
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from stateline.bench.peers import bare_layer
from stateline.bench.record import Figure
from stateline.bench.show import read_benchmark
from stateline.cli import COMMANDS, Parser
from stateline.cli.info import LENGTHS
from stateline.cli.parser import VALUES, add_import_option
from stateline.layers import ATTENTION_WRAPPERS, LAYERS, WRAPPERS, AnyLayer
from stateline.models.config import ModelConfig
from stateline.reports.format import short_bytes, short_number
from stateline.tasks import TASKS

WIDTH = ModelConfig("h3", vocab_size=1).d_model
CORES = {name: "attention" if name in ATTENTION_WRAPPERS else "h3" for name in WRAPPERS}
"""Core of each wrapper whose cost is shown."""

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "results"
"""One folder per machine and day, each with a JSON file per suite."""

BENCHMARK_HEAD = ("batch x length", "by", "median", "quartiles", "speed-up", "memory", "of peak")


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives."""
    app.add_directive("command-table", CommandTable)
    app.add_directive("command-options", CommandOptions)
    app.add_directive("layer-cost", LayerCost)
    app.add_directive("layer-table", LayerTable)
    app.add_directive("task-table", TaskTable)
    app.add_directive("script-output", ScriptOutput)
    app.add_directive("benchmark", BenchmarkTables)
    app.add_directive("mixer-benchmark", MixerTable)
    app.connect("env-get-outdated", _pages_that_show_code)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class CommandTable(SphinxDirective):
    """A table of all commands."""

    def run(self) -> list[nodes.Node]:
        """Return a row per command: a link to its page, and what it does."""
        rows = [(f"[`{name}`]({name}.md)", about) for name, about in COMMANDS.items()]
        return self.parse_text_to_nodes("\n".join(_table(("command", "description"), rows)))


class CommandOptions(SphinxDirective):
    """Tables of the arguments of a command, taken from its parser."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a table per group of arguments."""
        name = self.arguments[0]
        parser = Parser(prog=f"stateline {name}")
        add_import_option(parser)
        import_module(f"stateline.cli.{name}").add_arguments(parser)
        text = []
        for group in parser._action_groups:
            rows = [_option(action) for action in group._group_actions if _is_shown(action)]
            if rows:
                title = str(group.title)
                text += [f"**{title[0].upper()}{title[1:]}**", ""]
                text += [*_table(("name", "value", "default", "meaning"), rows), ""]
        return self.parse_text_to_nodes("\n".join(text))


class LayerCost(SphinxDirective):
    """The parameters, state size and operations of a layer, computed from the layer."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a sentence and a table by length."""
        name = self.arguments[0]
        layer = _layer(name)
        shown = f"`{name}({CORES[name]})`" if name in WRAPPERS else f"`{name}`"
        parameters = sum(p.numel() for p in layer.parameters())
        rows = [
            (f"{n:,}", short_bytes(layer.state_bytes(n)), short_number(layer.flops_per_token(n)))
            for n in (1, *LENGTHS)
        ]
        head = ("tokens", "state of one sequence", "FLOPs per token in `forward`")
        said = (
            f"{shown} with `d_model` {WIDTH}, other options by default: {parameters:,} parameters."
        )
        return self.parse_text_to_nodes("\n".join([said, "", *_table(head, rows)]))


class LayerTable(SphinxDirective):
    """A table of all layers and wrappers."""

    def run(self) -> list[nodes.Node]:
        """Return a row per layer: a link to its page, its first sentence, and its state size."""
        rows = []
        for name, kind in {**LAYERS, **WRAPPERS}.items():
            layer = _layer(name)
            size = layer.state_bytes(LENGTHS[-1])
            state = "grows" if layer.state_grows else short_bytes(size) if size else "none"
            if name == "ladder":
                state = "one state of the core per pass"
            about = (kind.__doc__ or "").split("\n\n")[0].split(" :math:")[0].strip().rstrip(".:")
            about += "" if layer.wants_feed_forward else "; no feed-forward follows"
            rows.append((f"[`{name}`]({name}.md)", " ".join(about.split()), state))
        head = ("name", "description", f"state at `d_model` {WIDTH}")
        return self.parse_text_to_nodes("\n".join(_table(head, rows)))


class TaskTable(SphinxDirective):
    """A table of all tasks."""

    def run(self) -> list[nodes.Node]:
        """Return a row per task: its name, its score, and what the score shows."""
        rows = [(f"`{name}`", f"`{kind.metric}`", kind.about) for name, kind in TASKS.items()]
        return self.parse_text_to_nodes("\n".join(_table(("task", "score", "about"), rows)))


class BenchmarkTables(SphinxDirective):
    """Recorded figures of one suite of ``stateline bench``, machine by machine."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A line on the machine, and its tables."""
        text = []
        for path in sorted(BENCHMARKS.glob(f"*/{self.arguments[0]}.json")):
            self.env.note_dependency(str(path))
            found = read_benchmark(path)
            text += [
                f"**{found.device}**, {found.created[:10]}, torch {found.environment['torch']}, "
                f"{found.threads} thread(s), {found.dtype}; copies "
                f"{found.bytes_per_second / 1e9:.0f} GB/s, products "
                f"{found.flops_per_second / 1e9:.0f} GFLOP/s; other programs used "
                f"{found.foreign_cores:.1f} cores. `{found.command}`",
                "",
                *self.tables(found.figures),
            ]
        return self.parse_text_to_nodes("\n".join(text or ["No results are recorded yet."]))

    def tables(self, figures: Sequence[Figure]) -> Iterable[str]:
        """A table per case and kind of work."""
        for case, work in dict.fromkeys((f.case, f.work) for f in figures):
            own = [f for f in figures if (f.case, f.work) == (case, work)]
            yield from [f"`{case}`, {work}", "", *_table(BENCHMARK_HEAD, _benchmark_rows(own)), ""]


class MixerTable(BenchmarkTables):
    """Recorded figures of layers that decode, beside layers of other projects, in one table."""

    def tables(self, figures: Sequence[Figure]) -> Iterable[str]:
        """A row per layer and project; times over ours in brackets."""
        places = list(dict.fromkeys((f.work, f.length) for f in figures))
        head = [f"{work} {'of' if work == 'prefill' else 'after'} {n:,}, ms" for work, n in places]
        rows = []
        for case, who in dict.fromkeys((f.case, f.candidate) for f in figures):
            own = [f for f in figures if f.case == case]
            times = {(f.work, f.length): f.seconds for f in own if f.candidate == who}
            ours = {(f.work, f.length): f.seconds for f in own if f.candidate == "auto"}
            states = [f.n_bytes for f in own if f.candidate == who and f.n_bytes is not None]
            if who == "auto":
                layer = bare_layer(case, 256)  # the width of the suite
                states = [layer.state_bytes(n) for work, n in places if work == "decode"]
            cells = [
                f"{1e3 * times[at]:.3g}"
                + ("" if who == "auto" else f" ({times[at] / ours[at]:.2f}x)")
                for at in places
            ]
            sizes = ", ".join(dict.fromkeys(map(short_bytes, states)))
            rows.append((f"`{case}`" if who == "auto" else "", who, sizes, *cells))
        return [*_table(("layer", "by", "state", *head), rows), ""]


def _benchmark_rows(figures: Sequence[Figure]) -> Iterable[Sequence[str]]:
    for figure in figures:
        first = next(f for f in figures if (f.batch, f.length) == (figure.batch, figure.length))
        memory = "" if figure.n_bytes is None else short_bytes(figure.n_bytes)
        share = "" if figure.floor_share is None else f"{figure.floor_share:.0%}"
        yield (
            f"{figure.batch} x {figure.length:,}",
            figure.candidate,
            f"{1e3 * figure.seconds:.3g} ms",
            f"{1e3 * figure.low:.3g} to {1e3 * figure.high:.3g}",
            f"{first.seconds / figure.seconds:.2f}",
            memory,
            share,
        )


class ScriptOutput(SphinxDirective):
    """The output of a script, which is run when the pages are built."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the output as a literal block."""
        relative, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(relative)
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, path], cwd=folder, capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise self.error(f"{relative} failed:\n{done.stderr}")
        return [nodes.literal_block(done.stdout, done.stdout, language="text")]


def _layer(name: str) -> AnyLayer:
    if name in LAYERS:
        return LAYERS[name](WIDTH)
    return WRAPPERS[name](LAYERS[CORES[name]](WIDTH))


def _is_shown(action: Action) -> bool:
    return action.help != SUPPRESS and action.default != SUPPRESS


def _option(action: Action) -> tuple[str, str, str, str]:
    """Name, type, default and help of one argument."""
    names = " ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"
    hint: Any = getattr(action, "_typehint", action.type)
    kind = "" if action.nargs == 0 or hint is None else _kind(hint)
    if action.nargs in ("+", "*"):
        kind += ", several"
    return names, kind, _default(action), " ".join((action.help or "").split())


def _kind(hint: Any) -> str:
    if get_origin(hint) is Mapping:
        return "mapping"
    return " or ".join(VALUES.get(choice, str(choice)) for choice in get_args(hint) or (hint,))


def _default(action: Action) -> str:
    value = action.default
    if not action.option_strings:
        return "" if action.nargs in ("?", "*") else "required"
    if value is None or action.nargs == 0:
        return ""
    if isinstance(value, bool):
        value = str(value).lower()
    values = [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return " ".join(f"`{v}`" if v.strip() else f"`{v!r}`" for v in values)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]


def _pages_that_show_code(app: Sphinx, *_: object) -> list[str]:
    """Pages with generated content, which an incremental build must read again."""
    directives = ("command-", "layer-", "task-table", "script-output")
    return [
        page
        for page in app.env.found_docs
        if any(f"{{{name}" in Path(app.env.doc2path(page)).read_text() for name in directives)
    ]
