"""Tests fields of chats: continued answers, stop strings, usage, what other providers send."""

from pathlib import Path

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from baton.text.tokenizer import Tokenizer
from tests.router_harness import CHAT, COMPLETE, USER, chat, events, open_harness, wrong_error
from tests.unit import small_chats
from tests.unit.small_chats import CALL, TEMPLATE, TOOL, checked, deltas, load_tokenizer, message_of

room_for_calls = small_chats.room_for_calls
hermes = small_chats.hermes

JSON_OBJECT = {"type": "json_object"}


@pytest.mark.parametrize("strict", [False, True])
async def test_variables_that_the_template_lacks_are_ignored(
    hermes: Tokenizer, strict: bool
) -> None:
    """Clients send ``enable_thinking`` to any model, whether or not its template has this
    variable."""
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    async with open_harness(hermes, "Yes", strict_fields=strict) as (_, client):
        for path in (CHAT, "/tokenize"):
            response = await client.post(path, json={"messages": chat()["messages"], **fields})
            if strict:
                assert wrong_error(response)["param"] == "chat_template_kwargs"
            else:
                name = response.headers["x-baton-ignored-fields"]
                assert name == "chat_template_kwargs.enable_thinking"


async def test_verbosity_is_passed_to_a_template_that_has_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, "{{ verbosity }}:" + TEMPLATE)
    async with open_harness(tokenizer, "Yes") as (router, client):
        response = await client.post(CHAT, json=chat(verbosity="low"))
        assert "x-baton-ignored-fields" not in response.headers
    assert bytes(router.prefill.submitted[0].spec.token_ids).startswith(b"low:")


