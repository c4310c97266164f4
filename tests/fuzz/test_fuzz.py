"""Each fuzzer for a moment, with one seed: `make fuzz` runs them longer, with others."""

import pytest

from tools.fuzz import Fuzzer, find_fuzzers

SEED = 18
SECONDS = 1.0


@pytest.mark.parametrize("fuzzer", find_fuzzers(), ids=lambda fuzzer: fuzzer.name)
def test_nothing_crashes_hangs_or_fails(fuzzer: Fuzzer) -> None:
    print(f"seed {SEED}")
    result = fuzzer.fuzz(SECONDS, SEED)
    assert result.cases > 0
    assert result.is_clean, "\n".join(result.examples)
