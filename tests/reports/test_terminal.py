import pytest

from stateline.reports import read_results
from stateline.reports.format import DASH
from tests.reports.typed import page_of, printed


@pytest.fixture
def large(make):
    """Six models on three tasks, each with three seeds that differ."""
    models = ["attention(position=hard_alibi)*2", "attention(position=rope)*2"]
    models += ["s4d*2", "lstm*2", "h3*2", "attention h3"]
    tasks = [make.task(), make.task(spec="recall", title="Associative recall"), make.text_task()]
    runs = [
        make.run(
            model,
            task,
            {str(length): 0.96 + 0.01 * seed for length in task["eval_lengths"]},
            seed=seed,
            parameters=118_000 + 4_000 * (task["name"] == "text"),
        )
        for model in models
        for task in tasks
        for seed in range(3)
    ]
    speed = [make.speed(model) for model in models]
    return make.results(models=models, tasks=tasks, runs=runs, speed=speed)


def test_six_models_on_three_tasks_fit_100_columns_unbroken(large):
    text = printed(large, width=100)
    assert max(map(len, text.splitlines())) <= 100
    table = text.partition("\nCopying: ")[0]
    (spread, *_) = [line for line in table.splitlines() if f"0.960{DASH}0.980" in line]
    assert spread.count(f"0.960{DASH}0.980") == 6


def test_speeds_of_a_busy_machine_are_left_out_and_the_reason_is_told(make):
    results = make.results(speed=[make.speed(m, busy=0.3) for m in make.models])
    for text in (printed(results), page_of(results)):
        assert "tok/s" not in text
        assert "Other programs used up to 30% of the machine" in text


def test_why_a_model_with_a_lower_score_is_chosen_is_said(make):
    results = make.results()
    for text in (printed(results, width=200), page_of(results)):
        assert "at most 0.01 (losses: 1%) behind the best one, and not clearly worse, the" in text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_console_loses_no_digit(large, width):
    text = printed(large, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    table = text.partition("\nparameters")[2].partition("\nCopying: ")[0]
    assert table.count("0.970") == 6 * 6
    assert table.count("128 KiB") == 6


@pytest.mark.parametrize(("width", "lines"), [(80, 57), (120, 39)])
def test_the_decisions_are_the_first_screen(width, lines):
    first = "\n".join(printed(read_results("docs/gallery/hybrids"), width).splitlines()[:lines])
    assert "at 64                lstm: 1.000 accuracy, " in first
    assert "at 2,048             lstm+attention: 2.203 bits per byte" in first
    assert "Solved by “lstm” and “lstm+attention” with every seed." in " ".join(first.split())


def test_the_best_is_marked_without_colour(make):
    task = make.task()
    runs = [
        make.run(model, task, {"10": 1.0, "20": 1.0, "40": end + seed / 1000}, seed=seed)
        for model, end in (("h3*2", 0.8), ("lstm*2", 0.3))
        for seed in range(3)
    ]
    text = printed(make.results(tasks=[task], runs=runs))
    assert "*0.801" in text
    assert "*0.301" not in text
    assert "* best of its row or not told apart from the best, if others are clearly worse." in text


def test_one_seed_is_said_to_decide_nothing(make):
    text = printed(make.results())
    assert "One seed decides nothing." in text
    quick = make.results(protocol={"name": "quick"})
    assert "One seed and one learning rate decide nothing." in printed(quick)


def test_what_a_comparison_shows_is_printed_below_its_table(make):
    text = printed(make.results())
    order = ["at 40", "- Solved by", "\nCost\n- State"]
    assert sorted(order, key=text.replace("\N{NO-BREAK SPACE}", " ").index) == order


def test_each_task_says_what_it_tells_and_its_baselines(make):
    text = " ".join(printed(make.results()).split())
    assert "Copying: string accuracy. Tells whether the model looks back" in text
    assert "gzip reaches 2.900 and xz reaches 2.700" in text


def test_the_legend_explains_only_what_stands_in_the_table(make):
    assert "not solved: missed" not in printed(make.results())
    assert "lowest and highest seed" not in printed(make.results())


def test_an_unfinished_comparison_is_printed_and_says_so(make):
    text = printed(make.results(finished=False, runs=[], speed=[]))
    assert "has not finished" in text
    assert DASH in text


def test_square_brackets_are_text_not_markup(make):
    results = make.results(models=["[red]h3[/red]"], runs=[], speed=[])
    results["tasks"][0]["about"] = "About [bold]brackets[/bold]."
    text = printed(results)
    assert "[red]h3[/red]" in text
    assert "[bold]brackets[/bold]" in text