@pytest.mark.parametrize("content", ["Once ", "Once", " Once\n"])
async def test_final_message_can_be_continued(hermes: Tokenizer, content: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    async with open_harness(hermes, "x") as (router, client):
        assert message_of(await client.post(CHAT, json={"messages": messages, **fields}))
        ids = (await client.post("/tokenize", json={"messages": messages, **fields})).json()
    prompt = f"<user>Hi|<assistant>{content.lstrip()}".encode()
    assert bytes(router.prefill.submitted[0].spec.token_ids) == prompt == bytes(ids["tokens"])


async def test_template_that_hides_the_final_message_rejects_continuation(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        tmp_path, "{{ messages[0].content }}{{ messages[1].content | length }}"
    )
    messages = [*USER, {"role": "assistant", "content": "Once"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    async with open_harness(tokenizer) as (_, client):
        response = await client.post(CHAT, json={"messages": messages, **fields})
    assert wrong_error(response)["param"] == "continue_final_message"


async def test_stop_strings_can_be_included_in_the_output(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "Hello, you") as (_, client):
        body = {"prompt": "x", "include_stop_str_in_output": True}
        cut = (await client.post(COMPLETE, json={**body, "stop": ","})).json()
        checked(Completion, cut)
        by_token = {**body, "stop_token_ids": [ord("o")]}
        token = (await client.post(COMPLETE, json=by_token)).json()
        whole = (await client.post(COMPLETE, json=body)).json()
    assert [each["choices"][0]["text"] for each in (cut, token, whole)] == [
        "Hello,", "Hello", "Hello, you",
    ]  # fmt: skip


async def test_min_tokens_is_passed_on_and_validated(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "x") as (router, client):
        body = {"prompt": "x", "max_tokens": 5}
        assert (await client.post(COMPLETE, json={**body, "min_tokens": 5})).status_code == 200
        assert router.prefill.submitted[0].spec.sampling.min_tokens == 5
        for fields in ({"min_tokens": 6}, {"min_tokens": 1, "response_format": JSON_OBJECT}):
            wrong = await client.post(COMPLETE, json={**body, **fields})
            assert wrong_error(wrong)["param"] == "min_tokens"
        forced = chat(tools=[TOOL], tool_choice="required", min_tokens=1)
        assert wrong_error(await client.post(CHAT, json=forced))["param"] == "min_tokens"


async def test_obfuscation_pads_chunks_to_one_size(hermes: Tokenizer) -> None:
    options = {"include_obfuscation": True}
    async with open_harness(hermes, "Hi ö" + "x" * 9) as (_, client):
        body = chat(stream=True, stream_options=options)
        response = await client.post(CHAT, json=body)
    sizes = {len(block.encode()) for block in response.text.split("\n\n")[:-2]}
    assert len(sizes) == 1
    assert "".join(d.get("content", "") for d in deltas(response)) == "Hi ö" + "x" * 9


async def test_service_tier_is_returned_if_requested(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "x") as (_, client):
        answer = (await client.post(CHAT, json=chat(service_tier="auto"))).json()
        silent = (await client.post(CHAT, json=chat())).json()
    assert answer["service_tier"] == "default" and "service_tier" not in silent


async def test_best_of_returns_the_best_choices(hermes: Tokenizer) -> None:
    """Choices are ranked by their mean logprob; all of them count as usage."""
    async with open_harness(hermes, "abc") as (router, client):
        body = {"prompt": ["x", "yz"], "n": 1, "best_of": 3, "max_tokens": 2}
        answer = (await client.post(COMPLETE, json=body)).json()
    checked(Completion, answer)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == 3
    assert {job.spec.sampling.logprobs for job in router.prefill.submitted} == {0}


async def test_litellms_extra_message_fields_are_accepted(hermes: Tokenizer) -> None:
    """The client sends an answer back with the fields that litellm, and providers behind it, add to
    messages."""
    async with open_harness(hermes, CALL) as (router, client):
        first = message_of(await client.post(CHAT, json=chat(tools=[TOOL])))
        assert "refusal" not in first
        added = {
            "refusal": None, "annotations": [], "audio": None, "function_call": None,
            "provider_specific_fields": {"refusal": None, "citations": [1]},
            "reasoning": "Hm", "reasoning_details": [{"type": "reasoning.text", "text": "Hm"}],
            "reasoning_content": None, "thinking_blocks": [{"type": "thinking"}],
            "id": "msg_1", "type": "message", "status": "completed", "index": 0,
        }  # fmt: skip
        call = {**first["tool_calls"][0], "index": 0, "provider_specific_fields": {"x": 1}}
        result = {"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "2"}
        turns = [*USER, {**first, **added, "tool_calls": [call]}, result]
        second = await client.post(CHAT, json={"messages": turns, "tools": [TOOL]})
        assert second.status_code == 200, second.text
    prompt = bytes(router.prefill.submitted[1].spec.token_ids).decode()
    assert prompt == f"[f ]<user>Hi|<assistant>(Hm)!f:1|<tool>2#{call['id']}|>"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_broken_arguments_of_earlier_calls_are_accepted(tmp_path: Path, path: str) -> None:
    """Answers of the model itself may have such arguments. Half a surrogate pair has no UTF-8."""
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + (
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
        "{% endfor %}{{ m.content }}{% endfor %}"
    )
    only_objects = load_tokenizer(tmp_path, template)
    async with open_harness(only_objects, "x") as (router, client):
        for arguments in ('{"x": 1', "null", " ", "[1]", '{"x": "\n"}', '{"x": "\\ud83d"}'):
            function = {"name": "f", "arguments": arguments}
            call = {"id": "c", "type": "function", "function": function}
            messages = [*USER, {"role": "assistant", "tool_calls": [call]}, *USER]
            response = await client.post(path, json={"messages": messages})
            assert response.status_code == 200, response.text
    prompts = [bytes(job.spec.token_ids).decode() for job in router.prefill.submitted]
    assert path != CHAT or prompts == [
        'Hiinvalid_arguments={"x": 1Hi', "HiHi", "HiHi", "Hiinvalid_arguments=[1]Hi", "Hix=\nHi",
        "Hix=\ufffdHi",
    ]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_half_a_surrogate_pair_in_the_body_is_not_json(hermes: Tokenizer, path: str) -> None:
    async with open_harness(hermes, "x") as (_, client):
        for half in (rb"\ud83d", rb"\ude00", b"\xed\xa0\xbd"):
            body = b'{"messages": [{"role": "user", "content": "%b"}]}' % half
            headers = {"content-type": "application/json"}
            wrong = wrong_error(await client.post(path, content=body, headers=headers))
            assert wrong["code"] == "invalid_json"


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_usage_in_every_chunk(hermes: Tokenizer, path: str) -> None:
    """As in vLLM, each chunk has its choice's usage so far, and the last chunk has the total."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat() if path == CHAT else {"prompt": "abc"}
    body |= {"n": 2, "stream": True, "stream_options": options}
    async with open_harness(hermes, "Yes") as (_, client):
        response = await client.post(path, json=body)
        only = {**body, "stream_options": {"continuous_usage_stats": True}}
        plain = events(await client.post(path, json=only))
    *chunks, last, done = events(response)
    assert done == "[DONE]" and last["choices"] == []
    prompt = last["usage"]["prompt_tokens"]
    for index in (0, 1):
        mine = [each for each in chunks if each["choices"][0]["index"] == index]
        for each in mine if path == CHAT else ():
            checked(ChatCompletionChunk, each)
        taken = [each["usage"] for each in mine]
        counts = [each["completion_tokens"] for each in taken]
        assert counts == [0, 1, 2, 3, 4][-len(counts) :] and counts[-1] == 4
        assert all(each["prompt_tokens"] == prompt for each in taken)
        assert all(
            each["total_tokens"] == prompt + n for each, n in zip(taken, counts, strict=True)
        )
    assert last["usage"]["completion_tokens"] == 8
    assert not any("usage" in each for each in plain[:-1])


async def test_many_stop_strings(hermes: Tokenizer) -> None:
    stops = [f"stop {number}" for number in range(63)] + ["ö"]
    async with open_harness(hermes, "Hello wörld") as (_, client):
        message = message_of(await client.post(CHAT, json=chat(stop=stops)))
    assert message["content"] == "Hello w"
