"""Tests that the native sampler chooses the same tokens as torch."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from baton.core.ids import TokenId
from baton.core.philox import uniform
from baton.core.request import SamplingParams
from baton.engine.native.backend_choice import unavailable_reason
from baton.engine.native.matrix import KernelThreadPool
from baton.engine.native.processor import INSTRUCTION_SETS, limit_instruction_set
from baton.engine.native.sampler import NativeTokenChooser
from baton.engine.plan import Row, SampledToken
from baton.engine.sampler import sample
from tests.unit.baton.engine.test_sampler import CASES, PLAIN, VOCAB, row, rows_of_all_kinds

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

SEED = 20261122


@pytest.fixture(params=INSTRUCTION_SETS)
def some_instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    with limit_instruction_set(request.param):
        yield


def tokens_of(sampled: list[SampledToken | None]) -> list[int | None]:
    return [each and each.token_id for each in sampled]


def mixed(trial: int) -> list[SamplingParams]:
    greedy = replace(PLAIN, temperature=0.0)
    wide = {"top_k": 700, "top_p": 0.97, "min_p": 1e-4}
    every = [greedy, PLAIN, *CASES.values(), replace(PLAIN, **wide), greedy]
    return [replace(params, seed=1000 * trial + n) for n, params in enumerate(every)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("vocab_size", [VOCAB, 1003, 32_000])
@pytest.mark.usefixtures("some_instructions")
def test_native_sampler_chooses_the_tokens_of_torch(vocab_size: int, threads: int) -> None:
    """Half of the trials have logits that are all different, half have many equal ones."""
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    chooser = NativeTokenChooser(KernelThreadPool(threads), vocab_size)
    for trial in range(30 if vocab_size < 10_000 else 4):
        rows = [row(params, position=7 + trial) for params in mixed(trial)]
        noise = chance.normal(scale=2, size=(len(rows), vocab_size))
        logits = torch.from_numpy(noise.round(1) if trial % 2 else noise).float()
        assert sample(logits, rows, chooser) == sample(logits, rows), trial


@pytest.mark.parametrize("top_k", [0, 1, 17, 999, 1000, 5000])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999, 1.0])
def test_top_k_and_top_p_keep_the_same_tokens(top_k: int, top_p: float) -> None:
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    chooser = NativeTokenChooser(KernelThreadPool(1), 1000)
    for scale in (0.01, 1.0, 30.0):
        noise = torch.from_numpy(chance.normal(scale=scale, size=(40, 1000))).float()
        rows = [row(replace(PLAIN, top_k=top_k, top_p=top_p, seed=n)) for n in range(40)]
        assert sample(noise, rows, chooser) == sample(noise, rows)


def test_ties_go_to_lower_token_ids() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9:] = 1.0
    chooser = NativeTokenChooser(KernelThreadPool(1), VOCAB)
    rows = [row(replace(PLAIN, top_k=3, seed=trial)) for trial in range(40)]
    assert set(tokens_of(sample(logits.expand(40, -1), rows, chooser))) == {9, 10, 11}
    greedy = row(replace(PLAIN, temperature=0.0))
    assert tokens_of(sample(logits, [greedy], chooser)) == [9]


def test_draws_depend_on_seed_and_position() -> None:
    """All tokens are equally likely, so that the chosen token shows the number drawn: each token
    stands for an equal part of [0, 1)."""
    print(f"seed {SEED}")
    chance, size = np.random.default_rng(SEED), 4096
    chooser = NativeTokenChooser(KernelThreadPool(1), size)
    seeds = [0, 1, -1, 2**64 - 1, 2**65 + 3, *chance.integers(0, 2**63, 60).tolist()]
    positions = [1, 7, 2**40, 2**33 - 1, 5, *chance.integers(1, 2**20, 60).tolist()]
    rows = [
        Row(each.request_id, each.token_ids, position - 1, each.block_ids, True, each.sampling)
        for seed, position in zip(seeds, positions, strict=True)
        for each in [row(replace(PLAIN, seed=seed))]
    ]
    wanted = [int(uniform(*each) * size) for each in zip(seeds, positions, strict=True)]
    assert tokens_of(sample(torch.zeros(len(rows), size), rows, chooser)) == wanted


def test_masks_biases_and_logprobs() -> None:
    print(f"seed {SEED}")
    logits = torch.from_numpy(np.random.default_rng(SEED).normal(size=(5, VOCAB))).float()
    rows = rows_of_all_kinds()
    assert sample(logits, rows, NativeTokenChooser(KernelThreadPool(1), VOCAB)) == sample(
        logits, rows
    )


def test_invalid_logits_still_give_valid_tokens() -> None:
    """A token of the vocabulary is chosen even if all logits are minus infinity or NaN. If only one
    logit is a number, its token is chosen."""
    odd = torch.full((4, VOCAB), -torch.inf)
    odd[1:] = torch.nan
    odd[2, 5] = 1.0
    odd[3, 6:8] = torch.inf
    chooser = NativeTokenChooser(KernelThreadPool(1), VOCAB)
    for params in mixed(0):
        far = tuple(map(TokenId, (-1, VOCAB, 2**40)))
        one = replace(row(params), history=far, num_prompt_tokens=1)
        chosen = tokens_of(sample(odd, [one] * 4, chooser))
        assert all(token is not None and 0 <= token < VOCAB for token in chosen)
        assert chosen[2] == 5


def test_tokens_do_not_depend_on_the_batch() -> None:
    """A row's token does not depend on the other rows, and no state remains for the next call."""
    print(f"seed {SEED}")
    logits = torch.from_numpy(np.random.default_rng(SEED).normal(size=(99, 1003))).float()
    rows = [row(params) for trial in range(9) for params in mixed(trial)][:99]
    together = NativeTokenChooser(KernelThreadPool(3), 1003)
    alone = partial(sample, chooser=NativeTokenChooser(KernelThreadPool(1), 1003))
    found = sample(logits[: len(rows)], rows, together)
    assert found == [alone(logits[n : n + 1], [one])[0] for n, one in enumerate(rows)]


def test_empty_batch_samples_nothing() -> None:
    assert sample(torch.empty(0, VOCAB), [], NativeTokenChooser(KernelThreadPool(1), VOCAB)) == []
