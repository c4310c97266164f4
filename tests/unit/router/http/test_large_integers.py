"""Tests that integers of more than 64 bits in a body become floats."""

import pytest

from router.errors import ApiError
from router.http.large_integers import round_large_integers


@pytest.mark.parametrize(
    ("data", "rounded"),
    [
        (
            '{"ü": [18446744073709551616, 7, -9223372036854775809]}',
            '{"ü":[1.8446744073709552e+19,7,-9.223372036854776e+18]}',
        ),
        (
            "[18446744073709551615, -9223372036854775808]",
            "[18446744073709551615,-9223372036854775808]",
        ),
        ('{"a": "18446744073709551616"}', '{"a":"18446744073709551616"}'),
        ("[1234567890123456789.5e3]", "[1.2345678901234568e+21]"),
    ],
)
def test_large_integers_become_floats(data: str, rounded: str) -> None:
    assert round_large_integers(data.encode()).decode() == rounded


@pytest.mark.parametrize("data", ['{"a": [1, -1.5, "ü", null, 123456789012345678]} ', "[", ""])
def test_other_bodies_stay_as_they_are(data: str) -> None:
    assert round_large_integers(data.encode()) == data.encode()


def test_a_deeply_nested_body_stays_as_it_is() -> None:
    data = b"[" * 500 + b" 18446744073709551616" + b"]" * 500
    assert round_large_integers(data) == data


@pytest.mark.parametrize("data", [b"[ 1" + b"0" * 400 + b"]", b"[ 18446744073709551616, NaN]"])
def test_a_number_that_no_float_holds_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError, match="not JSON"):
        round_large_integers(data)
