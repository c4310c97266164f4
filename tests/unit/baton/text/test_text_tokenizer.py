"""Tests tokenizer, chat template and incremental detokenizer, with small tokenizers built here."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from baton.clock import ManualClock
from baton.errors import Invalid
from baton.text.chat_template import ChatTemplate
from baton.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]
LIMIT = 10_000
CORPUS = ["the quick brown fox jumps over the lazy dog", "größer façade naïve 日本語 🎉🎊"] * 4
CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("日本")])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Return a tokenizer like those of SentencePiece, with ``▁`` for a space, and byte tokens for
    rare characters."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁a", "a", "b", "▁the", "é", "▁▁", "x", "�"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def write(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any] | None) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def byte_level_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    config = {"chat_template": CHATML, "eos_token": {"content": "<|im_end|>"}}
    return Tokenizer.load(write(tmp_path_factory.mktemp("bl"), byte_level(), config))


@pytest.fixture(scope="module")
def byte_fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("bf"), byte_fallback(), None))


def in_pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.make_detokenizer()
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


# Any ids: special tokens, ids beyond the vocabulary, and broken UTF-8.
@given(ids=st.lists(st.integers(0, 340), max_size=40))
def test_byte_level_deltas_add_up_to_the_text(
    byte_level_tokenizer: Tokenizer, ids: list[int]
) -> None:
    whole = byte_level_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(in_pieces(byte_level_tokenizer, ids)) == whole
    together = byte_level_tokenizer.make_detokenizer()
    assert together.push(ids) + together.flush() == whole


@given(ids=st.lists(st.integers(0, 275), max_size=40))
def test_byte_fallback_deltas_add_up_to_the_text(
    byte_fallback_tokenizer: Tokenizer, ids: list[int]
) -> None:
    whole = byte_fallback_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(in_pieces(byte_fallback_tokenizer, ids)) == whole


@given(text=st.text(max_size=30))
def test_no_delta_has_part_of_a_character(byte_level_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_level_tokenizer.encode(text)
    assert "".join(in_pieces(byte_level_tokenizer, ids)) == text
    if "�" not in text:
        assert not any("�" in piece for piece in in_pieces(byte_level_tokenizer, ids))


def test_character_of_four_byte_tokens_comes_at_once(
    byte_fallback_tokenizer: Tokenizer,
) -> None:
    ids = [2 + byte for byte in "🎉".encode()]
    a = byte_fallback_tokenizer.encode("a")
    assert in_pieces(byte_fallback_tokenizer, [*ids, *a]) == ["", "", "", "", "🎉a", ""]


def test_token_bytes_add_up_to_the_text(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode(" größer 🎊")
    assert b"".join(map(byte_level_tokenizer.token_bytes, ids)).decode() == " größer 🎊"
    assert byte_level_tokenizer.token_bytes(9999) == b""


def test_chat_template_is_rendered(byte_level_tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    apply = partial(byte_level_tokenizer.apply_chat_template, max_characters=LIMIT)
    assert apply(messages) == begin + "<|im_start|>assistant\n"
    assert apply(messages, None, False) == begin
    messages[0]["role"] = "developer"
    assert apply(messages, None, False) == begin


def render(folder: Path, template: Any, **extra: Any) -> str:
    config = {"chat_template": template, **extra}
    loaded = Tokenizer.load(write(folder, byte_level(), config), ManualClock(86_400 * 365))
    tools = [{"type": "function", "function": {"name": "größe <b>"}}]
    return loaded.apply_chat_template(USER, tools, max_characters=LIMIT)


def test_templates_may_use_tokens_tools_and_extensions(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ tools[0].function | tojson }}|"
        "{{ strftime_now('%Y') }}|{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}"
        "{{ i }}{% endfor %}{% generation %}!{% endgeneration %}"
    )
    text = render(tmp_path, template, bos_token="<s>", eos_token={"content": "</s>"})
    assert text == '<s>|</s>||{"name": "größe <b>"}|1971|01!'


def test_named_templates_are_chosen_by_use(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    assert render(tmp_path, named) == "tools"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert render(tmp_path, named) == "from the file"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[7].content + 'x' }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_failing_template_is_invalid(tmp_path: Path, template: str) -> None:
    with pytest.raises(Invalid, match="chat template failed"):
        render(tmp_path, template)


def test_template_that_does_not_compile_is_invalid(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="does not compile"):
        render(tmp_path, "{% if %}")


def test_missing_template_is_reported(byte_fallback_tokenizer: Tokenizer) -> None:
    with pytest.raises(Invalid, match="no chat template"):
        byte_fallback_tokenizer.apply_chat_template(USER, max_characters=LIMIT)


REPEATING = "{% for m in messages %}{{ m.content }}{% endfor %}"
INDENTING = "{{ tools[0] | tojson(indent=4) }}"
DISCARDING = "{% set text %}{% for m in messages %}{{ m.content | tojson }}{% endfor %}{% endset %}"


@pytest.mark.parametrize(
    ("source", "size"),
    [
        (REPEATING, 2 * 30),
        (INDENTING, len('{\n    "a": [\n        1,\n        2\n    ]\n}')),
        (DISCARDING, 2 * len('""') + 2 * 30),
        ("{{ messages | map(attribute='content') | map('tojson') | join }}", 2 * len('""') + 60),
    ],
)
def test_text_and_json_of_a_template_are_limited(source: str, size: int) -> None:
    template = ChatTemplate({"default": source}, {}, ManualClock())
    messages = [{"role": "user", "content": "a" * 30}] * 2
    tools = [{"a": [1, 2]}]
    rendered = template.render(messages, tools, False, max_characters=size)
    assert len(rendered) == (0 if source == DISCARDING else size)
    with pytest.raises(Invalid) as error:
        template.render(messages, tools, False, max_characters=size - 1)
    assert str(error.value) == (
        f"the chat template makes a text of more than {size - 1} characters from the messages and "
        "tools, the limit of one request; send fewer or shorter ones"
    )
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")


def test_indented_json_is_not_made_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON of 1,000 values 100 levels deep would have 400 characters per value."""
    template = ChatTemplate({"default": "{{ tools | tojson(indent=4) }}"}, {}, ManualClock())
    made: list[int] = []
    make = json.JSONEncoder.iterencode

    def count(encoder: json.JSONEncoder, value: Any) -> Iterator[str]:
        for piece in make(encoder, value):
            made.append(len(piece))
            yield piece

    monkeypatch.setattr(json.JSONEncoder, "iterencode", count)
    value: list[Any] = [1] * 1000
    for _ in range(99):
        value = [value]
    with pytest.raises(Invalid, match="more than 50000 characters"):
        template.render(USER, value, False, max_characters=50_000)
    before_values = sum(1 + 1 + 4 * level for level in range(1, 101))
    per_value = len(",\n" + " " * 400 + "1")
    assert sum(made) == before_values + len("1") + 74 * per_value


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b'{"model": 3}'])
def test_invalid_tokenizer_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(Invalid, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_invalid_json_file_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, byte_level(), None)
    (tmp_path / name).write_text("[1")
    with pytest.raises(Invalid, match=name.replace(".", r"\.")):
        Tokenizer.load(tmp_path)


def test_vocabulary_larger_than_the_models_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), None)
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    with pytest.raises(Invalid, match=r"the tokenizer has \d+ tokens, but .* only 100"):
        Tokenizer.load(tmp_path)


def test_truncation_in_the_file_is_not_applied(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    loaded = Tokenizer.load(write(tmp_path, tokenizer, None))
    assert len(loaded.encode("the lazy dog jumps")) > 2
