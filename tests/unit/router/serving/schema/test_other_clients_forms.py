"""Tests the forms of requests that other servers take, and that clients therefore send: fields
under other names, values that mean none, parts of messages, and paths."""

from dataclasses import dataclass
from typing import Any

import pytest

from baton.text.tokenizer import Tokenizer
from router.serving.context import RouterIds
from tests import router_harness
from tests.anthropic_harness import MESSAGES, error_of, message_of
from tests.router_harness import (
    CHAT,
    COMPLETE,
    RESPOND,
    RouterHarness,
    chat,
    open_harness,
    wrong_error,
)
from tests.unit.small_chats import load_tokenizer

tokenizer = router_harness.tokenizer


@dataclass(frozen=True)
class Api:
    path: str
    body: dict[str, Any]


APIS = {
    "chat": Api(CHAT, chat()),
    "completions": Api(COMPLETE, {"prompt": "x"}),
    "responses": Api(RESPOND, {"input": "x", "store": False}),
    "messages": Api(MESSAGES, chat(max_tokens=9)),
}
OPENAI = ("chat", "completions", "responses")


async def sent(router: RouterHarness, client: Any, api: str, **fields: Any) -> tuple[Any, Any]:
    """Send a request with these fields; return the response and the sampling parameters that
    reached the worker."""
    body = {**APIS[api].body, **fields}
    response = await client.post(APIS[api].path, json=body)
    assert response.status_code == 200, response.text
    return response, router.prefill.submitted[-1].spec.sampling


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", OPENAI)
async def test_seed_minus_one_is_a_random_seed(tokenizer: Tokenizer, api: str) -> None:
    seeds = iter((5, 9, 12))
    async with open_harness(tokenizer) as (router, client):
        router.service.ids = RouterIds(router.service.ids.new_id, lambda: next(seeds))
        found = [(await sent(router, client, api, seed=seed))[1].seed for seed in (-1, -1, -2)]
    assert found == [5, 9, 2**64 - 2]


@pytest.mark.parametrize("api", APIS)
async def test_top_p_zero_is_greedy(tokenizer: Tokenizer, api: str) -> None:
    async with open_harness(tokenizer) as (router, client):
        response, sampling = await sent(router, client, api, top_p=0, temperature=0.75)
        assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)
    if api == "responses":
        assert (response.json()["temperature"], response.json()["top_p"]) == (0.75, 0.0)


@pytest.mark.parametrize(("api", "text"), [("chat", "abcd"), ("completions", "abcd")])
@pytest.mark.parametrize("stop", ["", [""], ["", "c", ""]])
async def test_empty_stop_strings_are_left_out(
    tokenizer: Tokenizer, api: str, text: str, stop: Any
) -> None:
    async with open_harness(tokenizer, text) as (_, client):
        body = {**APIS[api].body, "stop": stop}
        [choice] = (await client.post(APIS[api].path, json=body)).json()["choices"]
    answer = choice["message"]["content"] if api == "chat" else choice["text"]
    assert answer == ("ab" if "c" in stop else text)


async def test_empty_stop_sequences_of_messages_are_left_out(tokenizer: Tokenizer) -> None:
    body = {**APIS["messages"].body, "stop_sequences": ["", "c"]}
    async with open_harness(tokenizer, "abcd") as (_, client):
        message = message_of(await client.post(MESSAGES, json=body))
    assert (message["content"], message["stop_sequence"]) == ([{"type": "text", "text": "ab"}], "c")


@pytest.mark.parametrize("api", APIS)
async def test_token_ids_may_be_written_as_strings(tokenizer: Tokenizer, api: str) -> None:
    async with open_harness(tokenizer) as (router, client):
        _, sampling = await sent(router, client, api, stop_token_ids=["5", 6])
        assert sampling.stop_token_ids == (5, 6)
        for wrong in (["five"], ["-5"], ["5.0"], ["٥"], ["1" * 10]):
            body = {**APIS[api].body, "stop_token_ids": wrong}
            refused = await client.post(APIS[api].path, json=body)
            assert refused.status_code == 400
            assert "stop_token_ids" in refused.json()["error"]["message"]


