"""Tests the logits processor that makes seeded answers continue on another server."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor import _load_logitsprocs_by_fqcns as load_v1
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.logits_processor.loader import (
    _load_v2_logitsprocs_by_fqcns as load_v2,
)

from attached_worker.vllm_plugin.seed_by_position import (
    Request,
    SeedByPosition,
    filtered,
    gumbel_noise,
    key_at,
    penalize,
)

SEED = 13
SEED_BY_POSITION = f"{SeedByPosition.__module__}:{SeedByPosition.__name__}"
VOCABULARY = 1000


def logits(num_rows: int, seed: int = SEED) -> torch.Tensor:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_rows, VOCABULARY, generator=generator)


def seeded(seed: object, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, extra_args={"baton_seed": seed})


def sample(
    rows: torch.Tensor, params: Sequence[SamplingParams], answers: Sequence[list[int]]
) -> list[int]:
    """Return the tokens of one step, for requests whose prompt is 5, 6."""
    processor = SeedByPosition(None)
    added = [(row, *each, answers[row]) for row, each in enumerate((p, [5, 6]) for p in params)]
    processor.update_state(BatchUpdate(batch_size=len(added), removed=[], added=added, moved=[]))
    return list(processor.apply(rows.clone()).argmax(-1).tolist())


def test_tokens_depend_on_seed_and_position_alone() -> None:
    params = [seeded(seed) for seed in (1, 1, 2)]
    row = torch.zeros(1, VOCABULARY)
    alone = sample(row, params[:1], [[7, 8]])
    beside = sample(row.repeat(3, 1), params, [[7], [9, 9], [7, 8]])
    assert alone == [beside[1]]
    assert len({*alone, *beside}) == 3


def test_the_noise_stays_what_it_is() -> None:
    """Servers with different versions of this file would continue answers differently."""
    assert key_at(3, 17) == (1199820646, -2145024448)
    noise = gumbel_noise(torch.tensor([key_at(3, 17)]), 4)
    assert noise.tolist()[0] == pytest.approx(
        [-0.09532938, -0.65781486, 0.10552242, -1.13554049],
        abs=1e-6,
    )


def test_the_noise_is_gumbels() -> None:
    """Its mean is Euler's constant, and its variance pi squared / 6."""
    keys = torch.tensor([key_at(SEED, position) for position in range(200)])
    noise = gumbel_noise(keys, 50_000).double()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=2e-3)
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, abs=5e-3)
    shares = torch.corrcoef(noise[:20])
    assert (shares - torch.eye(20)).abs().max().item() < 0.02


def test_tokens_have_the_probabilities_of_the_softmax() -> None:
    row = logits(1)[:, :20]
    seeds = range(20_000)
    params = [seeded(seed, temperature=1.5) for seed in seeds]
    chosen = sample(row.repeat(len(params), 1), params, [[] for _ in seeds])
    counts = np.bincount(chosen, minlength=20)
    expected = (row[0] / 1.5).softmax(-1).numpy() * len(params)
    # The 0.999 quantile of chi-squared with 19 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 43.8


def test_filters_are_those_of_vllm() -> None:
    rows = logits(6)
    choices = [(0, 1.0), (1, 1.0), (5, 1.0), (0, 0.7), (40, 0.9), (0, 1e-6)]
    params = [SamplingParams(seed=1, top_k=k, top_p=p, temperature=0.8) for k, p in choices]
    expected = apply_top_k_top_p(
        rows / 0.8,
        torch.tensor([k or VOCABULARY for k, _ in choices]),
        torch.tensor([p for _, p in choices]),
    )
    torch.testing.assert_close(filtered(rows, params), expected)


def test_min_p_keeps_what_is_likely_enough() -> None:
    rows = logits(1)
    kept = filtered(rows, [SamplingParams(seed=1, min_p=0.1)])[0].isfinite()
    shares = rows[0].softmax(-1)
    assert kept.tolist() == (shares >= 0.1 * shares.max()).tolist()


def test_penalties_are_those_of_vllm() -> None:
    prompt, answer = [1, 2, 3], [3, 4, 4, 9]
    params = SamplingParams(
        seed=1, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25
    )
    rows, got = logits(1), logits(1)
    request = Request(1, params, prompt, answer[:2])
    penalize(got[0].clone(), request)
    request.answer.extend(answer[2:])
    penalize(got[0], request)
    expected = apply_all_penalties(
        rows, torch.tensor([prompt]), torch.tensor([0.5]), torch.tensor([0.25]),
        torch.tensor([1.3]), [answer],
    )  # fmt: skip
    torch.testing.assert_close(got, expected)


def test_other_requests_are_not_changed() -> None:
    rows = logits(2)
    params = [SamplingParams(seed=1), seeded(1, temperature=0.0)]
    processor = SeedByPosition(None)
    added = [(row, each, [5], []) for row, each in enumerate(params)]
    processor.update_state(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
    assert torch.equal(processor.apply(rows.clone()), rows)


def test_both_model_runners_accept_it_and_v2_samples_by_itself() -> None:
    assert load_v1([SEED_BY_POSITION]) == load_v2([SEED_BY_POSITION]) == [SeedByPosition]
    processor, rows = SeedByPosition(None), logits(1)
    assert not processor.add_request(0, seeded(1))
    assert torch.equal(processor.apply(rows.clone(), object()), rows)


def test_a_seed_that_is_no_integer_is_refused() -> None:
    SeedByPosition.validate_params(seeded(1))
    with pytest.raises(ValueError, match="baton_seed is 'x'; it must be an integer"):
        SeedByPosition.validate_params(seeded("x"))
