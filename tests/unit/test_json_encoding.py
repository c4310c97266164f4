"""Tests how values that come from clients are encoded as JSON."""

from typing import Any

import pytest

from router.http.json_encoding import encode_json


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ({"a": [1, -1.5, "ü", None, True]}, '{"a":[1,-1.5,"ü",null,true]}'),
        ([2**64 - 1, -(2**63)], "[18446744073709551615,-9223372036854775808]"),
        (
            {"ü": [2**64, 7, -(2**63) - 1]},
            '{"ü":[1.8446744073709552e+19,7,-9.223372036854776e+18]}',
        ),
        ([10**400, -(10**400), float("nan")], "[null,null,null]"),
    ],
)
def test_large_integers_become_floats(value: Any, encoded: str) -> None:
    assert encode_json(value) == encoded.encode()


@pytest.mark.parametrize("value", [{1, 2}, [object(), 2**64], ["\ud800", 2**64]])
def test_a_value_that_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        encode_json(value)
