"""The charts of a report: what they show of the results."""

import math
from pathlib import Path

import numpy as np
import pytest

from stateline.reports import series
from stateline.reports.figures import keyword_charts, sections, task_charts
from stateline.reports.scaling import power_law
from stateline.runs.folder import read_results
from tests.reports.typed import typed, with_task


def rows(chart, model):
    return [(row["x"], row["y"]) for row in chart.rows if row["model"] == model]


def test_a_position_counts_where_every_seed_has_it(make):
    task = make.text_task()
    runs = [make.run("h3", task, make.scores["bits_per_byte"], seed=seed) for seed in range(3)]
    runs[0]["by_position"] = {"1024": 2.0, "64": 3.0, "128": 2.5}
    runs[1]["by_position"] = {"64": None, "1024": 2.2}
    results, record = with_task(make.results(models=["h3"], runs=runs), task)
    points = series.by_position(results, "h3", record)
    assert [point.x for point in points] == [64, 1024]
    assert points[1].values == [2.0, 2.2]
    assert points[0].values[0] == 3.0
    assert math.isnan(points[0].values[1])


def test_a_single_point_is_no_curve(make):
    results = make.results()
    for run in results["runs"]:
        run["curve"] = [{"step": 30, "loss": 1.0, "metric": 0.5}]
    found, task = with_task(results, results["tasks"][0])
    assert series.by_step(found, results["models"][0], task, "loss") == []


def test_a_seed_that_has_stopped_keeps_its_last_value(make):
    task = make.text_task()
    runs = [make.run("h3", task, make.scores["bits_per_byte"], seed=seed) for seed in range(2)]
    for run, steps in zip(runs, [(10, 20), (10, 20, 30)], strict=True):
        run["curve"] = [{"step": s, "loss": 100.0 - s, "metric": None} for s in steps]
    results, record = with_task(make.results(models=["h3"], runs=runs), task)
    points = series.by_step(results, "h3", record, "loss")
    assert [(point.x, point.values) for point in points] == [
        (10, [90.0, 90.0]),
        (20, [80.0, 80.0]),
        (30, [80.0, 70.0]),
    ]
    assert [point.marked for point in points] == [False, True, True]


def test_a_long_curve_keeps_its_ends(make):
    task = make.text_task()
    run = make.run("h3", task, make.scores["bits_per_byte"])
    run["curve"] = [{"step": s, "loss": 1.0, "metric": None} for s in range(1, 1000)]
    results, record = with_task(make.results(models=["h3"], runs=[run]), task)
    steps = [point.x for point in series.by_step(results, "h3", record, "loss")]
    assert len(steps) <= series.STEPS + 1
    assert (steps[0], steps[-1]) == (1, 999)


def duplicates(make, *numbers):
    """Tasks that differ in n, and in what one model reached on each."""
    tasks = [make.task(name="duplicate_ngram", spec=f"duplicate_ngram(n={n})") for n in numbers]
    runs = [
        make.run("h3", task, {"10": 1 - n / 10, "20": 0.0, "40": 0.0})
        for n, task in zip(numbers, tasks, strict=True)
    ]
    return typed(make.results(models=["h3"], tasks=tasks, runs=runs, speed=[]))


def test_tasks_that_differ_in_one_number_are_drawn_against_it(make):
    (chart,) = keyword_charts(duplicates(make, 4, 2, 3))
    assert chart.name == "duplicate-ngram-by-n"
    assert rows(chart, "h3") == [(2, 0.8), (3, 0.7), (4, 0.6)]


def test_two_tasks_are_no_line(make):
    assert keyword_charts(duplicates(make, 2, 3)) == []


def test_the_score_by_bits_is_the_median_over_the_seeds(make):
    task = make.task()
    runs = [make.run("h3", task, make.scores["string_accuracy"], seed=seed) for seed in range(3)]
    for run, low in zip(runs, [0.1, 0.3, 0.2], strict=True):
        by_bits = {"0": 0.0, "2": low, "16": 1.0}
        run["capacity"] = {"numbers": 8, "needed": 16, "by_bits": by_bits}
    results = make.results(models=["h3"], tasks=[task], runs=runs, speed=[])
    charts = {chart.name: chart for chart in task_charts(*with_task(results, task))}
    assert rows(charts["copying-by-bits"], "h3") == [(0, 0.0), (2, 0.2), (16, 1.0)]


