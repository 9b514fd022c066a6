"""An interrupted text on disk, and what is not one."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.data import ByteTokenizer
from stateline.errors import InputError
from stateline.generate import HeldText, Kept, Session, TextStream, load_kept, prefill
from stateline.layers import load_state, save_state, select_rows
from stateline.models.language_model import LanguageModel

Build = Callable[..., LanguageModel]
KINDS = ["attention(position=rope)", "h3(d_state=8)", "lstm s4d(d_state=8)", "h3 attention"]
KINDS += ["ladder(attention(position=alibi) h3(d_state=8))", "shift_ssm(d_state=1)"]


def kept_by(model: LanguageModel, steps: int = 3) -> Kept:
    """After a prompt and some steps; the text holds half a character and half a stop string."""
    session = Session(model, prefill(model, torch.tensor([[1, 2, 3]])))
    for _ in range(steps):
        session.step()
    text = TextStream(ByteTokenizer(), ["abc"])
    for token in b"xxab\xc3":
        text.push(token)
    return Kept(session.state(), text.hold())


@pytest.mark.parametrize("pattern", KINDS)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_loaded_text_is_the_saved_one(
    build: Build, tmp_path: Path, pattern: str, steps: int
) -> None:
    model = build(pattern)
    kept = kept_by(model, steps)
    save_state(tmp_path / "kept", kept, model)
    loaded = load_kept(tmp_path / "kept", model)
    assert pytree.tree_structure(loaded) == pytree.tree_structure(kept)
    found, wanted = (pytree.tree_leaves(pytree.tree_map(Tensor.cpu, k)) for k in (loaded, kept))
    assert all(map(torch.equal, found, wanted))


def test_an_empty_text_can_be_kept(build: Build, tmp_path: Path) -> None:
    """One token: nothing fed, nothing shown."""
    model = build("attention h3(d_state=8)")
    kept = Kept(prefill(model, torch.tensor([[4]])), TextStream(ByteTokenizer()).hold())
    save_state(tmp_path / "kept", kept, model)
    assert load_kept(tmp_path / "kept", model).session.token.tolist() == [4]


def test_a_text_of_other_weights_is_refused_but_by_force(build: Build, tmp_path: Path) -> None:
    model = build("h3(d_state=8)")
    save_state(tmp_path / "kept", kept_by(model), model)
    with torch.no_grad():
        model.embedding.weight.add_(1)
    with pytest.raises(InputError, match="was saved by a model with other weights"):
        load_kept(tmp_path / "kept", model)
    assert load_kept(tmp_path / "kept", model, force=True).session.length == 6


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("h3(d_state=8) attention", "kept holds the state of another kind of layer"),
        ("h3(d_state=4)", "kept does not fit: its .* has the shape .*, not "),
        ("lstm", "kept holds the state of another kind of layer"),
    ],
)
def test_a_text_of_a_model_of_another_shape_is_refused_even_by_force(
    build: Build, tmp_path: Path, other: str, message: str
) -> None:
    model = build("h3(d_state=8)")
    save_state(tmp_path / "kept", kept_by(model), model)
    with pytest.raises(InputError, match="another configuration"):
        load_kept(tmp_path / "kept", build(other))
    with pytest.raises(InputError, match=message):
        load_kept(tmp_path / "kept", build(other), force=True)


def test_a_text_of_another_vocabulary_is_refused_even_by_force(
    build: Build, tmp_path: Path
) -> None:
    model = build("h3(d_state=8)")
    save_state(tmp_path / "kept", kept_by(model), model)
    with pytest.raises(InputError, match=r"its .*seen has the shape \(1, 11\), not \(1, 12\)"):
        load_kept(tmp_path / "kept", build("h3(d_state=8)", vocab_size=12), force=True)


def test_the_state_of_a_layer_alone_is_no_interrupted_text(build: Build, tmp_path: Path) -> None:
    model = build("h3(d_state=8)")
    save_state(tmp_path / "state", model.init_state(1), model)
    with pytest.raises(InputError, match="or of a text: the state of a text is read by generate"):
        load_kept(tmp_path / "state", model)


def test_the_reader_of_an_interrupted_text_is_named(build: Build, tmp_path: Path) -> None:
    model = build("h3(d_state=8)")
    save_state(tmp_path / "kept", kept_by(model), model)
    with pytest.raises(InputError, match="by generate --state, or by load_kept in Python"):
        load_state(tmp_path / "kept", model)


def altered(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write a state file again with other tensors, its fingerprint unchanged."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def replace(part: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = [name for name in tensors if part in name]
        tensors[name] = value(tensors[name]).contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            replace(".k", lambda t: t * float("nan")),
            r"does not fit: its .*\.k holds NaN; load it with .* or save another",
        ),
        (
            replace(".k", lambda t: t[..., :-1]),
            r"does not fit: its .*\.k has the shape",
        ),
        (replace(".k", lambda t: t[0]), r"does not fit: its .*\.k"),
        (replace(".k", lambda t: torch.cat([t, t])), r"does not fit: its .*\.k"),
        (replace(".length", lambda t: t.double()), r"does not fit: its .*\.length"),
        (
            replace(".session.token", lambda t: t + 1000),
            "is damaged: its numbers differ from those",
        ),
        (
            replace(".length", lambda t: t - 9),
            "is damaged: its numbers differ from those saved; save",
        ),
    ],
)
def test_a_damaged_text_is_refused_even_by_force(
    build: Build, tmp_path: Path, change: Callable[..., None], message: str
) -> None:
    model = build("attention(position=rope)")
    save_state(tmp_path / "kept", kept_by(model), model)
    altered(tmp_path / "kept", change)
    with pytest.raises(InputError, match=message):
        load_kept(tmp_path / "kept", model, force=True)


@pytest.mark.parametrize("part", [0, 7, 300, -1])
def test_a_truncated_file_is_refused_in_one_line(build: Build, tmp_path: Path, part: int) -> None:
    model = build("attention(position=rope)")
    path = tmp_path / "kept"
    save_state(path, kept_by(model), model)
    path.write_bytes(path.read_bytes()[:part])
    with pytest.raises(InputError, match=r"cannot read .*kept as a state") as caught:
        load_kept(path, model, force=True)
    assert "\n" not in str(caught.value)


NO_ROWS = torch.zeros(0, dtype=torch.int64)
HOSTILE: list[tuple[Callable[[Kept], Kept], str]] = [
    (lambda k: k._replace(session=select_rows(k.session, [0, 0])), "does not fit|the shape"),
    (lambda k: k._replace(session=select_rows(k.session, NO_ROWS)), "does not fit|the shape"),
    (lambda k: session_with(k, random=k.session.random - 1), "random is negative"),
    (lambda k: session_with(k, token=k.session.token - 99), "token is negative"),
    (lambda k: session_with(k, token=k.session.token + 99), "its token must be below 11, got"),
    (
        lambda k: session_with(k, token=k.session.token.int()),
        "token is torch.int32, not torch.int64",
    ),
    (lambda k: session_with(k, seen=k.session.seen.int()), "seen is torch.int32, not torch.bool"),
    (lambda k: model_with(k, position=k.session.model.position - 99), "position is negative"),
    (lambda k: k._replace(text=k.text._replace(text=k.text.text + 200)), "its held text must be"),
    (lambda k: counted(k, 2**62, 2**62), "it holds fewer than 46116860184273[0-9]* tokens"),
    (lambda k: counted(k, 10**6, 10**6), "it holds fewer than 100000. tokens"),
    (lambda k: counted(k, 10**6, 0), "it holds fewer than 100000. tokens"),
    (lambda k: counted(k, 0, 10**6), r"its .*length is 10000.. after . tokens"),
    (lambda k: counted(k, 0, -99), r"length is negative"),
]


def counted(kept: Kept, read: int, length: int) -> Kept:
    """The position and the length of the keys and values, enlarged."""
    model = kept.session.model
    keys, *others = model.layers
    keys = keys._replace(length=keys.length + length)
    return model_with(kept, position=model.position + read, layers=(keys, *others))  # type: ignore[arg-type]


def session_with(kept: Kept, **values: torch.Tensor) -> Kept:
    return kept._replace(session=kept.session._replace(**values))


def model_with(kept: Kept, **values: torch.Tensor) -> Kept:
    return session_with(kept, model=kept.session.model._replace(**values))  # type: ignore[arg-type]


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_a_text_that_no_session_writes_is_refused_even_with_the_right_hash(
    build: Build, tmp_path: Path, change: Callable[[Kept], Kept], message: str
) -> None:
    model = build("attention(position=rope)")
    save_state(tmp_path / "kept", change(kept_by(model)), model)
    with pytest.raises(InputError, match=message) as caught:
        load_kept(tmp_path / "kept", model, force=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [[195, 40], [255]])
def test_held_text_that_is_no_text_is_refused(text: list[int]) -> None:
    held = HeldText(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([text]))
    with pytest.raises(InputError, match="the interrupted text is damaged: "):
        TextStream(ByteTokenizer(), held=held)


def test_held_tokens_of_another_tokenizer_are_refused() -> None:
    held = HeldText(torch.tensor([[300]]), torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(InputError, match="has the token 300, but the tokenizer only 256"):
        TextStream(ByteTokenizer(), held=held)


def test_a_pipe_is_no_kept_text(build: Build, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"cannot read the state file .*: it is a pipe"):
        load_kept(tmp_path / "pipe", build("h3(d_state=8)"))
