from typing import Any

import pytest
import torch

from stateline.errors import InputError
from stateline.generate import generate
from stateline.layers.law import check_layer
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel


def model(pattern: str, **settings: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(pattern, **{"vocab_size": 7, "d_model": 8, **settings})).eval()


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        ("attention(position=rope) h3(d_state=4)", {}),
        ("ladder(s4d(d_state=4) attention(position=alibi))", {"tie_embeddings": False}),
        ("lstm attention(position=hard_alibi)", {"max_len": 64, "norm": "rms"}),
        ("attention h3(d_state=4)", {"block": "parallel", "feed_forward": "gelu_exact"}),
        ("lstm attention", {"block": "plain", "norm": "none"}),
    ],
)
def test_the_law_holds_from_tokens_to_logits(pattern: str, settings: dict[str, Any]) -> None:
    report = check_layer(model(pattern, **settings))
    assert report.ok, str(report)


def hidden_and_logits(of: LanguageModel) -> tuple[torch.Tensor, torch.Tensor]:
    seen: list[torch.Tensor] = []
    of.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    logits = of(torch.arange(7)[None])
    return seen[0], logits


def test_reduced_logits_need_rows_and_tokens() -> None:
    with pytest.raises(InputError, match="reduce needs rows and tokens, got "):
        model("lstm")(torch.zeros(0, 3, dtype=torch.int64), reduce=lambda logits, h: logits(h))


@pytest.mark.usefixtures("unannotated")
def test_a_pattern_alone_is_no_configuration() -> None:
    with pytest.raises(InputError, match=r"takes a ModelConfig, got str: give such as ModelConfig"):
        LanguageModel("h3")  # type: ignore[arg-type]


def test_tied_logits_are_products_with_the_embedding() -> None:
    tied = model("h3")
    hidden, logits = hidden_and_logits(tied)
    torch.testing.assert_close(logits, hidden @ tied.embedding.weight.T)


def test_untied_logits_are_products_with_a_matrix_of_their_own() -> None:
    untied = model("h3", tie_embeddings=False)
    hidden, logits = hidden_and_logits(untied)
    assert untied.head is not None
    torch.testing.assert_close(logits, hidden @ untied.head.weight.T)
    assert untied.head.bias is None
    assert not untied.head.weight.equal(untied.embedding.weight)


def test_an_output_matrix_of_its_own_may_have_a_bias() -> None:
    biased = model("h3", tie_embeddings=False, head_bias=True)
    assert biased.head is not None
    torch.nn.init.normal_(biased.head.bias)
    hidden, logits = hidden_and_logits(biased)
    torch.testing.assert_close(logits, hidden @ biased.head.weight.T + biased.head.bias)


def test_learned_positions_tell_places_apart() -> None:
    with_positions, without = (model("feed_forward", max_len=length) for length in (4, None))
    same_token = torch.zeros(1, 4, dtype=torch.int64)
    # Not to the bit: a product of matrices may sum its last rows in another order.
    logits = without(same_token)
    torch.testing.assert_close(logits, logits[:, :1].expand_as(logits))
    apart = torch.pdist(with_positions(same_token)[0])
    assert apart.min() > 1e-3


@pytest.mark.parametrize("block", ["sequential", "parallel"])
def test_maps_and_embeddings_start_at_the_documented_width(block: str) -> None:
    settings = {"d_model": 256, "vocab_size": 1000, "tie_embeddings": False, "block": block}
    large = model("attention(bias=true)*2", **settings)
    width = (2 / (5 * 256)) ** 0.5
    branches = 4  # two layers, two feed-forwards
    for name, parameter in large.named_parameters():
        if "norm" in name:
            continue
        if name.endswith("bias"):
            assert not parameter.any(), name
        else:
            scale = branches**0.5 if name.endswith("out_proj.weight") else 1
            assert parameter.std().item() == pytest.approx(width / scale, rel=0.02), name


def test_parameters_of_layers_that_initialise_themselves_are_left_alone() -> None:
    decay = model("h3").stack.links[0].layer.diagonal.log_decay
    assert decay.exp().allclose(torch.tensor(0.5))


