import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.models.pattern import Item, format_pattern, parse_pattern

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
texts = st.text(st.characters(exclude_characters='"')) | st.sampled_from(
    ["", "none", "True", "-1", "1e5", "1_0", "inf", "hard_alibi", "a b", "x=1", "../books/*.txt"]
)
values = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none() | texts


def items_around(core: st.SearchStrategy[tuple[Item, ...]]) -> st.SearchStrategy[tuple[Item, ...]]:
    item = st.builds(
        Item, names, st.dictionaries(names, values, max_size=3), core, st.integers(1, 99)
    )
    return st.lists(item, min_size=1, max_size=3).map(tuple)


patterns = st.recursive(items_around(st.just(())), items_around, max_leaves=6)


@given(patterns)
def test_a_formatted_pattern_reads_back_as_it_was(items: tuple[Item, ...]) -> None:
    assert repr(parse_pattern(format_pattern(items))) == repr(items)  # repr tells 1 from 1.0


def test_the_parts_of_a_pattern_are_told_apart() -> None:
    text = 'ladder(h3 * 2 lstm, passes=4)*3  text(path="my books", length=-1, rate=2e-3, on=True)'
    core = (Item("h3", {}, (), 2), Item("lstm", {}))
    keywords = {"path": "my books", "length": -1, "rate": 0.002, "on": True}
    wanted = (Item("ladder", {"passes": 4}, core, 3), Item("text", keywords))
    assert parse_pattern(text) == wanted


def test_spaces_do_not_matter() -> None:
    assert parse_pattern(" ladder ( h3 * 2 , passes = 4 ) ") == parse_pattern(
        "ladder(h3*2,passes=4)"
    )


@pytest.mark.parametrize(
    ("marked", "wanted"),
    [
        ("<here>", "a layer name"),
        ("<here>*2", "a layer name"),
        ("h3 <here>4", "a layer name"),
        ("h3<here>)", "a layer name"),
        ("h3*<here>", "a repeat count of at least 1"),
        ("h3*<here>0", "a repeat count of at least 1"),
        ("h3*<here>-1", "a repeat count of at least 1"),
        ("h3*<here>2.5", "a repeat count of at least 1"),
        ("h3(<here>", "keyword=value or a pattern"),
        ("h3(<here>4)", "keyword=value or a pattern"),
        ("h3(<here>,)", "keyword=value or a pattern"),
        ("h3(d_state=<here>)", "a value"),
        ('h3(path=<here>"my books)', "a value"),
        ("h3(d_state=4 <here>d_head=2)", "',' or ')'"),
        ("ladder(h3 s4d, passes=4<here>", "',' or ')'"),
        ("h3(n=4, <here>n=4)", "each keyword once, not 'n' again,"),
        ("ladder(h3, <here>s4d)", "keyword=value, since the core is already given,"),
        ("h3 s4d(n=1)*2 lstm<here>=3", "a layer name"),
    ],
)
def test_the_place_of_a_mistake_is_marked(marked: str, wanted: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_pattern(marked.replace("<here>", ""))
    assert str(caught.value) == f"malformed pattern: expected {wanted} at <here>: {marked}"


@given(st.text("a1 -_.()*=,\"'\n\té", max_size=12))
def test_any_text_is_a_pattern_or_a_mistake_of_one_line(text: str) -> None:
    try:
        parse_pattern(text)
        return
    except InputError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    shown = message.split(" at <here>: ")[1].replace("<here>", "", 1)
    assert "".join(shown.split()) == "".join(text.split())
