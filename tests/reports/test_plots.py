import math

from matplotlib.figure import Figure

from stateline.reports import plots
from stateline.reports.figures import keyword_figures
from tests.reports.typed import typed, with_task


def test_a_position_counts_where_every_seed_has_it(make):
    task = make.text_task()
    runs = [make.run("h3", task, make.scores["bits_per_byte"], seed=seed) for seed in range(3)]
    runs[0]["by_position"] = {"1024": 2.0, "64": 3.0, "128": 2.5}
    runs[1]["by_position"] = {"64": None, "1024": 2.2}
    results, record = with_task(make.results(models=["h3"], runs=runs), task)
    losses = plots.positions(results, "h3", record)
    assert list(losses) == [64, 1024]
    assert losses[1024] == [2.0, 2.2]
    assert losses[64][0] == 3.0
    assert math.isnan(losses[64][1])


def test_a_step_stands_once_on_its_axis(make):
    results = make.results()
    for run in results["runs"]:
        run["curve"] = [{"step": step, "loss": 1.0, "metric": 0.5} for step in (30, 31)]
    figure = Figure()
    axes = figure.subplots()
    plots.learning_curve(axes, *with_task(results, results["tasks"][0]), "loss")
    figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert len(set(labels)) == len(labels)
    assert "30" in labels


def test_a_single_point_is_no_curve(make):
    results = make.results()
    for run in results["runs"]:
        run["curve"] = [{"step": 30, "loss": 1.0, "metric": 0.5}]
    typed_results, task = with_task(results, results["tasks"][0])
    assert plots.curves(typed_results, results["models"][0], task, "loss") == []


def duplicates(make, *numbers):
    """Tasks that differ in n, and in what one model reached on each."""
    tasks = [make.task(name="duplicate_ngram", spec=f"duplicate_ngram(n={n})") for n in numbers]
    runs = [
        make.run("h3", task, {"10": 1 - n / 10, "20": 0.0, "40": 0.0})
        for n, task in zip(numbers, tasks, strict=True)
    ]
    return typed(make.results(models=["h3"], tasks=tasks, runs=runs, speed=[]))


def test_tasks_that_differ_in_one_number_are_drawn_against_it(make):
    (figure,) = keyword_figures(duplicates(make, 4, 2, 3))
    axes = Figure().subplots()
    figure.draw(axes)
    line = max(axes.lines, key=lambda line: len(line.get_xdata()))
    assert figure.name == "duplicate-ngram-by-n"
    assert list(line.get_xdata()) == [2, 3, 4]
    assert list(line.get_ydata()) == [0.8, 0.7, 0.6]


def test_two_tasks_are_no_line(make):
    assert keyword_figures(duplicates(make, 2, 3)) == []


def test_the_score_by_bits_is_the_median_over_the_seeds(make):
    task = make.task()
    runs = [make.run("h3", task, make.scores["string_accuracy"], seed=seed) for seed in range(3)]
    for run, low in zip(runs, [0.1, 0.3, 0.2], strict=True):
        by_bits = {"0": 0.0, "2": low, "16": 1.0}
        run["capacity"] = {"numbers": 8, "needed": 16, "by_bits": by_bits}
    axes = Figure().subplots()
    results = make.results(models=["h3"], tasks=[task], runs=runs, speed=[])
    plots.by_bits(axes, *with_task(results, task))
    line = axes.lines[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 2, 16], [0.0, 0.2, 1.0])