@pytest.mark.cpu
class TestLearnedPositionsEnd:
    """At ``max_len`` tokens the model works, beyond them every way in says so."""

    message = "made for max_len=5 tokens"
    tokens = torch.zeros(1, 6, dtype=torch.int64).cpu()

    def test_forward(self) -> None:
        short = model("h3", max_len=5)
        short(self.tokens[:, :5])
        with pytest.raises(InputError, match=f"{self.message}, got 6"):
            short(self.tokens)

    def test_forward_chunk(self) -> None:
        short = model("h3", max_len=5)
        _, state = short.forward_chunk(self.tokens[:, :3], short.init_state(1))
        short.forward_chunk(self.tokens[:, :2], state)
        with pytest.raises(InputError, match=f"{self.message}, got 6"):
            short.forward_chunk(self.tokens[:, :3], state)

    @pytest.mark.parametrize("verb", ["step", "step_"])
    def test_steps(self, verb: str) -> None:
        short = model("h3", max_len=5)
        with torch.no_grad():
            _, state = short.forward_chunk(self.tokens[:, :4], short.init_state(1, capacity=2))
            _, full = short.step(self.tokens[:, 0], state)
            with pytest.raises(InputError, match=f"{self.message}, got 6"):
                getattr(short, verb)(self.tokens[:, 0], full)

    def test_generation_before_any_token_is_computed(self) -> None:
        short = model("h3", max_len=5)
        assert generate(short, self.tokens[:, :3], 3).shape == (1, 3)  # the last is never read
        with pytest.raises(InputError, match=r"make 6 positions, .* max_len=5 tokens: shorten"):
            generate(short, self.tokens[:, :3], 4)


@pytest.mark.parametrize("keep", [0, 1, 3, 9])
def test_the_last_logits_alone_are_those_of_all_positions(keep: int) -> None:
    model = LanguageModel(ModelConfig("h3 attention", vocab_size=10, d_model=8)).eval()
    tokens = model.example_input(2, 5)
    logits, state = model.forward_chunk(tokens, model.init_state(2))
    last, same = model.forward_chunk(tokens, model.init_state(2), keep=keep)
    assert last.shape == (2, min(keep, 5), 10)
    torch.testing.assert_close(last, logits[:, 5 - min(keep, 5) :])
    torch.testing.assert_close(model(tokens, keep=keep), last)
    torch.testing.assert_close(model.step(tokens[:, 0], same), model.step(tokens[:, 0], state))


def test_a_batch_without_rows_keeps_as_many_logits() -> None:
    model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8))
    none = torch.zeros(0, 5, dtype=torch.int64)
    logits, _ = model.forward_chunk(none, model.init_state(0), keep=2)
    assert logits.shape == model(none, keep=2).shape == (0, 2, 10)


TOKENS = torch.zeros(2, 5, dtype=torch.int64, device="cpu")
KINDS_OF_INPUT = [
    (TOKENS[0], r"tensor of shape \(batch, length\), got torch.int64 of \(5,\)"),
    (TOKENS[None], r"tensor of shape \(batch, length\), got torch.int64 of \(1, 2, 5\)"),
    (TOKENS.bool(), "int64 or int32, got torch.bool: pass token numbers, after .long()"),
    (TOKENS.to(torch.uint8), "int64 or int32, got torch.uint8"),
    (TOKENS.tolist(), "a tensor.*, got list"),
    (TOKENS.numpy(), "a tensor.*, got ndarray"),
]


@pytest.mark.cpu
@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(("x", "message"), KINDS_OF_INPUT)
def test_what_are_no_rows_of_tokens_is_refused(x: Any, message: str) -> None:
    made = model("h3")
    for read in (made, made.hidden_states, lambda x: made.forward_chunk(x, made.init_state(2))):
        with pytest.raises(InputError, match=message):
            read(x)


@pytest.mark.cpu
@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("verb", ["step", "step_"])
def test_a_step_takes_a_token_of_each_row(verb: str) -> None:
    made = model("h3")
    with pytest.raises(InputError, match=r"shape \(batch\), got torch.int64 of \(2, 5\)"):
        getattr(made, verb)(TOKENS, made.init_state(2))


@pytest.mark.cpu
def test_tokens_may_be_int32() -> None:
    made = model("h3")
    torch.testing.assert_close(made(TOKENS.int()), made(TOKENS))


@pytest.mark.usefixtures("unannotated")
def test_starts_do_not_hide_an_input_of_another_shape() -> None:
    with pytest.raises(InputError, match=r"shape \(batch, length\), got torch.int64 of \(5,\)"):
        model("h3")(TOKENS[0], starts=torch.zeros(5, dtype=torch.bool))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"batch_size": -1}, "batch_size=-1"), ({"batch_size": 2, "capacity": -1}, "capacity=-1")],
)
def test_a_state_has_no_less_than_no_rows_and_room(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=f"must be at least 0, got {message}"):
        model("feed_forward").init_state(**sizes)


def test_no_less_than_no_logits_are_kept() -> None:
    made = model("h3")
    tokens = made.example_input(2, 5)
    for read in (made, lambda x, keep: made.forward_chunk(x, made.init_state(2), keep=keep)):
        with pytest.raises(InputError, match="keep must be at least 0, got keep=-1"):
            read(tokens, keep=-1)
