"""Tests structured output and prompt logprobs in a real cluster."""

import json

import jsonschema_rs
import openai
import pytest

from testkit.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(300)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["function", "class"]},
        "arguments": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
    },
    "required": ["name", "kind", "arguments"],
    "additionalProperties": False,
}
PROMPT = "def parse(text):\n    return text.split()\n" * 12


def test_structured_output_equals_that_of_baton_generate_across_a_kv_transfer(
    cluster: LocalCluster,
) -> None:
    done = cluster.baton("generate", "--prompt", PROMPT, "--max-tokens", "200", "--json",
                         "--temperature", "0", "--json-schema", json.dumps(SCHEMA))  # fmt: skip
    alone = json.loads(done.stdout)
    shape = {"type": "json_schema", "json_schema": {"name": "code", "schema": SCHEMA}}
    body, headers = cluster.post_with_headers(
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "return_token_ids": True,
         "response_format": shape},
    )  # fmt: skip
    choice = body["choices"][0]
    assert headers["x-baton-prefill"] != headers["x-baton-decode"]
    assert choice["token_ids"] == alone["token_ids"]
    assert choice["text"] == alone["text"]
    assert choice["finish_reason"] == alone["finish_reason"] == "stop"
    assert jsonschema_rs.validator_for(SCHEMA).is_valid(json.loads(choice["text"]))


def test_structured_output_with_the_openai_client(cluster: LocalCluster) -> None:
    client = openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Describe a function."}]
    shape = {"type": "json_schema", "json_schema": {"name": "code", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages,
        max_tokens=300,
        seed=3,
        response_format=shape,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert jsonschema_rs.validator_for(SCHEMA).is_valid(
        json.loads(answer.choices[0].message.content)
    )
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.completions.create(
            model="demo", prompt="x", extra_body={"guided_json": {"type": "array",
                                                                  "uniqueItems": True}}
        )  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="it allows no first token"):
        client.completions.create(
            model="demo", prompt="x", extra_body={"guided_json": {"$ref": "#"}}
        )
    client.close()


def test_prompt_logprobs_are_the_same_with_and_without_a_kv_transfer(cluster: LocalCluster) -> None:
    scored = []
    for max_tokens in (0, 3):
        body = cluster.post(
            "/v1/completions",
            {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "echo": True,
             "ignore_eos": True, "logprobs": 1},
        )  # fmt: skip
        choice, usage = body["choices"][0], body["usage"]
        assert usage["completion_tokens"] == max_tokens
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        count = usage["prompt_tokens"]
        assert len(logprobs["token_logprobs"]) == count + max_tokens
        assert logprobs["token_logprobs"][0] is None
        offsets = logprobs["text_offset"][:count]
        pieces = zip(offsets, [*offsets[1:], len(PROMPT)], strict=True)
        assert [PROMPT[a:b] for a, b in pieces] == logprobs["tokens"][:count]
        scored.append(logprobs["token_logprobs"][1:count])
    assert scored[0] == pytest.approx(scored[1], abs=1e-4)
