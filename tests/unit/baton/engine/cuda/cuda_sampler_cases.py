"""Compares the GPU's sampler, in Triton's interpreter, with the CPU's.

    TRITON_INTERPRET=1 python -m tests.unit.baton.engine.cuda.cuda_sampler_cases

prints a line for each check; the interpreter must be chosen before Triton is imported.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from baton.core.ids import TokenId
from baton.core.request import SamplingParams
from baton.engine.cuda import token_chooser
from baton.engine.cuda.sampler import sample_batch
from baton.engine.plan import Row
from baton.engine.sampler import sample
from tests.unit.baton.engine.test_sampler import CASES, PLAIN, VOCAB, row, rows_of_all_kinds

SEED = 20261121
CHUNK_TOKENS = 16
"""Small, so that even ``VOCAB`` tokens are several chunks."""

LARGE_VOCAB = 2500
"""More tokens than ``apply_filters`` reads at once, and not a multiple of a chunk's tokens. Where
all are equally likely, none of the values of top-p below is a multiple of a token's share, since
rounding would then decide whether one token more is kept."""

LARGE_CHUNK_TOKENS = 2048
GREEDY = replace(PLAIN, temperature=0.0)
FILTERS = {
    "temperature": PLAIN,
    "top-p": replace(PLAIN, top_p=0.90013),
    "nearly all of top-p": replace(PLAIN, top_p=0.999999),
    "tiny top-p": replace(PLAIN, top_p=1e-9),
    "top-k": replace(PLAIN, top_k=17),
    "large top-k": replace(PLAIN, top_k=1711),
    "all but one": replace(PLAIN, top_k=LARGE_VOCAB - 1),
    "top-k and top-p": replace(PLAIN, top_k=1222, top_p=0.77),
    "small top-k and top-p": replace(PLAIN, top_k=40, top_p=0.951),
    "min-p": replace(PLAIN, min_p=0.3),
    "min-p of one": replace(PLAIN, min_p=1.0),
    "all": replace(PLAIN, top_k=900, top_p=0.613, min_p=0.02, temperature=1.3),
    "hot": replace(PLAIN, temperature=1e4, top_p=0.4567),
    "cold": replace(PLAIN, temperature=1e-3, top_p=0.90013),
    "nearly greedy": replace(PLAIN, temperature=1e-30, top_k=5),
    "penalties": replace(PLAIN, frequency_penalty=0.5, top_p=0.90013),
    "bias": replace(PLAIN, logit_bias=((TokenId(2499), 8.0),), top_k=100),
    "greedy": GREEDY,
}


def seeded(every: Iterable[SamplingParams], trial: int) -> list[Row]:
    """Return a row for each of ``every``, all with different random draws."""
    return [
        row(replace(params, seed=100 * trial + n), position=7 + trial)
        for n, params in enumerate(every)
    ]


def assert_same_tokens(logits: torch.Tensor, rows: Sequence[Row], chunk_tokens: int) -> None:
    got, wanted = sample_batch(logits, rows, chunk_tokens), sample(logits, rows)
    for index, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert ours == theirs, f"row {index}, {rows[index].sampling}: {ours} is not {theirs}"


def mixed_batches(chance: np.random.Generator) -> Iterator[str]:
    every = [GREEDY, PLAIN, *CASES.values(), GREEDY]
    for trial in range(3):
        logits = torch.from_numpy(chance.normal(scale=2, size=(len(every), VOCAB))).float()
        assert_same_tokens(logits, seeded(every, trial), CHUNK_TOKENS)
        one_chunk = logits[:, :CHUNK_TOKENS].contiguous()
        assert_same_tokens(one_chunk, seeded([PLAIN, CASES["all filters"]], trial), CHUNK_TOKENS)
    yield f"mixed batches: {len(every)} rows"


def all_distributions(chance: np.random.Generator) -> Iterator[str]:
    """Check all filters on distributions from flat to peaked, with and without ties."""
    shape = (len(FILTERS), LARGE_VOCAB)
    normal = torch.from_numpy(chance.normal(size=shape)).float()
    distributions = {
        "flat": normal * 0.05,
        "ordinary": normal * 3,
        "one likely token": normal.index_fill(1, torch.tensor([2321]), 60.0),
        "many ties": (normal * 2).round(),
        "two values and a negative zero": torch.where(normal > 1, 1.0, normal.sign() * 0.0),
        "all equal": torch.zeros(shape),
        "few tokens": normal.masked_fill(torch.arange(LARGE_VOCAB) % 600 != 7, -torch.inf),
        "only the last token": normal.masked_fill(torch.arange(LARGE_VOCAB) < 2499, -torch.inf),
    }
    for number, (name, logits) in enumerate(distributions.items()):
        assert_same_tokens(logits, seeded(FILTERS.values(), number), LARGE_CHUNK_TOKENS)
        yield f"{name}: {len(logits)} rows"


def sample_at(draws: Sequence[float], logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Return the tokens sampled at ``draws``, which replace the rows' own."""
    with mock.patch.object(
        token_chooser, "uniforms", lambda seeds, _: np.array(draws[: len(seeds)])
    ):
        return [each.token_id for each in sample_batch(logits, rows, CHUNK_TOKENS) if each]


