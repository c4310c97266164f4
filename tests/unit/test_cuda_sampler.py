"""Sampling a batch at a time gives the tokens of sampling row by row."""

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
from tests.unit.test_sampler import CASES, PLAIN, VOCAB, all_kinds, row

SEED = 20261121


def test_draws_are_those_of_single_tokens() -> None:
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
def test_the_same_tokens_as_row_by_row(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a choice may lie outside of the window."""
    monkeypatch.setattr(batched, "TOP_WINDOW_TOKENS", window)
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    for trial in range(60):
        rows = [row(params, position=7 + trial) for params in mixed(trial)]
        logits = torch.from_numpy(chance.normal(scale=2, size=(len(rows), VOCAB))).float()
        assert sample_batch(logits, rows) == sample(logits, rows), trial


@pytest.mark.parametrize("window", [batched.TOP_WINDOW_TOKENS, 5])
def test_ties_stay_with_lower_ids(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "TOP_WINDOW_TOKENS", window)
    logits = torch.zeros(1, VOCAB)
    logits[0, 9:] = 1.0
    seen = set()
    for trial in range(40):
        one = row(replace(PLAIN, top_k=3, seed=trial))
        assert sample_batch(logits, [one]) == sample(logits, [one])
        seen |= {sampled.token_id for sampled in sample_batch(logits, [one]) if sampled}
    assert seen == {9, 10, 11}


def test_a_choice_within_the_window_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("it was sure")

    monkeypatch.setattr(batched, "TOP_WINDOW_TOKENS", 10)
    monkeypatch.setattr(batched, "choose_token", refuse)
    logits = torch.arange(float(VOCAB))[None]
    sample_batch(logits, [row(replace(PLAIN, top_k=4, top_p=0.9))])
    with pytest.raises(AssertionError, match="it was sure"):
        sample_batch(logits, [row(replace(PLAIN, top_k=11))])


def test_masks_biases_and_logprobs() -> None:
    print(f"seed {SEED}")
    logits = torch.from_numpy(np.random.default_rng(SEED).normal(size=(5, VOCAB))).float()
    rows = all_kinds()
    got, wanted = sample_batch(logits, rows), sample(logits, rows)
    assert [each and each.token_id for each in got] == [each and each.token_id for each in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        if theirs is not None and theirs.logprob is not None:
            assert ours is not None and ours.logprob is not None
            assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob)
            assert [t for t, _ in ours.logprob.top] == [t for t, _ in theirs.logprob.top]
    assert logits[2, 3] != -torch.inf


def test_nobody_samples() -> None:
    assert sample_batch(torch.empty(0, VOCAB), []) == []
