"""Tests the code around the GPU kernels (buckets, static batches, graph replay), and all kernels in
Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import PackedBatch, pack_batch
from baton.engine.cuda.graphs import BUCKETS, MAX_SPLITS_BYTES, bucket_for, context_limit
from baton.engine.cuda.static_batch import NO_SLOT, TOKENS, StaticBatch
from baton.engine.model import Model
from baton.engine.plan import UNKNOWN_TOKEN, Plan, Row
from baton.engine.runner import ModelRunner
from baton.engine.step_tokens import StepTokens
from tests.unit.baton.engine.cuda.interpreted import run_interpreted
from tests.unit.baton.engine.cuda_cases import (
    make_config,
    make_pool,
    make_rows,
    make_weights,
    torch_ops,
)

CPU = torch.device("cpu")
NUM_CHECKS = 4 + 6 + 6 + 4 + 4 + 3 + 3 + 8 + 6 + 2 + 1 + 2 + 1 + 4


@pytest.mark.timeout(300)
def test_all_gpu_checks_pass_in_tritons_interpreter() -> None:
    assert len(run_interpreted("tests.unit.baton.engine.cuda_cases")) == NUM_CHECKS


def test_batch_uses_the_smallest_bucket_that_holds_it() -> None:
    wanted = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 17: 24, 255: 256, 256: 256, 257: None}
    assert {rows: bucket_for(rows) for rows in wanted} == wanted
    assert list(BUCKETS) == sorted(set(BUCKETS))


def test_contexts_are_limited_by_the_model_and_by_scratch_memory() -> None:
    assert context_limit(1, 40_960, 256, 16_512) == 40_960
    assert (
        context_limit(256, 40_960, 256, 16_512)
        == MAX_SPLITS_BYTES // (256 * 16_512) * 256
        == 32_512
    )


def row(number: int, start: int, blocks: list[int], tokens: int = 1) -> Row:
    return Row(
        RequestId(str(number)), (TokenId(5 + number),) * tokens, start,
        tuple(map(BlockId, blocks)), True, SamplingParams(1),
    )  # fmt: skip


def batch_of(*rows: Row) -> PackedBatch:
    return pack_batch(rows, 16, CPU)


def test_padding_rows_touch_no_block() -> None:
    static = StaticBatch(4, 64, 16, CPU)
    static.fill(
        StepTokens([5, 6, 7]),
        batch_of(row(0, 17, [3, 9]), row(1, 0, [1]), row(2, 50, [2, 4, 6, 8])),
    )
    batch = static.device_batch
    assert static.token_ids.tolist() == [5, 6, 7, 0]
    assert batch.positions.tolist() == [17, 0, 50, 0]
    assert batch.slots.tolist() == [[9 * 16 + 1, 16, 8 * 16 + 2, NO_SLOT]]
    assert batch.context_lengths.tolist() == [18, 1, 51, 0]
    assert batch.block_tables[0, 0, :2].tolist() == [3, 9]
    assert batch.block_tables[0, 2].tolist() == [2, 4, 6, 8]


def test_static_batch_has_tables_and_slots_of_each_group_of_layers() -> None:
    static = StaticBatch(2, 64, 16, CPU, num_groups=2)
    rows = [row(0, 17, [3, 13, 9, 19])]
    static.fill(StepTokens([5]), pack_batch(rows, 16, CPU, num_groups=2))
    batch = static.device_batch
    assert batch.slots.tolist() == [[9 * 16 + 1, NO_SLOT], [19 * 16 + 1, NO_SLOT]]
    assert batch.block_tables[:, 0, :2].tolist() == [[3, 9], [13, 19]]


def test_smaller_batch_clears_rows_of_the_previous_one() -> None:
    static = StaticBatch(4, 64, 16, CPU)
    addresses = [static.token_ids.data_ptr(), static.device_batch.block_tables.data_ptr()]
    static.fill(StepTokens([5, 6]), batch_of(row(0, 17, [3, 9]), row(1, 0, [1])))
    static.fill(StepTokens([8]), batch_of(row(0, 2, [7])))
    assert static.token_ids.tolist() == [8, 0, 0, 0]
    assert static.device_batch.slots.tolist() == [[7 * 16 + 2, *[NO_SLOT] * 3]]
    assert static.device_batch.context_lengths.tolist() == [3, 0, 0, 0]
    assert [static.token_ids.data_ptr(), static.device_batch.block_tables.data_ptr()] == addresses


def test_tokens_of_the_previous_step_are_taken_from_the_device() -> None:
    static = StaticBatch(4, 64, 16, CPU)
    batch = batch_of(row(0, 17, [3, 9]), row(1, 0, [1]), row(2, 50, [2, 4, 6, 8]))
    sampled = torch.tensor([70, 80], dtype=torch.int32)
    static.fill(StepTokens([UNKNOWN_TOKEN, 6, UNKNOWN_TOKEN], sampled, [1, None, 0]), batch)
    assert static.token_ids.tolist() == [80, 6, 70, 0]


def test_the_copy_of_the_step_in_flight_is_not_overwritten() -> None:
    static = StaticBatch(2, 64, 16, CPU)
    static.fill(StepTokens([5, 6]), batch_of(row(0, 17, [3, 9]), row(1, 0, [1])))
    in_flight = static._staged[0].rows
    static.fill(StepTokens([8]), batch_of(row(0, 2, [7])))
    assert in_flight[TOKENS].tolist() == [5, 6]


def test_unfilled_static_batch_has_only_padding() -> None:
    static = StaticBatch(2, 64, 16, CPU)
    assert static.device_batch.slots.tolist() == [[NO_SLOT] * 2]
    assert static.device_batch.context_lengths.tolist() == [0, 0]


def test_batch_that_does_not_fit_is_rejected() -> None:
    static = StaticBatch(1, 32, 16, CPU)
    assert static.fits(batch_of(row(0, 31, [1, 2])))
    assert not static.fits(batch_of(row(0, 32, [1, 2, 3])))
    assert not static.fits(batch_of(row(0, 1, [1]), row(1, 1, [2])))
    with pytest.raises(AssertionError):
        static.fill(StepTokens([5, 5]), batch_of(row(0, 0, [1], tokens=2)))


class Replayed:
    """Replaces the CUDA graphs: runs the model eagerly, and records the batch sizes."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.batch_sizes: list[int] = []
        self.warmed: list[int] = []

    def logits(self, tokens: StepTokens, batch: PackedBatch) -> torch.Tensor | None:
        self.batch_sizes.append(batch.num_rows)
        if batch.num_decodes < batch.num_rows:
            return None
        return self._model.forward(tokens.to_device(CPU), batch, torch.arange(batch.num_rows))

    def warm_up(self, num_rows: int) -> None:
        self.warmed.append(num_rows)


def test_runner_replays_decode_steps_and_runs_all_others_eagerly() -> None:
    config = make_config(4, 2, 16, True)
    weights = make_weights(config, torch.float32, CPU)
    tokens = []
    for replays in (True, False):
        pool = make_pool(config, torch.float32, CPU)
        model = Model(config, weights, torch_ops(config, pool, torch.float32))
        graphs = Replayed(model)
        runner = ModelRunner(config, b"", model, pool, graphs=graphs if replays else None)
        runner.warm_up(7)
        assert graphs.warmed == ([7] if replays else [])
        steps = [make_rows([(0, 9), (0, 3)]), make_rows([(9, 1), (3, 1)])]
        steps.append([replace(steps[1][0], sample=False), steps[1][1]])
        tokens.append([runner.run(Plan(n, tuple(rows))).sampled for n, rows in enumerate(steps)])
        assert graphs.batch_sizes == ([2, 2] if replays else []), (
            "only steps in which every row is sampled are replayed"
        )
    assert tokens[0] == tokens[1]
    assert [[token is not None for token in step] for step in tokens[0]] == [
        [True, True], [True, True], [False, True],
    ]  # fmt: skip