async def test_allowed_token_ids_may_be_written_as_strings(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        _, written = await sent(router, client, "chat", allowed_token_ids=["72", "257"])
        _, plain = await sent(router, client, "chat", allowed_token_ids=[72, 257])
    assert written.grammar == plain.grammar is not None


async def test_messages_have_the_fields_of_load_generators(tokenizer: Tokenizer) -> None:
    """The model writes "Hi" and its EOS: three tokens."""
    async with open_harness(tokenizer, "Hi") as (router, client):
        fields = {"ignore_eos": True, "min_tokens": 4.0}
        response, sampling = await sent(router, client, "messages", **fields)
        stopped, _ = await sent(router, client, "messages", stop_token_ids=[ord("H")])
        plain, _ = await sent(router, client, "messages")
        above = {**APIS["messages"].body, "min_tokens": 10}
        refused = error_of(await client.post(MESSAGES, json=above))
    assert (sampling.ignore_eos, sampling.min_tokens) == (True, 4)
    assert message_of(response)["usage"]["output_tokens"] == 9
    assert message_of(response)["stop_reason"] == "max_tokens"
    assert message_of(stopped)["usage"]["output_tokens"] == 1
    assert message_of(stopped)["stop_reason"] == "end_turn"
    assert message_of(plain)["usage"]["output_tokens"] == 3
    assert refused["message"] == "min_tokens is 10, above max_tokens, which is 9"


# -- fields under other names ---------------------------------------------------------------------


@pytest.mark.parametrize("api", OPENAI)
async def test_repeat_penalty_is_the_repetition_penalty(tokenizer: Tokenizer, api: str) -> None:
    async with open_harness(tokenizer) as (router, client):
        response, sampling = await sent(router, client, api, repeat_penalty=1.1, repeat_last_n=-1)
        assert sampling.repetition_penalty == 1.1
        assert response.headers["x-baton-ignored-fields"] == "repeat_last_n"
        _, both = await sent(router, client, api, repeat_penalty=1.1, repetition_penalty=1.1)
        assert both.repetition_penalty == 1.1
        body = {**APIS[api].body, "repeat_penalty": 1.1, "repetition_penalty": 1.2}
        error = wrong_error(await client.post(APIS[api].path, json=body))
    assert error["param"] == "repeat_penalty"
    assert error["message"] == "repeat_penalty and repetition_penalty differ; give only one of them"


OPEN_WEBUI = {
    "stream_response": True, "seed": 0, "stop": ["<end>"], "temperature": 0.8, "max_tokens": 9,
    "top_k": 40, "top_p": 0.9, "min_p": 0.0, "frequency_penalty": 1.1, "presence_penalty": 0.0,
    "repeat_penalty": 1.1, "repeat_last_n": 64, "mirostat": 0, "mirostat_eta": 0.1,
    "mirostat_tau": 5.0, "tfs_z": 1, "num_ctx": 2048, "num_keep": 24, "num_batch": 512,
    "num_thread": 2, "num_gpu": 0, "use_mmap": True, "use_mlock": False, "think": False,
    "keep_alive": "5m",
}  # fmt: skip
"""The advanced parameters of Open WebUI, most of which are Ollama's."""


async def test_advanced_parameters_of_open_webui_are_taken(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        response, sampling = await sent(router, client, "chat", **OPEN_WEBUI)
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_tokens) == (1.1, 0, 9)
    ignored = response.headers["x-baton-ignored-fields"].split(", ")
    assert ignored[-1] == "think" and "repeat_penalty" not in ignored


SWITCHED = "{% if SWITCH is defined %}[{{ SWITCH }}]{% endif %}{{ messages[-1].content }}"


@pytest.fixture(scope="module", params=["enable_thinking", "thinking"])
def switched(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose template prints the variable that switches reasoning."""
    template = SWITCHED.replace("SWITCH", request.param)
    return load_tokenizer(tmp_path_factory.mktemp("switched"), template)


def prompt_of(router: RouterHarness) -> str:
    return bytes(router.prefill.submitted[-1].spec.token_ids).decode()


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"thinking": {"type": "disabled"}}, "[False]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "[True]"),
        ({"enable_thinking": False}, "[False]"),
        ({"enable_thinking": True, "think": True}, "[True]"),
        ({"think": False}, "[False]"),
        ({"think": None, "thinking": None}, ""),
        ({}, ""),
    ],
)
async def test_thinking_is_switched_by_the_templates_variable(
    switched: Tokenizer, api: str, fields: dict[str, Any], prompt: str
) -> None:
    async with open_harness(switched) as (router, client):
        response, _ = await sent(router, client, api, **fields)
    text = "Hi" if api == "chat" else "x"
    assert prompt_of(router) == prompt + text
    assert "x-baton-ignored-fields" not in response.headers


async def test_chat_template_kwargs_take_precedence(switched: Tokenizer) -> None:
    variables = {"enable_thinking": True, "thinking": True}
    async with open_harness(switched) as (router, client):
        await sent(router, client, "chat", enable_thinking=False, chat_template_kwargs=variables)
    assert prompt_of(router) == "[True]Hi"


async def test_one_variable_among_the_kwargs_is_enough(tmp_path: Any) -> None:
    both = "[{{ enable_thinking is defined }} {{ thinking }}]{{ messages[-1].content }}"
    async with open_harness(load_tokenizer(tmp_path, both)) as (router, client):
        variables = {"thinking": True}
        await sent(router, client, "chat", think=False, chat_template_kwargs=variables)
    assert prompt_of(router) == "[False True]Hi"


async def test_switch_without_a_variable_is_named(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        for fields in ({"think": False}, {"thinking": {"type": "disabled"}}):
            response, _ = await sent(router, client, "chat", **fields)
            assert response.headers["x-baton-ignored-fields"] == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"enable_thinking": True, "think": False}, "think",
         "enable_thinking and think differ; give only one of them"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning",
         "reasoning.effort and reasoning_effort differ; give only one of them"),
        ({"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens",
         "reasoning.max_tokens is not supported: max_tokens limits the reasoning and the answer "
         "together"),
        ({"thinking": {"type": "auto"}}, "thinking.type",
         "thinking.type: Input should be 'enabled' or 'disabled'"),
    ],
)  # fmt: skip
async def test_fields_without_an_exact_meaning_are_refused(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str, message: str
) -> None:
    async with open_harness(tokenizer) as (_, client):
        error = wrong_error(await client.post(CHAT, json=chat(**fields)))
    assert (error["param"], error["message"]) == (param, message)


async def test_reasoning_effort_may_be_in_an_object(tmp_path: Any) -> None:
    template = SWITCHED.replace("SWITCH", "reasoning_effort")
    tokenizer = load_tokenizer(tmp_path, template)
    async with open_harness(tokenizer) as (router, client):
        for fields in (
            {"reasoning": {"effort": "low"}},
            {"reasoning": {"effort": "low"}, "reasoning_effort": "low"},
        ):
            await sent(router, client, "chat", **fields)
            assert prompt_of(router) == "[low]Hi"
        for fields in ({"reasoning": {}}, {"reasoning": None}):
            await sent(router, client, "chat", **fields)
            assert prompt_of(router) == "Hi"


async def test_completions_say_that_these_are_fields_of_chats(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        for name in ("enable_thinking", "think", "thinking", "reasoning"):
            body = {"prompt": "x", name: {"effort": "low"}}
            error = wrong_error(await client.post(COMPLETE, json=body))
            assert error["message"] == f"{name} is not supported: it is a field of chats"


# -- parts of messages ----------------------------------------------------------------------------

PARTS = [
    {"type": "input_text", "text": "a"},
    "b",
    {"type": "text", "text": "c"},
    {"type": "output_text", "text": "d"},
]


async def test_parts_of_other_apis_are_text(tokenizer: Tokenizer) -> None:
    message = {"role": "user", "content": PARTS}
    async with open_harness(tokenizer) as (router, client):
        await sent(router, client, "chat", messages=[message])
        assert "<|im_start|>user\nabcd<|im_end|>" in router_prompt(router, tokenizer)
        await sent(router, client, "responses", input=[message])
        assert "<|im_start|>user\nabcd<|im_end|>" in router_prompt(router, tokenizer)
        await sent(router, client, "messages", messages=[message])
        paragraphs = "<|im_start|>user\na\n\nb\n\nc\n\nd<|im_end|>"
        assert paragraphs in router_prompt(router, tokenizer)


def router_prompt(router: RouterHarness, tokenizer: Tokenizer) -> str:
    ids = router.prefill.submitted[-1].spec.token_ids
    return tokenizer.decode(ids, skip_special_tokens=False)


async def test_breakpoint_after_a_plain_string_is_at_its_place() -> None:
    from router.serving.schema.message import find_breakpoints

    part = {"type": "input_text", "text": "cd", "cache_control": {"type": "ephemeral"}}
    assert find_breakpoints({"content": ["ab", part, "e"]}) == ((4, 300.0),)


async def test_stored_input_has_the_type_of_its_role(tokenizer: Tokenizer) -> None:
    items = [
        {"role": "user", "content": ["a"]},
        {"role": "assistant", "content": ["b"]},
        {"role": "user", "content": ["c"]},
    ]
    async with open_harness(tokenizer, stores_responses=True) as (_, client):
        created = (await client.post(RESPOND, json={"input": items})).json()
        url = f"{RESPOND}/{created['id']}/input_items?order=asc"
        listed = (await client.get(url)).json()["data"]
    assert [each["content"] for each in listed] == [
        [{"type": "input_text", "text": "a"}],
        [{"type": "output_text", "text": "b", "annotations": []}],
        [{"type": "input_text", "text": "c"}],
    ]


async def test_other_parts_are_refused(tokenizer: Tokenizer) -> None:
    body = chat(messages=[{"role": "user", "content": [{"type": "input_image"}]}])
    async with open_harness(tokenizer) as (_, client):
        refused = wrong_error(await client.post(CHAT, json=body))
        number = wrong_error(
            await client.post(CHAT, json=chat(messages=[{"role": "user", "content": [1]}]))
        )
    assert "content of type 'input_image' is not supported, only text; images" in refused["message"]
    assert "a content part must be a string, or an object with a type" in number["message"]


# -- JSON, paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "half", ["\\ud83d", "\\ud83d b", "\\ud83d\\n", "\\ude00", "\\ud83d\\u0041"]
)
async def test_half_of_a_surrogate_pair_is_named(tokenizer: Tokenizer, half: str) -> None:
    async with open_harness(tokenizer) as (_, client):
        for path in (CHAT, COMPLETE, RESPOND, MESSAGES):
            body = f'{{"model": "{half}"}}'
            error = (await client.post(path, content=body)).json()["error"]
            begin = (
                "the body is not JSON: a string has half of a surrogate pair (\\ud83d, for example"
            )
            assert error["message"].startswith(begin), error
        large = f'{{"model": "{half}", "n": {2**70}}}'
        error = wrong_error(await client.post(RESPOND, content=large))
        assert "half of a surrogate pair" in error["message"]
        truncated = wrong_error(await client.post(CHAT, content='{"model": "\\u12'))
        assert "surrogate" not in truncated["message"]


async def test_models_with_a_slash_at_the_end_is_the_list(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        plain, slash = await client.get("/v1/models"), await client.get("/v1/models/")
    assert (slash.status_code, slash.json()) == (200, plain.json())


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/completions", "/v1/completions"),
        ("POST", "/responses", "/v1/responses"),
        ("POST", "/messages", "/v1/messages"),
        ("POST", "/messages/count_tokens", "/v1/messages/count_tokens"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/models/demo", "/v1/models/demo"),
        ("POST", "/v1/v1/messages", "/v1/messages"),
        ("POST", "/v1/tokenize", "/tokenize"),
    ],
)
async def test_wrong_base_url_is_named(
    tokenizer: Tokenizer, method: str, path: str, meant: str
) -> None:
    async with open_harness(tokenizer) as (_, client):
        error = wrong_error(await client.request(method, path, json={}), 404)
    reason = "has one /v1 too many" if path.startswith("/v1") else "begins with /v1"
    assert error["message"] == (
        f"Unknown route: {method} {path}; the path {reason}: {meant}; GET /openapi.json lists all "
        "routes"
    )


async def test_other_unknown_paths_have_no_hint(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        for path in ("/api/chat", "/v1/nothing", "/chat"):
            error = wrong_error(await client.post(path, json={}), 404)
            assert error["message"] == (
                f"Unknown route: POST {path}; GET /openapi.json lists all routes"
            )


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
async def test_reset_of_the_prefix_cache_is_refused_to_admins_with_the_reason(
    tokenizer: Tokenizer, path: str
) -> None:
    keys = {"api_keys": {"key": "tenant"}, "admin_key": "root"}
    async with open_harness(tokenizer, **keys) as (_, client):
        of_tenant = await client.post(path, headers={"authorization": "Bearer key"})
        of_admin = await client.post(path, headers={"authorization": "Bearer root"})
    assert of_tenant.status_code == 401
    error = wrong_error(of_admin, 501)
    assert error["code"] == "unsupported_endpoint"
    assert "send another cache_salt" in error["message"]
