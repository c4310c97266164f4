"""Tests the recorded outputs of the conformance suite ``canitoolcall``: what is not read as the
suite expects is listed here, with the reason."""

from pathlib import Path
from typing import get_args

import pytest
from canitoolcall.fixtures import Fixture
from canitoolcall.results import Status

from baton.config.router_settings import RouterSettings
from router.serving.parsers.model_output_format import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ModelOutputFormat,
)
from tests.tool_formats import check, fixtures, is_cut, parse
from tests.unit.small_chats import load_tokenizer

STREAMED_BEFORE_CUT = frozenset(
    {
        "deepseek/v3-truncated-mid-arguments",
        "deepseek/v31-truncated-mid-arguments",
        "deepseek/v32-truncated-mid-arguments",
        "deepseek/v4-truncated-mid-arguments",
        "deepseek/v41-truncated-mid-arguments",
        "gemma4/truncated-before-close",
        "gemma4/truncated-mid-string",
        "gemma4/truncated-second-parallel-call",
        "glm/glm45-truncated-after-arg-key",
        "glm/glm47-truncated-before-close-call",
        "glm/glm47-truncated-inside-arg-value",
        "gpt-oss/harmony-truncated-in-arguments",
        "kimi/k26-truncated-inside-arguments",
        "kimi/k3-truncated-inside-argument",
        "llama/l3-truncated-inside-parameters",
        "mistral/v13think-truncated-in-arguments",
        "qwen3-hermes/bug-sglang-30480-truncated-mid-arguments",
        "qwen3-hermes/truncated-mid-arguments-no-thinking",
        "qwen3-hermes/truncated-mid-arguments-thinking",
        "qwen3-hermes/truncated-second-parallel-call",
        "qwen3-hermes/vllm-invalid-json-missing-brace",
        "qwen3-xml/q38-truncated-in-parameter",
    }
)
"""A call that is cut off has been streamed by then, and stays invalid JSON. The suite expects that
a stream has no such call either. A whole answer does not have it."""

OTHERWISE = {
    # Its arguments have been streamed before they turn out to be malformed.
    "deepseek/vllm-v3-malformed-missing-brace": "the call is malformed",
    # The suite expects no call, although the list's first call is complete.
    "llama/l4-truncated-missing-close-bracket": "the list is cut off after a call",
}


@pytest.mark.parametrize("fixture", fixtures(), ids=lambda fixture: fixture.id)
def test_recorded_output_is_read(fixture: Fixture) -> None:
    status, reason = check(fixture)
    is_read = status in (Status.PASS, Status.SOFT_PASS)
    assert is_read is (fixture.id not in STREAMED_BEFORE_CUT | OTHERWISE.keys()), reason


def test_whole_answers_have_no_calls_that_are_cut_off() -> None:
    found = [fixture for fixture in fixtures() if fixture.id in STREAMED_BEFORE_CUT]
    assert len(found) == len(STREAMED_BEFORE_CUT)
    for fixture in found:
        expected = fixture.expected.tool_calls if fixture.expected is not None else ()
        parsed = parse(fixture, [fixture.raw_output], is_whole=True)
        assert [call.name for call in parsed.tool_calls] == [call.name for call in expected]


def test_most_of_the_suite_is_whole() -> None:
    assert sum(map(is_cut, fixtures())) == 51 and len(fixtures()) == 469


def test_every_format_can_be_chosen() -> None:
    for field, names in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        choices = get_args(RouterSettings.model_fields[field].annotation)
        assert set(choices) == {"auto", "none", *names}


SIGNS = {
    # text that the family's chat template has, and tokens of its vocabulary
    "harmony": ("<|start|>assistant<|channel|>final<|message|>", ()),
    "kimi_k3": ("<|open|>message", ("<|close|>", "<|sep|>")),
    "kimi_k2": ("<|tool_calls_section_begin|>", ()),
    "deepseek_v41": ("<｜DSML｜ calls>", ()),
    "deepseek_v4": ("<｜DSML｜tool_calls>", ()),
    "deepseek_v32": ("<｜DSML｜function_calls>", ()),
    "deepseek_v3": ("function<｜tool▁sep｜>{{ name }}\n```json", ()),
    "deepseek_v31": ("{{ name }}<｜tool▁sep｜>{{ arguments }}", ()),
    "minimax_m2": ("<minimax:tool_call>", ()),
    "seed_oss": ("<seed:tool_call><function=", ()),
    "gemma4": ("<|tool_call>call:{{ name }}<tool_call|>", ()),
    "command": ("<|START_ACTION|>", ()),
    "phi4_mini": ("<|tool_call|>", ()),
    "lfm2": ("<|tool_call_start|>", ()),
    "nemotron": ("<TOOLCALL>", ()),
    "hunyuan": ("<tool_calls>", ()),
    "glm45": ("<tool_call>{{ name }}\n<arg_key>k</arg_key>\n<arg_value>", ()),
    "glm47": ("<tool_call>{{ name }}<arg_key>k</arg_key><arg_value>", ()),
    "qwen3_xml": ("<tool_call>\n<function=", ()),
    "hermes": ("<tool_call>", ()),
    "mistral": ("[TOOL_CALLS]", ("[ARGS]",)),
    "mistral_v3": ("[TOOL_CALLS]", ()),
    "pythonic": ("[func_name1(params)]", ()),
    "llama3": ('<|start_header_id|> "parameters"', ()),
    "json": ("tools", ()),
}


@pytest.mark.parametrize("name", SIGNS)
def test_format_is_detected(tmp_path: Path, name: str) -> None:
    template, tokens = SIGNS[name]
    tokenizer = load_tokenizer(tmp_path, "{# " + template + " #}{{ messages[0].content }}")
    known = dict.fromkeys(tokens, 5)
    tokenizer.token_id = known.get  # type: ignore[method-assign]
    assert ModelOutputFormat.detect(tokenizer).names["tool_format"] == name
