"""What becomes of a request on its way through a message."""

from dataclasses import replace
from typing import Any

import pytest

from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.priority import Priority
from baton.core.request import RequestOutput, RequestSpec, SamplingParams, TokenLogprob
from baton.errors import Invalid
from baton.rpc.convert import (
    output_from_proto,
    output_to_proto,
    spec_from_proto,
    spec_to_proto,
)

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")

SPEC = RequestSpec(
    RequestId("r"),
    Epoch(2),
    (TokenId(5), TokenId(6)),
    1,
    SamplingParams(max_tokens=3),
    tenant_salt=b"salt",
    first_token_seconds=2.5,
    tenant=b"tag",
    priority=Priority.BATCH,
    weight=2.5,
    trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
)


def test_a_request_comes_out_as_it_went_in() -> None:
    assert spec_from_proto(spec_to_proto(SPEC)) == SPEC
    without = replace(SPEC, first_token_seconds=0.0, trace="")
    assert spec_from_proto(spec_to_proto(without)) == without


@pytest.mark.parametrize("seconds", [-0.1, float("inf"), float("nan")])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(Invalid, match="first_token_seconds must be at least 0") as refusal:
        spec_from_proto(spec_to_proto(replace(SPEC, first_token_seconds=seconds)))
    assert refusal.value.param == "first_token_seconds"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [({"tenant": b"t" * 17}, "tenant"), ({"priority": 3}, "priority"), ({"weight": -1}, "weight")],
)
def test_a_standing_that_cannot_be_is_refused(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(Invalid) as refusal:
        spec_from_proto(spec_to_proto(replace(SPEC, **wrong)))
    assert refusal.value.param == param


@pytest.mark.parametrize("kind", GrammarKind)
def test_a_grammar_comes_out_as_it_went_in(kind: GrammarKind) -> None:
    sampling = SamplingParams(max_tokens=3, grammar=Grammar(kind, "text"), prompt_logprobs=0,
                              min_tokens=2)  # fmt: skip
    spec = replace(SPEC, sampling=sampling)
    assert spec_from_proto(spec_to_proto(spec)) == spec


def test_a_grammar_of_an_unknown_kind_is_refused() -> None:
    message = spec_to_proto(replace(SPEC, sampling=SamplingParams(3, grammar=GRAMMAR)))
    message.sampling.grammar.kind = 99  # type: ignore[assignment]
    with pytest.raises(Invalid, match="unknown kind of grammar 99"):
        spec_from_proto(message)


def test_logprobs_of_a_prompt_come_out_as_they_went_in() -> None:
    entries = (TokenLogprob(TokenId(6), -0.5, ((TokenId(7), -0.25),)), TokenLogprob(TokenId(8), -1))
    output = RequestOutput(RequestId("r"), Epoch(1), 0, (TokenId(9),), prompt_logprobs=entries)
    assert output_from_proto(output_to_proto(output)) == output
