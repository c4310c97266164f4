"""Tests what is read and changed in the bodies of forwarded requests."""

import json
from email import message_from_bytes
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.server_api import CHATS, hashed_salt
from router.errors import ApiError
from router.forwarding.body import (
    ForwardedBody,
    has_media,
    may_have_media,
    parse_form,
    parse_json,
    read_json,
)
from router.limits import MAX_CHOICES

EMBEDDINGS = "/v1/embeddings"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + 400 * "A"}}


def chat(*contents: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": each} for each in contents], **fields}


def parsed(body: dict[str, Any], path: str = CHATS) -> ForwardedBody:
    return parse_json(orjson.loads(orjson.dumps(body)), path)


def test_everything_but_the_model_and_the_salt_stays() -> None:
    given = {"model": "mine", "input": ["é"], "odd": {"a": [None, 1.5]}}
    body = parsed(given, EMBEDDINGS)
    assert body.model == "mine"
    assert orjson.loads(body.encode("theirs", b"")) == given | {"model": "theirs"}
    salted = orjson.loads(body.encode("theirs", b"salt"))
    assert salted == given | {"model": "theirs", "cache_salt": hashed_salt(b"salt")}


def test_what_concerns_other_clients_of_the_server_is_left_out() -> None:
    body = parsed({"input": "a", "cache_salt": "s", "priority": 3, "request_id": "r"}, EMBEDDINGS)
    assert body.cache_salt == "s"
    assert orjson.loads(body.encode("m", b"")) == {"input": "a", "model": "m"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"input": "a", "ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
        ({"input": "a", "model": ["a"]}, "model"),
        ({"input": "a", "cache_salt": 1}, "cache_salt"),
        (chat("a", vllm_xargs={"kv_transfer_params": "x"}), "kv_transfer_params"),
        # The server would read all of these as other values of the same meaning.
        (chat("a", stream=1), "stream"),
        (chat("a", stream="true"), "stream"),
        (chat("a", n="7"), "n"),
        (chat("a", n=True), "n"),
        (chat("a", max_tokens="7"), "max_tokens"),
        (chat("a", max_completion_tokens=7.5), "max_completion_tokens"),
        (chat("a", n=MAX_CHOICES + 1), "n"),
    ],
)
def test_fields_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refusal:
        parsed(body, CHATS if "messages" in body else EMBEDDINGS)
    assert (refusal.value.status, refusal.value.param) == (400, param)


def test_names_of_images_are_refused() -> None:
    """A server keeps them for all of its clients."""
    whole, bare = {**IMAGE, "uuid": "a"}, {"image_url": None, "uuid": "a"}
    for named in (whole, bare, {**bare, "type": "text"}):
        for path in (CHATS, EMBEDDINGS):
            with pytest.raises(ApiError, match="uuid is not supported"):
                parsed(chat([named]), path)
    parsed({"input": "a", "metadata": {"uuid": "b"}}, EMBEDDINGS)


def test_an_empty_kv_transfer_is_left_out() -> None:
    body = parsed({"input": "a", "kv_transfer_params": None}, EMBEDDINGS)
    assert orjson.loads(body.encode("m", b"")) == {"input": "a", "model": "m"}


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'"a"', b'{"a":' + 200 * b"[" + 200 * b"]" + b"}"]
)
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        read_json(data, 1000)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("value", "num_tokens"),
    [("abcdefghi", 3), (["ab", "abcde"], 3), ([1, 2, 3], 3), ([[1, 2], [3]], 3), (None, 0)],
)
def test_tokens_are_estimated_from_texts_and_ids(value: Any, num_tokens: int) -> None:
    assert parsed({"input": value}, EMBEDDINGS).num_tokens == num_tokens


def test_images_count_no_tokens() -> None:
    text = {"type": "text", "text": "what"}
    without = parsed(chat([text]))
    assert parsed(chat([text, IMAGE])).num_tokens == without.num_tokens + len("image_url") // 4 + 1


@pytest.mark.parametrize(
    ("fields", "answer", "choices"),
    [
        ({}, 512, 1),
        ({"max_tokens": 7}, 7, 1),
        ({"max_tokens": 7, "max_completion_tokens": 9, "n": 3}, 9, 3),
        ({"max_tokens": -1, "n": 3.0}, 512, 3),
    ],
)
def test_the_answer_of_a_chat_is_reserved(
    fields: dict[str, Any], answer: int, choices: int
) -> None:
    body = parsed(chat("a", **fields))
    assert (body.answer_tokens, body.num_choices) == (answer, choices)
    assert parsed({"input": "a"}, EMBEDDINGS).answer_tokens == 0


@pytest.mark.parametrize(
    ("fields", "drops", "options"),
    [
        ({}, False, None),
        ({"stream": True}, True, {"include_usage": True}),
        ({"stream": True, "stream_options": {"include_usage": True}}, False, None),
        (
            {"stream": True, "stream_options": {"include_usage": False, "other": 1}},
            True,
            {"include_usage": True, "other": 1},
        ),
    ],
)
def test_streams_are_asked_for_their_usage(
    fields: dict[str, Any], drops: bool, options: Any
) -> None:
    body = parsed(chat("a", **fields))
    sent = orjson.loads(body.encode("m", b""))
    assert body.drops_usage is drops
    assert sent.get("stream_options") == (options or fields.get("stream_options"))


