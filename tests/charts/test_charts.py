"""Charts: outliers, fronts, looks, and the files that are made of them."""

import csv
import json
import math
import random
import re
import struct
from importlib.resources import files

import altair as alt
import pytest

from stateline.charts import draw
from stateline.charts.chart import PADDING, Axis
from stateline.charts.export import FORMATS, image, pictures, write_charts
from stateline.charts.labels import ABOVE, LONGEST, Box, mark_box, place_names, spread_out
from stateline.charts.lines import Level, Line, Point, limits, line_chart
from stateline.charts.scatter import Spot, front, trade_off_chart
from stateline.charts.style import COLOURS, DARK_COLOURS, HEIGHT, SHAPES, WIDTH, styled
from stateline.errors import InputError

MODELS = styled(["h3*2", 'evil"\\<script>', "attention*2"])
AXES = (Axis("length (tokens)", "log2"), Axis("bits per byte"))


def chart(outlier=2.0, levels=()):
    lines = [
        Line(
            model,
            [Point(4**n, [2 - n / 10 + k / 100 + m for m in (0, 0.01, 0.02)]) for n in range(2, 5)],
        )
        for k, model in enumerate(MODELS)
    ]
    lines[1].points[2].values[:] = [outlier] * 3
    return line_chart("bits", "Bits by length", ["Median."], lines, AXES, levels)


