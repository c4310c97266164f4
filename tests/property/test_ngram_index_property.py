"""Tests the index of n-grams against a search of the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import TokenId
from baton.engine.speculation.ngram_index import (
    MAX_CANDIDATES,
    MAX_MATCH_TOKENS,
    NGRAM_TOKENS,
    NgramIndex,
)


def naive_match(tokens: list[TokenId]) -> tuple[int | None, int]:
    """Return what :meth:`NgramIndex.search` must find, by comparing every place."""
    end = len(tokens)
    places = [
        place
        for place in range(NGRAM_TOKENS, end)
        if tokens[place - NGRAM_TOKENS : place] == tokens[end - NGRAM_TOKENS : end]
    ]
    best: tuple[int | None, int] = (None, 0)
    for place in places[::-1][:MAX_CANDIDATES]:
        length = 0
        while (
            length < min(place, MAX_MATCH_TOKENS)
            and tokens[place - length - 1] == tokens[end - length - 1]
        ):
            length += 1
        if length > best[1]:
            best = place, length
    return best


def naive_continuation(tokens: list[TokenId], place: int | None, count: int) -> list[TokenId]:
    """Copy token by token from ``place`` to the end, as LZ77 does."""
    text = list(tokens)
    for offset in range(count if place is not None else 0):
        assert place is not None
        text.append(text[place + offset])
    return text[len(tokens) :]


# Few different tokens, and repeated parts, so that there are many matches.
texts = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 2**21 - 1]), min_size=1, max_size=8).flatmap(
        lambda part: st.integers(1, 4).map(lambda times: part * times)
    ),
    max_size=16,
).map(lambda parts: [TokenId(token) for part in parts for token in part])


@settings(max_examples=400, deadline=None)
@given(prompt=texts, answer=texts, count=st.integers(0, 40))
def test_index_finds_what_a_search_of_the_whole_text_finds(
    prompt: list[TokenId], answer: list[TokenId], count: int
) -> None:
    index = NgramIndex()
    index.extend(prompt)
    index.search()
    assert (index.position, index.match_tokens) == naive_match(prompt)
    place, length = index.position, index.match_tokens
    for number, token in enumerate(answer):
        before = prompt + answer[:number]
        assert index.continuation(count) == tuple(naive_continuation(before, place, count))
        is_continued = place is not None and before[place] == token
        assert index.append(token) == is_continued
        if place is not None and is_continued:
            place, length = place + 1, min(length + 1, MAX_MATCH_TOKENS)
        else:
            place, length = naive_match([*before, token])
            index.search()
        assert (index.position, index.match_tokens) == (place, length)
    assert index.tokens == prompt + answer
