"""What becomes of a request on its way through a message."""

from dataclasses import replace

import pytest

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.errors import Invalid
from baton.rpc.convert import spec_from_proto, spec_to_proto

SPEC = RequestSpec(
    RequestId("r"),
    Epoch(2),
    (TokenId(5), TokenId(6)),
    1,
    SamplingParams(max_tokens=3),
    tenant_salt=b"salt",
    first_token_seconds=2.5,
)


def test_a_request_comes_out_as_it_went_in() -> None:
    assert spec_from_proto(spec_to_proto(SPEC)) == SPEC
    without = replace(SPEC, first_token_seconds=0.0)
    assert spec_from_proto(spec_to_proto(without)) == without


@pytest.mark.parametrize("seconds", [-0.1, float("inf"), float("nan")])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(Invalid, match="first_token_seconds must be at least 0") as refusal:
        spec_from_proto(spec_to_proto(replace(SPEC, first_token_seconds=seconds)))
    assert refusal.value.param == "first_token_seconds"
