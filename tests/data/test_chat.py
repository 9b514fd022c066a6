"""Templates of chats give what transformers gives."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stateline.data import ByteTokenizer, Tokenizer, load_tokenizer
from stateline.data.chat import Message, chat_text, next_turn, turn_end
from stateline.errors import InputError

CHATML = (
    "{% for m in messages %}\n{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
    "Be kind.<|im_end|>\n{% endif %}\n<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '\n' %}"
    "{% elif m['role'] == 'user' %}[INST] {{ ns.system }}{{ m['content'] | trim }} [/INST]"
    "{% else %} {{ m['content'] | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
STRICT = """{{ bos_token }}
{%- for m in messages -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate user/assistant") }}
    {%- endif -%}
    {{ '<turn>' + m.role.replace('assistant', 'model') + '\n' + m.content + '</turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"""
RICH = """{% for m in messages %}
  {% if m.role == 'nobody' %}{% continue %}{% endif %}
  {% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
  {% else %}
    {{ m | tojson }} {{ {'b': 'é<', 'a': [1]} | tojson(indent=2) }} {{ strftime_now('%Y') }}
  {% endif %}
{% endfor %}{{ unknown }}{{ thinking | default('none') }}"""
TEMPLATES = {"chatml": CHATML, "brackets": BRACKETS, "strict": STRICT, "rich": RICH}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<turn>", "</turn>"]
CHATS: list[list[Message]] = [
    [{"role": "user", "content": " Hi <b>you</b>\n"}],
    [
        {"role": "user", "content": "Hé 😀", "name": None},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "sure?"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|im_end|> Hi"}],
]


def with_template(bpe: Path, folder: Path, template: str) -> Tokenizer:
    """The tokenizer of a folder with a template and special tokens."""
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer.from_file(str(bpe))
    made.add_special_tokens(SPECIAL)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_chat_has_the_tokens_that_transformers_gives(
    name: str, prompt: bool, bpe: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = with_template(bpe, tmp_path / "model", TEMPLATES[name])
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for chat in CHATS:
        wanted: Any = None
        try:
            wanted = other.apply_chat_template(
                chat, add_generation_prompt=prompt, return_dict=False, thinking="on"
            )
        except Exception as error:
            with pytest.raises(InputError, match=re.escape(str(error))):
                chat_text(tokenizer, chat, prompt=prompt)
        else:
            text = chat_text(tokenizer, chat, prompt=prompt, variables={"thinking": "on"})
            assert tokenizer.encode(text).tolist() == wanted


@pytest.mark.parametrize(
    ("name", "end"), [("chatml", "<|im_end|>"), ("brackets", "</s>"), ("strict", "</turn>")]
)
def test_a_chat_goes_on_after_an_answer_with_the_tokens_of_the_whole_chat(
    name: str, end: str, bpe: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(bpe, tmp_path / "model", TEMPLATES[name])
    number = turn_end(tokenizer)
    assert number is not None
    assert tokenizer.decode([number]) == end
    asked, new = CHATS[0], [{"role": "user", "content": "And?"}]
    answered = [*asked, {"role": "assistant", "content": "said"}]
    text = chat_text(tokenizer, asked)
    space = " " if name == "brackets" else ""
    joined = text + space + "said" + next_turn(tokenizer, new)
    assert joined == chat_text(tokenizer, [*answered, *new])


def refused(template: str, messages: Sequence[Any], bpe: Path, folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        chat_text(with_template(bpe, folder / "model", template), messages)
    return str(caught.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for %}", "Expected"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ messages[0].content.nothing.at_all }}", "nothing"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_does_not_fit_is_refused_in_one_line(
    template: str, reason: str, bpe: Path, tmp_path: Path
) -> None:
    told = refused(template, CHATS[0], bpe, tmp_path)
    assert re.match(f"the template of chats does not take these messages: .*({reason})", told)


def test_a_model_without_a_template_has_no_chats() -> None:
    with pytest.raises(InputError, match="has no template of chats"):
        chat_text(ByteTokenizer(), CHATS[0])
    assert turn_end(ByteTokenizer()) is None


def test_special_tokens_have_no_text_unless_they_are_asked_for(bpe: Path, tmp_path: Path) -> None:
    from stateline.generate import TextStream

    tokenizer = with_template(bpe, tmp_path / "model", CHATML)
    tokens = tokenizer.encode("a<|im_start|>b</s>c").tolist()
    shown = {
        special: "".join(map(TextStream(tokenizer, special=special, ends=()).push, tokens))
        for special in (False, True)
    }
    assert shown == {False: "abc", True: "a<|im_start|>b</s>c"}
