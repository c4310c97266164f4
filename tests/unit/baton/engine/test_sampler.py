"""Tests sampling against a plain implementation in NumPy, with exact tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.philox import uniform
from baton.core.request import SamplingParams
from baton.engine.plan import Row
from baton.engine.sampler import _filtered, sample

VOCAB = 40
SEED = 20261121
PLAIN = SamplingParams(max_tokens=1)
CASES = {
    "temperature": replace(PLAIN, temperature=0.7),
    "hot": replace(PLAIN, temperature=3.0),
    "top_k": replace(PLAIN, top_k=3),
    "top_k of one": replace(PLAIN, top_k=1),
    "top_k beyond the vocabulary": replace(PLAIN, top_k=10 * VOCAB),
    "top_p": replace(PLAIN, top_p=0.6),
    "tiny top_p": replace(PLAIN, top_p=1e-9),
    "min_p": replace(PLAIN, min_p=0.2),
    "all filters": replace(PLAIN, top_k=9, top_p=0.8, min_p=0.05, temperature=1.4),
    "repetition": replace(PLAIN, repetition_penalty=1.5),
    "presence": replace(PLAIN, presence_penalty=1.5),
    "frequency": replace(PLAIN, frequency_penalty=-0.7),
    "bias": replace(PLAIN, logit_bias=((TokenId(3), 2.5), (TokenId(4), -100.0))),
    "greedy with penalties": replace(PLAIN, temperature=0.0, frequency_penalty=2.0),
}
HISTORY = [1, 5, 5, 7, 7, 7, 30]
NUM_PROMPT = 3


def row(params: SamplingParams, position: int = len(HISTORY)) -> Row:
    history = tuple(TokenId(token) for token in HISTORY) if params.needs_history else ()
    return Row(
        RequestId("r"), (TokenId(0),), position - 1, (BlockId(0),) * 100, True, params,
        history, NUM_PROMPT if history else 0,
    )  # fmt: skip


def rows_of_all_kinds() -> list[Row]:
    """Return five rows: with a mask, with a mask that allows nothing, with suppressed tokens, with
    logprobs, and with both a bias and logprobs."""
    greedy = replace(PLAIN, temperature=0.0)
    return [
        replace(row(PLAIN), mask=lambda: bits_of([4, 9])),
        replace(row(PLAIN), mask=lambda: b""),
        replace(row(greedy), suppressed_token_ids=(TokenId(3), TokenId(VOCAB))),
        row(replace(PLAIN, logprobs=3)),
        row(replace(greedy, logprobs=0, logit_bias=((TokenId(3), 9.0),))),
    ]


def expected(logits: np.ndarray, params: SamplingParams, position: int) -> int:
    """Sample a token by the sampler's rules, with a slower, independent implementation."""
    scores = logits.astype(np.float64)
    for token in set(HISTORY) if params.repetition_penalty != 1 else ():
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    answer = HISTORY[NUM_PROMPT:]
    for token in set(answer):
        scores[token] -= params.presence_penalty
        scores[token] -= params.frequency_penalty * answer.count(token)
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.temperature == 0:
        return int(scores.argmax())
    scores /= params.temperature
    chances = np.exp(scores - scores.max())
    chances /= chances.sum()
    chances[chances < params.min_p * chances.max()] = 0
    order = sorted(range(len(chances)), key=lambda token: (-chances[token], token))
    kept = order[: params.top_k] if params.top_k else order
    total = chances[kept].sum()
    nucleus, reached = [], 0.0
    for token in kept:
        if reached >= params.top_p:
            break
        nucleus.append(token)
        reached += chances[token] / total
    allowed = np.zeros_like(chances)
    allowed[nucleus] = chances[nucleus]
    draw = uniform(params.seed, position) * allowed.sum()
    return int(np.searchsorted(np.cumsum(allowed), draw, side="right"))


@pytest.mark.parametrize("name", CASES)
def test_every_sampling_parameter_equals_the_naive_model(name: str) -> None:
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    token_ids = set()
    for trial in range(60):
        logits = chance.normal(scale=2, size=VOCAB).astype(np.float32)
        params = replace(CASES[name], seed=trial)
        token = sample(torch.from_numpy(logits)[None], [row(params)])[0].token_id
        assert token == expected(logits, params, len(HISTORY))
        token_ids.add(token)
    assert len(token_ids) > 1