def test_chats_with_the_same_beginning_have_the_same_first_keys() -> None:
    text = {"type": "text", "text": "what"}
    first = parsed(chat("system", [text, IMAGE])).prefix_keys(b"root")
    longer = parsed(chat("system", [text, IMAGE], "more")).prefix_keys(b"root")
    other = parsed(chat("system", [text, {**IMAGE, "image_url": {"url": "x"}}])).prefix_keys(
        b"root"
    )
    assert longer[:3] == first
    assert (other[:2], other[2] == first[2]) == (first[:2], False)
    assert not {*first} & {*parsed(chat("system", [text, IMAGE])).prefix_keys(b"another")}
    assert parsed({"input": "a"}, EMBEDDINGS).prefix_keys(b"root") == ()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chat("text"), False),
        (chat([{"type": "text", "text": "image_url"}]), False),
        (chat("text", [IMAGE]), True),
        (chat([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]), True),
        (chat("a", tools=[{"function": {"parameters": {"image_url": {}}}}]), False),
        (chat([{"image_url": "http://a"}]), True),
        (chat([{"type": ["image_url"]}, {"type": None}]), False),
        ({"messages": ["a", {"content": ["b"]}]}, False),
        ({"messages": 5}, False),
        ({"messages": {"image_url": 1}}, False),
        ({}, False),
    ],
)
def test_chats_with_media_are_known(body: dict[str, Any], expected: bool) -> None:
    assert has_media(body) is expected
    assert not expected or may_have_media(orjson.dumps(body))


FORM_TYPE = 'multipart/form-data; boundary="b-1"'


def form(*parts: bytes) -> bytes:
    start = b"--b-1\r\nContent-Disposition: form-data; "
    return b"".join(start + part + b"\r\n" for part in parts) + b"--b-1--\r\n"


FILE = b'name="file"; filename="model"\r\n\r\n\x00\r\n--b-\r\n\r\nname="model"'


FILE_PART = ("file", "model", b'\x00\r\n--b-\r\n\r\nname="model"')
MODEL_PART = ("model", None, b"theirs")


def sent(body: ForwardedBody) -> list[tuple[str, str | None, bytes]]:
    """Return name, file name and value of each part of a form, as another parser reads them."""
    data = body.encode("theirs", b"salt")
    message = message_from_bytes(b"content-type: %b\n\n%b" % (body.content_type.encode(), data))
    return [
        (
            str(part.get_param("name", header="content-disposition")),
            part.get_filename(),
            part.get_payload(decode=True),
        )
        for part in message.get_payload()
    ]


def test_a_forms_parts_pass_with_the_servers_name_of_the_model() -> None:
    texts = [f'name="words[]"\r\n\r\n{word}'.encode() for word in ("ö", "b")]
    body = parse_form(form(FILE, b'name="model"\r\n\r\nmine', *texts), FORM_TYPE)
    assert (body.model, body.num_tokens) == ("mine", 0)
    words = [("words[]", None, word.encode()) for word in ("ö", "b")]
    assert sent(body) == [*words, FILE_PART, MODEL_PART]
    without = parse_form(form(FILE), FORM_TYPE)
    assert (without.model, sent(without)) == (None, [FILE_PART, MODEL_PART])


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (b'name=model; x="; name="prompt"', "prompt"),
        (b'name="prompt"; name="model"', "prompt"),
        (b'name="model"\r\nContent-Disposition: form-data; name="prompt"', "model"),
        (b'x="; name="prompt"\r\nContent-Disposition: form-data; name="model"', "prompt"),
        (b'name="mod\\"el"', "mod_"),
        (b'name="a\r\nb"', "a__b"),
    ],
)
def test_the_server_reads_the_same_names_in_a_form(part: bytes, name: str) -> None:
    """No part gives the server another name of a model than the one that is checked."""
    body = parse_form(form(b'name="model"\r\n\r\nmine', part + b"\r\n\r\nother"), FORM_TYPE)
    others = [] if name == "model" else [(name, None, b"other")]
    assert body.model == ("other" if name == "model" else "mine")
    assert sent(body) == [*others, MODEL_PART]


def test_the_server_reads_the_same_boundary_of_a_form() -> None:
    """The form has another one in its file, and in its content type."""
    inner = form(b'name="model"\r\n\r\nother').replace(b"b-1", b"b-2")
    data = form(b'name="file"\r\n\r\n' + inner)
    for content_type in (f"{FORM_TYPE}; boundary=b-2", "multipart/form-data; xboundary=b-1"):
        assert sent(parse_form(data, content_type)) == [("file", "file", inner), MODEL_PART]


@pytest.mark.parametrize(
    ("data", "content_type", "status"),
    [
        (form(FILE), "application/json", 415),
        (form(FILE)[:-8], FORM_TYPE, 400),
        (form(FILE, b'name="kv_transfer_params"\r\n\r\n{}'), FORM_TYPE, 400),
        (form(FILE, b'name="kv\\transfer_params"\r\n\r\n{}'), FORM_TYPE, 400),
    ],
)
def test_odd_forms_are_refused(data: bytes, content_type: str, status: int) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_form(data, content_type)
    assert refusal.value.status == status


NAMES = st.sampled_from(
    ["messages", "content", "role", "type", "image_url", "uuid", "stream", "stream_options", "n",
     "max_tokens", "model", "input", "cache_salt", "kv_transfer_params", "prompt_cache_key"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=3) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)


@given(body=st.dictionaries(NAMES, VALUES, max_size=6))
def test_any_json_is_read_or_refused(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    try:
        read = read_json(data, 1000)
        path = CHATS if has_media(read) else EMBEDDINGS
        parsed = parse_json(read, path)
    except ApiError as refusal:
        assert refusal.status == 400
    else:
        parsed.prefix_keys(b"")
        assert orjson.loads(parsed.encode("m", b"s"))["model"] == "m"
