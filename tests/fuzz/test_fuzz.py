"""Runs each fuzzer for a second with one seed; `make fuzz` runs them longer, with other seeds."""

import pytest

from tests.fuzz.__main__ import Fuzzer, find_fuzzers

SEED = 18
SECONDS = 1.0


@pytest.mark.parametrize("fuzzer", find_fuzzers(), ids=lambda fuzzer: fuzzer.name)
def test_fuzzing_finds_no_crash_hang_or_server_error(fuzzer: Fuzzer) -> None:
    print(f"seed {SEED}")
    result = fuzzer.fuzz(SECONDS, SEED)
    assert result.cases > 0
    assert result.is_clean, "\n".join(result.examples)