def sorted_and_put_back(chances: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Apply top-k and top-p after a stable sort of all tokens. The sampler's results must be
    bit-identical to these in every version, so that a seed always gives the same answer."""
    ordered, order = chances.sort(descending=True, stable=True)
    if 0 < params.top_k < len(ordered):
        ordered[params.top_k :] = 0
    if params.top_p < 1:
        ordered = ordered / ordered.sum()
        ordered[ordered.cumsum(dim=0) - ordered >= params.top_p] = 0
    return torch.zeros_like(chances).scatter(0, order, ordered)


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 17, 999, 1000, 5000])
def test_filters_equal_a_full_sort_bit_by_bit(top_k: int, top_p: float) -> None:
    """Half of the trials have many equal probabilities, half have probabilities that are all
    different."""
    print(f"seed {SEED}")
    chance = torch.Generator().manual_seed(SEED)
    params = replace(PLAIN, top_k=top_k, top_p=top_p)
    for trial in range(8):
        logits = torch.randn(1000, generator=chance).double() * 2
        if trial % 2:
            logits = logits.round()
        chances = logits.softmax(dim=0)
        assert torch.equal(_filtered(chances, params), sorted_and_put_back(chances, params))


def test_draw_beyond_the_end_chooses_the_last_possible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.zeros(1, VOCAB)
    monkeypatch.setattr("baton.engine.sampler.uniform", lambda seed, position: 1.0)
    early = replace(row(PLAIN), suppressed_token_ids=tuple(map(TokenId, range(30, VOCAB))))
    assert [each.token_id for each in sample(logits, [early]) if each] == [29]


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -50.0]])
    params = replace(PLAIN, seed=SEED)
    draws = [sample(logits, [row(params, position)])[0].token_id for position in range(1, 4001)]
    wanted = logits[0].double().softmax(dim=0) * len(draws)
    for token, count in enumerate(wanted.tolist()):
        assert abs(draws.count(token) - count) <= 6 * max(count, 1) ** 0.5


def test_sampling_does_not_depend_on_the_batch() -> None:
    chance = np.random.default_rng(SEED)
    logits = torch.from_numpy(chance.normal(size=(len(CASES), VOCAB)).astype(np.float32))
    rows = [row(replace(params, seed=n)) for n, params in enumerate(CASES.values())]
    alone = [sample(logits[n : n + 1], [one])[0] for n, one in enumerate(rows)]
    assert sample(logits, rows) == alone


def test_greedy_chooses_the_first_of_equal_tokens() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert sample(logits, [row(replace(PLAIN, temperature=0.0))])[0].token_id == 1


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    params = replace(PLAIN, temperature=0.0, logprobs=2, logit_bias=((TokenId(0), 50.0),))
    sampled = sample(logits, [row(params)])[0]
    reference = logits[0].log_softmax(dim=0)
    assert sampled.token_id == 0
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(float(reference[0]))
    assert [token for token, _ in sampled.logprob.top] == [1, 2]
    assert [value for _, value in sampled.logprob.top] == pytest.approx(reference[1:3].tolist())
    none = sample(logits, [row(replace(params, logprobs=0))])[0].logprob
    assert none is not None and none.top == ()


def bits_of(tokens: list[int]) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(VOCAB // 8, "little")


@pytest.mark.parametrize("name", CASES)
def test_masks_come_before_everything_else(name: str) -> None:
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    for trial in range(40):
        logits = chance.normal(scale=2, size=(3, VOCAB)).astype(np.float32)
        kept = sorted(chance.choice(VOCAB, size=int(chance.integers(1, 8)), replace=False).tolist())
        params = replace(CASES[name], seed=trial, logprobs=0)
        one = replace(row(params), mask=lambda kept=kept: bits_of(kept))
        masked = logits.copy()
        masked[1, [token for token in range(VOCAB) if token not in kept]] = -np.inf
        free, held, after = sample(torch.from_numpy(logits), [row(params), one, row(params)])
        assert held is not None and held.logprob is not None
        assert held.token_id == expected(masked[1], params, len(HISTORY))
        own = torch.from_numpy(logits[1]).log_softmax(dim=0)
        assert held.logprob.logprob == pytest.approx(float(own[held.token_id]))
        for index, other in ((0, free), (2, after)):
            assert other is not None
            assert other.token_id == expected(logits[index], params, len(HISTORY))


def test_mask_that_allows_nothing_gives_no_token() -> None:
    logits = torch.zeros((2, VOCAB))
    greedy = row(replace(PLAIN, temperature=0.0))
    barren = replace(greedy, mask=lambda: b"")
    assert sample(logits, [barren, replace(row(PLAIN), mask=lambda: bytes(5))]) == [None, None]
    assert [each is None for each in sample(logits, [greedy, barren])] == [False, True]


def test_tokens_beyond_the_mask_are_never_sampled() -> None:
    logits = torch.arange(20.0)[None]
    greedy = row(replace(PLAIN, temperature=0.0))
    held = sample(logits, [replace(greedy, mask=lambda: b"\xff")])[0]
    assert held is not None and held.token_id == 7
    wide = sample(logits, [replace(greedy, mask=lambda: b"\xff" * 9)])[0]
    assert wide is not None and wide.token_id == 19


@pytest.mark.parametrize("params", [PLAIN, replace(PLAIN, temperature=0.0)])
def test_tokens_that_are_too_early_are_not_chosen(params: SamplingParams) -> None:
    """Suppressed tokens are excluded despite their likelihood or a bias; other rows are not
    affected."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 3], logits[:, 4], logits[:, 5] = 90.0, 80.0, 70.0
    biased = replace(params, logit_bias=((TokenId(3), 100.0),))
    held = replace(row(biased), suppressed_token_ids=(TokenId(3), TokenId(4), TokenId(VOCAB)))
    tokens = [sampled.token_id for sampled in sample(logits, [held, row(biased)]) if sampled]
    assert tokens == [5, 3]
    assert logits[0, 3] == 90.0