def test_a_model_that_did_not_solve_its_task_ends_at_the_training_length(make):
    task = make.task()
    runs = [make.run("h3*2", task, {"10": 0.5, "20": 0.4, "40": 0.3})]
    runs += [make.run("lstm*2", task, {"10": 1.0, "20": 0.4, "40": 0.3})]
    (chart, *_) = task_charts(*with_task(make.results(tasks=[task], runs=runs), task))
    assert rows(chart, "h3*2") == [(10, 0.5)]
    assert rows(chart, "lstm*2") == [(10, 1.0), (20, 0.4), (40, 0.3)]


def test_scores_are_drawn_against_costs_with_the_front_named(make):
    task = make.text_task()
    scores = dict(zip(make.models, (2.0, 2.5, 2.4), strict=True))
    runs = [make.run(m, task, {"256": s, "1024": s}) for m, s in scores.items()]
    sizes = dict(zip(make.models, (4000, 1000, 9000), strict=True))
    speed = [make.speed(m, state_bytes={"256": size}) for m, size in sizes.items()]
    results = make.results(tasks=[task], runs=runs, speed=speed)
    (chart, *_) = sections(typed(results)).trade_offs
    assert chart.name == "text-against-state-size"
    assert {row["model"]: row["front"] for row in chart.rows} == dict(
        zip(make.models, (1, 1, 0), strict=True)
    )
    assert "On the front: “h3*2” and “attention(position=rope)*2”." in chart.notes


def test_the_spread_of_a_speed_lies_within_its_chart(make):
    results = make.results(tasks=[make.text_task()])
    for timing in results["speed"][1]["timings"]:
        timing |= {"low": 2.0, "high": 90_000.0}
    (chart,) = [c for c in sections(typed(results)).trade_offs if c.name.endswith("decoding-speed")]
    low, high = chart.spec()["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert low <= 2.0
    assert high >= 90_000.0


def test_a_model_without_a_score_is_named_beside_the_front(make):
    task = make.text_task()
    runs = [make.run(m, task, {"256": 2.0, "1024": 2.0}) for m in make.models]
    runs[0]["by_length"] = {"256": {"bits_per_byte": None}, "1024": {"bits_per_byte": None}}
    (chart, *_) = sections(typed(make.results(tasks=[task], runs=runs))).trade_offs
    assert f"Without a score or a cost: “{make.models[0]}”." in chart.note


def test_speeds_of_a_busy_machine_are_not_drawn(make):
    busy = sections(typed(make.results(speed=[make.speed(m, busy=0.3) for m in make.models])))
    assert not [chart.name for chart in busy.charts() if "speed" in chart.name]


def test_a_cost_at_one_length_stands_in_the_table_alone(make):
    results = make.results(speed=[make.speed(m, state_bytes={"256": 9}) for m in make.models])
    names = [chart.name for chart in sections(typed(results)).costs]
    assert names == ["cost-flops-per-token", "cost-decoding-speed", "cost-training-speed"]


def test_sizes_of_an_architecture_are_one_line():
    results = read_results(Path("tests/runs/sweep"))
    charts = {chart.name: chart for chart in sections(results).charts()}
    chart = charts["copying-by-size"]
    assert [model.name for model in chart.models] == ["attention", "h3"]
    assert [x for x, _ in rows(chart, "h3")] == [10_100, 30_300, 101_000]


def test_a_loss_that_falls_with_size_is_fitted_by_a_power_law(make):
    task = make.text_task(eval_lengths=[256])
    runs = [
        make.run(f"h3 · {n}", task, {"256": 8 * n**-0.25}, parameters=n, family="h3", size=n)
        for n in (10_000, 30_000, 100_000, 1_000_000)
    ]
    models = [run["model"] for run in runs]
    found, record = with_task(make.results(tasks=[task], models=models, runs=runs, speed=[]), task)
    (chart,) = [c for c in task_charts(found, record) if c.name == "text-by-size"]
    assert "“h3”: proportional to parameters to the power -0.250 ± 0.000" in chart.note
    curve = chart.layers[-1].data.values
    assert (curve[0]["x"], curve[-1]["x"]) == pytest.approx((10_000, 1_000_000))
    assert [row["y"] for row in curve] == pytest.approx([8 * row["x"] ** -0.25 for row in curve])


def test_a_fit_and_its_error_are_those_of_least_squares():
    sizes, scores = [1, 10, 100, 1000], [1, 0.5, 0.25, 0.25]
    (slope, _), covariance = np.polyfit(np.log10(sizes), np.log10(scores), 1, cov=True)
    law = power_law(sizes, scores)
    assert law.exponent == pytest.approx(-slope)
    assert law.error == pytest.approx(np.sqrt(covariance[0, 0]))
