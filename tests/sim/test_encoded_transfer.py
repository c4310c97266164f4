"""Tests KV transfers whose blocks are encoded on the way: answers are the same, and the staging
areas of both workers are free afterwards, whatever went wrong."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from baton.core.ids import TokenId
from baton.core.kv_codec import ENCODED_ALIGNMENT_BYTES as UNIT
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import Endpoint
from baton.core.request import FinishReason, RequestSpec
from baton.transport.base import TransferRange
from testkit.fakes.runner import reference_answer
from tests.sim.table_codec import ENCODED_BYTES
from tests.sim.test_kv_transfer import run_disaggregated
from tests.sim.worker_cluster import Encoding, cluster, request, tokens_of

SEED = 11
BLOCK_BYTES = 32


def encoded(name: str, prompt: list[int], max_tokens: int, **changes: object) -> RequestSpec:
    spec = request(name, prompt, max_tokens)
    return replace(spec, kv_codec=KvCodecName.LOSSLESS, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_units", [8, 16, 64])
@pytest.mark.parametrize("length", [1, 4, 41, 200])
async def test_an_encoded_transfer_changes_no_answer(length: int, num_units: int) -> None:
    spec = encoded("r", [token % 200 for token in range(length)], 6)
    async with cluster(encoding=Encoding(num_units * UNIT)) as running:
        outputs = await run_disaggregated(running, spec)
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()
    assert (tokens_of(outputs), outputs[-1].finish_reason) == reference_answer(spec)
    (details,) = [each.details for each in outputs if "kv_transfer_codec" in each.details]
    num_blocks = -(-length // 4)
    assert int(details["kv_transfer_raw_bytes"]) == num_blocks * BLOCK_BYTES
    num_bytes = int(details["kv_transfer_bytes"])
    num_encoded, rest = divmod(num_blocks * BLOCK_BYTES - num_bytes, BLOCK_BYTES - ENCODED_BYTES)
    assert rest == 0 and 0 <= num_encoded <= num_blocks
    assert details["kv_transfer_codec"] == ("lossless" if num_encoded else "none")
    assert num_encoded > num_blocks // 2 or num_blocks == 1


async def test_a_request_without_a_codec_is_not_encoded() -> None:
    spec = request("r", list(range(41)), 3)
    async with cluster(encoding=Encoding()) as running:
        outputs = await run_disaggregated(running, spec)
        await running.decode.wait_until_free()
    (details,) = [each.details for each in outputs if "kv_transfer_codec" in each.details]
    assert details["kv_transfer_codec"] == "none"
    assert details["kv_transfer_bytes"] == details["kv_transfer_raw_bytes"]


@pytest.mark.parametrize("codec", [KvCodecName.INT4, KvCodecName.FP8])
async def test_a_codec_that_a_worker_does_not_have_is_not_used(codec: KvCodecName) -> None:
    spec = replace(request("r", list(range(41)), 3), kv_codec=codec)
    async with cluster(encoding=Encoding()) as running:
        outputs = await run_disaggregated(running, spec)
        await running.decode.wait_until_free()
    assert tokens_of(outputs) == reference_answer(spec)[0]
    (details,) = [each.details for each in outputs if "kv_transfer_codec" in each.details]
    assert details["kv_transfer_codec"] == "none"


async def test_many_transfers_at_once_share_a_small_staging_area() -> None:
    specs = [encoded(f"r-{n}", [n, *range(100)], 4) for n in range(8)]
    async with cluster(
        encoding=Encoding(8 * UNIT), prefill_blocks=400, decode_blocks=400
    ) as running:
        answers = await asyncio.gather(*(run_disaggregated(running, spec) for spec in specs))
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()
    for spec, outputs in zip(specs, answers, strict=True):
        assert tokens_of(outputs) == reference_answer(spec)[0]


async def test_cancelled_transfers_free_their_space() -> None:
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    async with cluster(encoding=Encoding(8 * UNIT)) as running:
        for number in range(30):
            length = int(chance.integers(1, 120))
            prompt = [int(token) for token in chance.integers(0, 200, length)]
            spec = encoded(f"r-{number}", prompt, 20)
            await run_disaggregated(running, spec, cancel_after=int(chance.integers(1, 4)))
            await running.prefill.wait_until_free()
            await running.decode.wait_until_free()


async def test_a_damaged_encoding_is_read_again() -> None:
    spec = encoded("r", list(range(100)), 5)
    num_reads = 0

    def damage_first(endpoint: Endpoint, span: TransferRange) -> str:
        nonlocal num_reads
        num_reads += 1
        return "corrupt" if num_reads == 1 else ""

    async with cluster(encoding=Encoding()) as running:
        running.fabric.fault = damage_first
        outputs = await run_disaggregated(running, spec)
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()
    assert tokens_of(outputs) == reference_answer(spec)[0]


@pytest.mark.parametrize("fault", ["corrupt", "lost"])
async def test_a_transfer_that_is_always_damaged_fails_and_frees_its_space(fault: str) -> None:
    spec = encoded("r", list(range(100)), 5)
    async with cluster(encoding=Encoding()) as running:
        running.fabric.fault = lambda endpoint, span: fault
        outputs = await run_disaggregated(running, spec)
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert tokens_of(outputs[:1]) == (TokenId(reference_answer(spec)[0][0]),)