def test_an_outlier_is_drawn_at_the_edge_and_named():
    usual, squashed = chart(), chart(outlier=9.0)
    assert "Off the scale" not in usual.note
    assert squashed.note.endswith('Off the scale, drawn as triangles: evil"\\<script> 9 at 256.')
    drawn = json.dumps(squashed.spec())
    shapes = [layer["mark"].get("shape") for layer in squashed.spec()["layer"]]
    assert ("triangle-up" in shapes, "triangle-down" in shapes) == (True, False)
    assert [row["y"] for row in squashed.rows if not (row["inside"] or row["marked"])] == [9.0]
    (low, high) = squashed.spec()["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert 1.5 < low < high < 2.5
    assert "9" in drawn


def test_an_axis_ends_before_far_outliers_only():
    near = [2.0 + n / 10 for n in range(10)]
    assert limits(near) is None
    assert limits([*near, 3.3]) is None
    low, high = limits([*near, 100.0])
    assert low < 2.0 < 2.9 < high < 3.1


def test_an_axis_with_a_single_value_has_room_around_it():
    assert Axis("steps").over([2.0, 2.0]).domain == (1.5, 2.5)
    assert Axis("bytes", "log10").over([2.0, 2.0]).domain == (1.0, 4.0)


@pytest.mark.parametrize(
    ("scale", "own"),
    [
        ("linear", {"zero": False}),
        ("log2", {"type": "log", "base": 2}),
        ("log10", {"type": "log", "base": 10}),
    ],
)
def test_an_axis_begins_at_the_data_and_has_its_base(scale, own):
    encoded = Axis("bytes", scale).encode(alt.X, "x").to_dict()
    assert encoded["scale"] == {"nice": False, "padding": PADDING, **own}


def test_a_page_may_fade_models_and_has_its_own_title_and_background():
    spec = chart().spec(alone=False)
    assert spec.keys().isdisjoint(["title", "background"])
    assert json.dumps(spec["layer"]).count("indexof(shown, datum.model)") == 3


def test_a_seed_that_diverged_leaves_the_median_of_the_others():
    line = Line(MODELS[0], [Point(16, [2.0, math.nan, 4.0]), Point(64, [math.nan])])
    (row,) = line_chart("a", "a", [], [line], AXES).rows
    assert (row["y"], row["low"], row["high"], row["values"]) == (3.0, 2.0, 4.0, 2)


def test_a_line_that_others_cover_is_wider():
    points = [Point(16, [2.0]), Point(64, [1.0])]
    lines = [Line(MODELS[0], points), Line(MODELS[2], points)]
    widths = {row["model"]: row["width"] for row in line_chart("a", "a", [], lines, AXES).rows}
    assert widths["h3*2"] > widths["attention*2"] == 1.7


def test_a_line_without_points_is_not_in_the_legend():
    lines = [Line(MODELS[0], [Point(16, [2.0])]), Line(MODELS[1], [])]
    assert line_chart("a", "a", [], lines, AXES).models == MODELS[:1]


SPOTS = [
    Spot(model, (cost, cost, cost), score, score, score)
    for model, cost, score in zip(styled("abcde"), (1, 2, 3, 3, 4), (5, 7, 7, 9, 8), strict=True)
]


@pytest.mark.parametrize(
    ("less_cost", "more_score", "best"),
    [(True, True, "abd"), (True, False, "a"), (False, True, "de"), (False, False, "ace")],
)
def test_the_front_is_what_no_other_dominates(less_cost, more_score, best):
    found = front(SPOTS[::-1], less_cost=less_cost, more_score=more_score)
    assert sorted(spot.model.name for spot in found) == sorted(best)
    assert [spot.cost for spot in found] == sorted(spot.cost for spot in found)


def test_equal_models_are_both_on_the_front():
    pair = [SPOTS[0], SPOTS[0]._replace(model=MODELS[0])]
    assert len(front(pair, less_cost=True, more_score=True)) == 2


@pytest.mark.parametrize(
    ("less_cost", "changes", "step", "bars"),
    [
        (True, {}, "step-after", []),
        (False, {}, "step-before", []),
        (True, {"low": 0.0}, "step-after", ["low"]),
        (True, {"costs": (0.5, 1.0, 2.0)}, "step-after", ["y"]),
    ],
)
def test_the_front_steps_at_its_models_and_bars_show_spread(less_cost, changes, step, bars):
    spots = [SPOTS[0]._replace(**changes), *SPOTS[1:]]
    axes = (Axis("bytes", "log10"), Axis("score"))
    drawn = trade_off_chart("a", "a", [], spots, SPOTS[:2], axes, less_cost=less_cost).spec()
    line, *others = drawn["layer"]
    assert line["mark"]["interpolate"] == step
    rules = [layer["encoding"] for layer in others if layer["mark"]["type"] == "rule"]
    assert [rule["y"]["field"] for rule in rules] == bars


def test_models_on_the_front_are_named_in_the_chart():
    axes = (Axis("bytes", "log10"), Axis("score"))
    best = front(SPOTS, less_cost=True, more_score=True)
    drawn = trade_off_chart("a", "a", [], SPOTS, best, axes, less_cost=True)
    text = image(drawn, "svg").decode().partition("role-legend")[0]
    assert all(f">{name}</text>" in text for name in "abd")
    assert not any(f">{name}</text>" in text for name in "ce")


def test_no_name_covers_another_or_a_mark():
    draw_ = random.Random(0)
    left_out = 0
    for _ in range(300):
        places = [(draw_.uniform(0, WIDTH), draw_.uniform(0, HEIGHT)) for _ in range(8)]
        marks = [mark_box(*place) for place in places]
        lines = [Box(x - 1, y - 20, x + 1, y + 20) for x, y in places]
        names = [("m" * draw_.randint(1, 25), *place) for place in places[:5]]
        found = place_names(names, marks, lines, (WIDTH, HEIGHT))
        boxes = [place.box for place in found if place]
        left_out += len(names) - len(boxes)
        for rank, box in enumerate(boxes):
            assert not any(box.covers(other) for other in [*boxes[:rank], *boxes[rank + 1 :]])
            assert not any(box.covers(mark) for mark in marks)
            assert 0 <= box.left <= box.right <= WIDTH
            assert -ABOVE <= box.top <= box.bottom <= HEIGHT
    assert left_out < 0.02 * 300 * 5


def test_a_name_keeps_off_lines_and_is_cut_at_its_longest():
    for text in ("h3", "m" * 500):
        (usual,) = place_names([(text, 150.0, 100.0)], [], [], (WIDTH, HEIGHT))
        (moved,) = place_names([(text, 150.0, 100.0)], [], [usual.box], (WIDTH, HEIGHT))
        assert not moved.box.covers(usual.box)
    assert usual.box.right - usual.box.left == LONGEST


def test_a_name_without_room_is_left_out():
    crowd = [mark_box(x, y) for x in range(0, WIDTH, 8) for y in range(-12, HEIGHT, 8)]
    assert place_names([("h3", 150.0, 100.0)], crowd, [], (WIDTH, HEIGHT)) == [None]


def test_a_baseline_far_off_the_scale_is_named_in_the_note():
    drawn = chart(levels=[Level("gzip 90", y=90.0)])
    assert drawn.note.endswith("Off the scale: gzip 90.")
    assert "gzip" not in json.dumps(drawn.spec())


def test_baselines_of_one_height_are_written_below_one_another():
    assert spread_out([50.0, 50.0, 10.0, 55.0]) == [50.0, 64.0, 10.0, 78.0]


@pytest.mark.parametrize("scale", ["linear", "log2", "log10"])
def test_the_place_of_a_value_on_an_axis_is_that_of_the_drawing(scale):
    axis = Axis("x", scale).over([2.0, 5.0, 40.0])
    spots = [Spot(m, (x, x, x), x, x, x) for m, x in zip(MODELS, (2.0, 5.0, 40.0), strict=True)]
    chart = trade_off_chart("a", "a", [], spots, [], (axis, axis), less_cost=True)
    drawn = image(chart, "svg").decode()
    marks = re.findall(r'translate\(([\d.]+),([\d.]+)\)" d="[^"]*" fill="#', drawn)
    places = [(WIDTH * axis.share(x, WIDTH), HEIGHT * (1 - axis.share(x, HEIGHT))) for x in (2, 5)]
    for place, mark in zip(places, marks, strict=False):
        assert [float(end) for end in mark] == pytest.approx(place, abs=0.01)
    assert len(marks) >= 3


def test_charts_are_valid_vega_lite():
    axes = (Axis("bytes", "log10"), Axis("score"))
    drawn = trade_off_chart("a", "a", [], SPOTS, [], axes, less_cost=True)
    for one in (chart(outlier=9.0, levels=[Level("gzip", y=2.0)]), drawn):
        assert one.altair().to_dict(validate=True) == one.spec()


def test_sixty_four_models_look_different():
    looks = {(model.colour, model.shape) for model in styled([str(n) for n in range(64)])}
    assert len(looks) == len(COLOURS) * len(SHAPES) == 64


def _luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(("colours", "page"), [(COLOURS, "#ffffff"), (DARK_COLOURS, "#14171b")])
def test_every_colour_contrasts_with_its_page(colours, page):
    for colour in colours:
        dark, light = sorted([_luminance(colour), _luminance(page)])
        assert (light + 0.05) / (dark + 0.05) >= 3.0  # WCAG 2.1 for graphics


def test_the_text_of_a_page_contrasts_with_what_is_behind_it():
    style = (files("stateline.reports") / "templates" / "style.css").read_text()
    light, dark = re.findall(r":root \{([^}]*)\}", style)
    for scheme in (light, dark):
        colour = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6});", scheme))
        behind = {"text": ("page", "tint", "best", "warn"), "quiet": ("page", "best")}
        for text, backs in (behind | {"link": ("page",)}).items():
            for back in backs:
                low, high = sorted([_luminance(colour[text]), _luminance(colour[back])])
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, back)  # WCAG 2.1 for text


