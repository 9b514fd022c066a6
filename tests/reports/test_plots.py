import math

from matplotlib.figure import Figure

from stateline.reports import plots


def test_a_position_counts_where_every_seed_has_it(make):
    task = make.text_task()
    runs = [make.run("h3", task, make.scores["bits_per_byte"], seed=seed) for seed in range(3)]
    runs[0]["by_position"] = {"1024": 2.0, "64": 3.0, "128": 2.5}
    runs[1]["by_position"] = {"64": None, "1024": 2.2}
    losses = plots.positions(make.results(runs=runs), "h3", task)
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
    plots.learning_curve(axes, results, results["tasks"][0], "loss")
    figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert len(set(labels)) == len(labels)
    assert "30" in labels


def test_a_single_point_is_no_curve(make):
    results = make.results()
    for run in results["runs"]:
        run["curve"] = [{"step": 30, "loss": 1.0, "metric": 0.5}]
    task = results["tasks"][0]
    assert plots.curves(results, results["models"][0], task, "loss") == []
