import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.pattern import Item, canonical_pattern, format_pattern, parse_pattern

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
texts = st.text(st.characters(exclude_characters='"')) | st.sampled_from(
    ["", "none", "True", "-1", "1e5", "1_0", "inf", "hard_alibi", "a b", "x=1", "../books/*.txt"]
)
values = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none() | texts


def items_around(core: st.SearchStrategy[tuple[Item, ...]]) -> st.SearchStrategy[tuple[Item, ...]]:
    keywords, more = st.dictionaries(names, values, max_size=3), core.filter(bool)

    def item_with(own: tuple[Item, ...]) -> st.SearchStrategy[Item]:
        others = st.lists(more, max_size=2).map(tuple) if own else st.just(())
        return st.builds(Item, names, keywords, st.just(own), st.integers(1, 99), others)

    item = core.flatmap(item_with)
    return st.lists(item, min_size=1, max_size=3).map(tuple) | core.filter(
        lambda items: len(items) > 1
    ).map(lambda items: (Item("", {}, items, 3), Item("h3", {})))


patterns = st.recursive(items_around(st.just(())), items_around, max_leaves=6)


@settings(max_examples=30)
@given(patterns)
def test_a_formatted_pattern_reads_back_as_it_was(items: tuple[Item, ...]) -> None:
    assert repr(parse_pattern(format_pattern(items))) == repr(items)  # repr tells 1 from 1.0


def test_the_parts_of_a_pattern_are_told_apart() -> None:
    text = 'ladder(h3 * 2 lstm, passes=4)*3  text(path="my books", length=-1, rate=2e-3, on=True)'
    core = (Item("h3", {}, (), 2), Item("lstm", {}))
    keywords = {"path": "my books", "length": -1, "rate": 0.002, "on": True}
    wanted = (Item("ladder", {"passes": 4}, core, 3), Item("text", keywords))
    assert parse_pattern(text) == wanted


def test_spaces_do_not_matter_but_before_a_parenthesis() -> None:
    assert parse_pattern(" ladder( h3 * 2 , passes = 4 ) ") == parse_pattern(
        "ladder(h3*2,passes=4)"
    )


def flat(items: tuple[Item, ...]) -> list[str]:
    return [
        n for i in items for _ in range(i.repeat) for n in (flat(i.core) if i.core else [i.name])
    ]


@pytest.mark.parametrize(
    ("text", "canonical", "names"),
    [
        ("(a*3 b)*2", "(a*3 b)*2", "aaabaaab"),
        ("( a b ) * 2 c", "(a b)*2 c", "ababc"),
        ("c (a b)*2", "c (a b)*2", "cabab"),
        ("(a b)", "a b", "ab"),
        ("(a b)*1 c", "a b c", "abc"),
        ("((a))*3", "a*3", "aaa"),
        ("(a*2)*3", "a*6", "aaaaaa"),
        ("((a b)*2)*2", "(a b)*4", "abababab"),
        ("((a b)*2 c)*2", "((a b)*2 c)*2", "ababcababc"),
        ("((a b) c)*2", "(a b c)*2", "abcabc"),
        ("(a b)*2 (c d)*2", "(a b)*2 (c d)*2", "ababcdcd"),
    ],
)
def test_a_group_is_repeated_as_a_whole(text: str, canonical: str, names: str) -> None:
    assert canonical_pattern(text) == canonical
    assert "".join(flat(parse_pattern(text))) == names


def test_a_group_stands_in_a_wrapper_and_a_wrapper_in_a_group() -> None:
    text = "(ladder((h3 s4d)*2 lstm, passes=4) attention(n_heads=2))*3"
    assert canonical_pattern(text) == text
    ((name, keywords, core, repeat, _),) = parse_pattern(text)
    assert (name, keywords, repeat) == ("", {}, 3)
    assert core[0].core == (Item("", {}, (Item("h3", {}), Item("s4d", {})), 2), Item("lstm", {}))


def test_a_wrapper_can_have_several_patterns() -> None:
    ((_, keywords, core, _, others),) = parse_pattern("parallel(h3*2,s4d lstm , a=1, (h3 s4d)*2)")
    assert (keywords, core) == ({"a": 1}, (Item("h3", {}, (), 2),))
    assert [len(part) for part in others] == [2, 1]
    assert canonical_pattern("parallel( a,x=1,b c )") == "parallel(a, b c, x=1)"


@pytest.mark.parametrize("depth", [17, 5000])
@pytest.mark.parametrize(("opening", "closing"), [("(", ")*2"), ("ladder(", ")")])
def test_deep_nesting_is_refused(depth: int, opening: str, closing: str) -> None:
    with pytest.raises(InputError, match="at most 16 nested parentheses") as caught:
        parse_pattern(opening * depth + "h3" + closing * depth)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("count", ["10000", "9" * 5000, "(h3*200)*50"])
def test_a_repeat_count_has_a_limit(count: str) -> None:
    with pytest.raises(InputError, match=r"repeat count.* of at most 9999") as caught:
        parse_pattern(count if "h3" in count else f"h3*{count}")
    assert len(str(caught.value)) < 500


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
        ("h3 s4d(n=1)*2 lstm<here>=3", "a layer name"),
        ("(<here>)", "a layer name"),
        ("(h3<here>", "')' (arguments follow their name without a space)"),
        ("ladder (h3<here>, passes=4)", "')' (arguments follow their name without a space)"),
        ("h3*2<here>(s4d lstm)*2", "a space"),
        ("h3*<here>\u0664", "a repeat count of at least 1"),
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
