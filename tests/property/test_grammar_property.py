"""Tests with random JSON schemas that complete outputs are valid, and that they don't depend on the
batch, the memory or a failover."""

import json
from typing import Any

import hypothesis.strategies as st
import jsonschema_rs
from hypothesis import given, settings

from baton.core.request import FinishReason
from tests.byte_grammars import EOS, byte_grammars, generate_all, grammar_request, schema

GRAMMARS = byte_grammars()

LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-1000, 1000),
        st.integers(0, 5000),
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, "ä"]}}]),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 3),
        st.integers(0, 6),
    ),
    st.sampled_from(["^[a-c]{1,3}$", "^(x|yz)?$", r"^\d{2}-\d$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.lists(
        st.one_of(st.text(max_size=5), st.integers(-5, 5), st.none()), min_size=1, max_size=5
    ).map(lambda values: {"enum": values}),
)


def _objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4)
    properties = st.dictionaries(names, values, min_size=1, max_size=3)
    return st.builds(
        lambda names, all_: {
            "type": "object",
            "properties": names,
            "required": list(names) if all_ else list(names)[:1],
            "additionalProperties": False,
        },
        properties,
        st.booleans(),
    )


def _lists(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, low, size: {
            "type": "array", "items": items, "minItems": low, "maxItems": low + size
        },
        values,
        st.integers(0, 2),
        st.integers(0, 2),
    )  # fmt: skip


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _lists(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=6,
)


@settings(max_examples=20)
@given(SCHEMAS, st.integers(0, 2**32), st.data())
def test_complete_outputs_are_valid_and_independent_of_batch_and_failover(
    json_schema: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    grammar = schema(json_schema)
    specs = [grammar_request(f"r{n}", grammar, seed + n, max_tokens=300) for n in range(4)]
    together = generate_all(GRAMMARS, specs)
    with_few_blocks = generate_all(GRAMMARS, specs, num_blocks=130)
    assert with_few_blocks == together
    is_valid = jsonschema_rs.validator_for(json_schema).is_valid
    for text, reason in together.values():
        if reason is FinishReason.STOP:
            assert is_valid(json.loads(text)), text
        else:
            assert reason is FinishReason.LENGTH and len(text) == 300
    text, reason = together["r0"]
    assert generate_all(GRAMMARS, specs[:1]) == {"r0": (text, reason)}
    cut = data.draw(st.integers(0, min(len(text), 299)))
    rest = grammar_request("r0", grammar, seed, max_tokens=300, generated=text[:cut])
    assert generate_all(GRAMMARS, [rest]) == {"r0": (text[cut:], reason)}


def test_an_output_continues_the_same_after_a_failover_at_any_token() -> None:
    json_schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer"}},
        "required": ["name"],
    }
    whole = grammar_request("r", schema(json_schema), 5, max_tokens=80)
    text, reason = generate_all(GRAMMARS, [whole])["r"]
    for cut in range(min(len(text) + 1, 80)):
        rest = grammar_request("r", schema(json_schema), 5, max_tokens=80, generated=text[:cut])
        assert EOS not in text
        assert generate_all(GRAMMARS, [rest]) == {"r": (text[cut:], reason)}