def test_a_chart_is_written_in_every_format(tmp_path):
    files = write_charts([chart(levels=[Level("gzip", y=2.0)])], tmp_path, list(FORMATS))
    assert [path.name for path in files] == ["bits.png", "bits.svg", "bits.csv", "bits.json"]
    header = files[0].read_bytes()
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    assert min(width, height) > 600
    picture = files[1].read_text()
    assert "Bits by length" in picture
    assert "gzip" in picture
    rows = list(csv.DictReader(files[2].read_text().splitlines()))
    assert list(rows[0]) == ["model", "x", "y", "low", "high", "values"]
    assert len(rows) == 9
    assert {row["model"] for row in rows} == {model.name for model in MODELS}
    assert isinstance(alt.Chart.from_json(files[3].read_text()), alt.LayerChart)


@pytest.mark.slow
def test_the_same_chart_gives_the_same_bytes(tmp_path):
    for folder in "ab":
        draw._drawn.clear()
        write_charts([chart()], tmp_path / folder, list(FORMATS))
    for form in FORMATS:
        assert (tmp_path / f"a/bits.{form}").read_bytes() == (
            tmp_path / f"b/bits.{form}"
        ).read_bytes()


def test_ids_in_a_picture_do_not_depend_on_other_pictures(monkeypatch):
    drawn = '<clipPath id="clip{}"/><g clip-path="url(#clip{})"/><clipPath id="clip{}"/>'
    monkeypatch.setattr("stateline.charts.export.draw", lambda _: [drawn.format(7, 7, 12)])
    assert pictures([{}]) == [drawn.format("-0", "-0", "-1")]


def test_charts_are_drawn_in_one_process(tmp_path, monkeypatch):
    draw._drawn.clear()
    calls = []
    run = draw.subprocess.run
    monkeypatch.setattr(draw.subprocess, "run", lambda *a, **k: calls.append(a) or run(*a, **k))
    charts = [chart()._replace(name="a", title="a"), chart()._replace(name="b", title="b")]
    assert len(write_charts(charts, tmp_path, ["png", "svg"])) == 4
    assert len(calls) == 1


def test_without_vl_convert_images_are_refused_in_one_line(tmp_path, monkeypatch):
    draw._drawn.clear()
    monkeypatch.setattr(draw.importlib.util, "find_spec", lambda _: None)
    for form in ("png", "svg"):
        with pytest.raises(InputError, match=r"pip install 'stateline\[images\]'; the formats csv"):
            write_charts([chart()], tmp_path, [form])
    assert len(write_charts([chart()], tmp_path, ["csv", "json"])) == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*file/bits.csv"):
        write_charts([chart()], tmp_path / "file", ["csv"])