def ties_go_to_lower_token_ids(_: np.random.Generator) -> Iterator[str]:
    """The tied tokens 9 to 39 are in three chunks, and top-k and top-p keep those below 20."""
    logits = torch.full((11, VOCAB), 9.0)
    logits[:, :9] = 0.0
    draws = [(n + 0.5) / 11 for n in range(11)]
    for params in (replace(PLAIN, top_k=11), replace(PLAIN, top_p=10.5 / 31)):
        assert sample_at(draws, logits, seeded([params] * 11, 0)) == list(range(9, 20))
    yield "ties"


def draws_at_both_ends(chance: np.random.Generator) -> Iterator[str]:
    """Check that only a token that is kept is chosen at a draw of 0, or if rounding puts a draw
    beyond the end."""
    logits = torch.from_numpy(chance.normal(size=(3, VOCAB))).float()
    logits[:, :3] = logits[:, 30:] = -torch.inf
    logits[:, [5, 29]] = 4.0
    rows = seeded([PLAIN, replace(PLAIN, top_k=2), replace(PLAIN, min_p=0.9)], 0)
    for draw, wanted in ((0.0, [3, 5, 5]), (1.0, [29, 29, 29])):
        assert sample_at([draw] * 3, logits, rows) == wanted
    yield "draws at both ends"


def masks_biases_and_logprobs(chance: np.random.Generator) -> Iterator[str]:
    logits = torch.from_numpy(chance.normal(size=(5, VOCAB))).float()
    rows = rows_of_all_kinds()
    got, wanted = sample_batch(logits, rows, CHUNK_TOKENS), sample(logits, rows)
    assert [each and each.token_id for each in got] == [each and each.token_id for each in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        if theirs is not None and theirs.logprob is not None:
            assert ours is not None and ours.logprob is not None
            assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob)
            assert [t for t, _ in ours.logprob.top] == [t for t, _ in theirs.logprob.top]
    assert logits[2, 3] != -torch.inf
    yield "masks, biases and logprobs"


def bad_rows_do_not_change_others(chance: np.random.Generator) -> Iterator[str]:
    """Rows of NaN, or without any possible token, get some token of the vocabulary."""
    kinds = [PLAIN, replace(PLAIN, top_k=5, top_p=0.5), replace(PLAIN, top_p=0.5), GREEDY]
    good = torch.from_numpy(chance.normal(size=(len(kinds), VOCAB))).float()
    rows = seeded([*kinds, *kinds], 0)
    wanted = sample(good, rows[: len(kinds)])
    for value in (torch.nan, torch.inf, -torch.inf):
        logits = torch.cat((good, torch.full_like(good, value)))
        sampled = sample_batch(logits, rows, CHUNK_TOKENS)
        assert sampled[: len(kinds)] == wanted
        assert all(each and 0 <= each.token_id < VOCAB for each in sampled)
    yield "bad rows"


CHECKS: list[Callable[[np.random.Generator], Iterator[str]]] = [
    mixed_batches,
    all_distributions,
    ties_go_to_lower_token_ids,
    draws_at_both_ends,
    masks_biases_and_logprobs,
    bad_rows_do_not_change_others,
]


def main() -> int:
    from tests.unit.baton.engine.interpreter import patch_language_once

    patch_language_once()
    print(f"seed {SEED}")
    torch.set_num_threads(1)
    for check in CHECKS:
        for line in check(np.random.default_rng(SEED)):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
