"""Tests that long prompts share the integers of their token ids."""

import tracemalloc

import pytest

from baton.text.shared_token_ids import MIN_SHARED_TOKENS, share_token_ids

VOCAB_SIZE = 50_000


def long_prompt(first: int) -> list[int]:
    return [int(str(first + index % 1000)) for index in range(MIN_SHARED_TOKENS)]


def test_long_prompts_share_integers() -> None:
    one = share_token_ids(long_prompt(1000), VOCAB_SIZE)
    other = share_token_ids(long_prompt(1000), VOCAB_SIZE)
    assert one == other == tuple(long_prompt(1000))
    assert all(a is b for a, b in zip(one, other, strict=True))


def test_a_long_prompt_takes_8_bytes_a_token() -> None:
    share_token_ids(long_prompt(1000), VOCAB_SIZE)  # the shared integers
    tracemalloc.start()
    try:
        shared = share_token_ids(long_prompt(1000), VOCAB_SIZE)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size <= 8 * len(shared) + 1024


@pytest.mark.parametrize(
    "ids", [[], [1000], [5000] * (MIN_SHARED_TOKENS - 1), [VOCAB_SIZE] * MIN_SHARED_TOKENS]
)
def test_other_prompts_are_kept_as_they_are(ids: list[int]) -> None:
    assert share_token_ids(ids, VOCAB_SIZE) == tuple(ids)
