"""Tests that sampling a whole batch gives the same tokens as sampling row by row."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.core.philox import uniform
from baton.core.request import SamplingParams
from baton.engine.cuda import sampler as batched
from baton.engine.cuda.sampler import sample_batch
from baton.engine.philox_batch import uniforms
from baton.engine.sampler import sample
from tests.unit.test_sampler import CASES, PLAIN, VOCAB, row, rows_of_all_kinds

SEED = 20261121


def test_batched_random_draws_equal_single_draws() -> None:
    chance = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    seeds = [0, 1, -1, 2**64 - 1, *chance.integers(0, 2**63, 200).tolist()]
    positions = [0, 2**40, 7, 1, *chance.integers(0, 2**20, 200).tolist()]
    wanted = [uniform(*each) for each in zip(seeds, positions, strict=True)]
    assert uniforms(seeds, positions).tolist() == wanted


def mixed(trial: int) -> list[SamplingParams]:
    greedy = replace(PLAIN, temperature=0.0)
    every = [greedy, PLAIN, *CASES.values(), greedy]
    return [replace(params, seed=100 * trial + n) for n, params in enumerate(every)]


@pytest.mark.parametrize("window", [batched.TOP_WINDOW_TOKENS, 5])
def test_batched_sampling_gives_the_tokens_of_row_by_row_sampling(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches include rows whose chosen token may be outside the top-token window."""
    monkeypatch.setattr(batched, "TOP_WINDOW_TOKENS", window)
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    for trial in range(60):
        rows = [row(params, position=7 + trial) for params in mixed(trial)]
        logits = torch.from_numpy(chance.normal(scale=2, size=(len(rows), VOCAB))).float()
        assert sample_batch(logits, rows) == sample(logits, rows), trial


@pytest.mark.parametrize("window", [batched.TOP_WINDOW_TOKENS, 5])
def test_ties_go_to_lower_token_ids(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "TOP_WINDOW_TOKENS", window)
    logits = torch.zeros(1, VOCAB)
    logits[0, 9:] = 1.0
    token_ids = set()
    for trial in range(40):
        one = row(replace(PLAIN, top_k=3, seed=trial))
        assert sample_batch(logits, [one]) == sample(logits, [one])
        token_ids |= {sampled.token_id for sampled in sample_batch(logits, [one]) if sampled}
    assert token_ids == {9, 10, 11}


def test_choice_within_the_window_needs_no_full_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("choose_token was called")

    monkeypatch.setattr(batched, "TOP_WINDOW_TOKENS", 10)
    monkeypatch.setattr(batched, "choose_token", refuse)
    logits = torch.arange(float(VOCAB))[None]
    sample_batch(logits, [row(replace(PLAIN, top_k=4, top_p=0.9))])
    with pytest.raises(AssertionError, match="choose_token was called"):
        sample_batch(logits, [row(replace(PLAIN, top_k=11))])


def test_masks_biases_and_logprobs() -> None:
    print(f"seed {SEED}")
    logits = torch.from_numpy(np.random.default_rng(SEED).normal(size=(5, VOCAB))).float()
    rows = rows_of_all_kinds()
    got, wanted = sample_batch(logits, rows), sample(logits, rows)
    assert [each and each.token_id for each in got] == [each and each.token_id for each in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        if theirs is not None and theirs.logprob is not None:
            assert ours is not None and ours.logprob is not None
            assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob)
            assert [t for t, _ in ours.logprob.top] == [t for t, _ in theirs.logprob.top]
    assert logits[2, 3] != -torch.inf


def test_empty_batch_samples_nothing() -> None:
    assert sample_batch(torch.empty(0, VOCAB), []) == []
