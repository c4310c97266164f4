"""The time of a KV transfer over a slow link, by codec.

    sudo python -m benchmarks.codec_handoff [--tokens 4096] [--links 0.1,1] [--codecs none,lossless]
        [--recompute-tokens-per-second N]

A source and a reader run in network namespaces of their own, joined by a veth pair whose rate
``tc tbf`` limits in both directions (so this needs root). The source has the KV of an 8B model (36
layers, 8 KV heads of 128, BF16, blocks of 16 tokens): normal values with a scale per channel. It
announces all blocks at once; the time is measured in the reader, from the first announcement until
the last block is decoded. Encoding, reading and decoding are those of the workers, over the gRPC
transport. Announcements travel through pipes, which are not limited.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial

import numpy as np
import xxhash

from baton.clock import SystemClock
from baton.core.ids import BlockId, BlockKey, RequestId, TokenId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef, KvTransferChunk
from baton.engine.kv_window import KvWindow
from baton.engine.result import PrefillProgress
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.registry import open_codecs
from baton.transport.base import Peer, Transport
from baton.transport.host_memory import HostMemory
from baton.transport.reads import read_and_verify
from baton.transport.selection import open_transports
from baton.worker.kv_layout import KvLayout
from baton.worker.staging_area import StagingArea
from benchmarks.machine import describe
from decode_worker.block_decoder import BlockDecoder
from prefill_worker.block_encoder import BlockEncoder, ExportCodec
from prefill_worker.kv_export import KvExport
from tests.contract.transport_peer import endpoint_from_json, endpoint_to_json

BLOCK_TOKENS = 16
FORMAT = BlockFormat("bfloat16", 36, BLOCK_TOKENS, 8, 128)
STAGING_BYTES = 256 * 2**20
RECENT_TOKENS = 128
SEED = 1
SOURCE, READER = "10.213.7.1", "10.213.7.2"
CLOCK = SystemClock()
TIMEOUT_SECONDS = 600.0
Pool = tuple[HostMemory, KvLayout, StagingArea]


def make_pool(num_blocks: int) -> Pool:
    size = num_blocks * FORMAT.size_bytes
    memory = HostMemory("handoff", size + STAGING_BYTES)

    def checksums(ranges: list[tuple[int, int]]) -> list[int]:
        return [xxhash.xxh3_64_intdigest(memory.view[at : at + n]) for at, n in ranges]

    def block_checksums(block_ids: list[BlockId]) -> list[int]:
        return checksums(
            [(block_id * FORMAT.size_bytes, FORMAT.size_bytes) for block_id in block_ids]
        )

    layout = KvLayout(
        "handoff", FORMAT.size_bytes, CHECKSUM_XXH3, block_checksums,  # type: ignore[arg-type]
        memory.region.address, checksums,  # type: ignore[arg-type]
    )  # fmt: skip
    return memory, layout, StagingArea(size, STAGING_BYTES)


def fill(memory: HostMemory, num_blocks: int) -> None:
    """Write normal values, with a scale per channel, to all blocks."""
    chance = np.random.default_rng(SEED)
    pool = np.frombuffer(memory.view, dtype=np.uint16)
    values = FORMAT.size_bytes // 2
    scales = np.exp(chance.normal(0, 1, (FORMAT.num_planes, 1, 8 * 128))).astype(np.float32)
    for block in range(num_blocks):
        drawn = chance.standard_normal((FORMAT.num_planes, BLOCK_TOKENS, 8 * 128), dtype=np.float32)
        upper = ((drawn * scales).view(np.uint32) >> 16).astype(np.uint16)
        pool[block * values : (block + 1) * values] = upper.ravel()


def open_grpc(memory: HostMemory, owner: str, host: str) -> Transport:
    (transport,) = open_transports(
        ["grpc"], owner=owner, generation=1, region=memory.region, clock=CLOCK, listen_host=host
    ).values()
    return transport


async def read_line() -> str:
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def run_source(num_blocks: int) -> None:
    """Serve transfers: for each line with a codec's name, announce all blocks as lines of JSON, and
    read the acknowledgements."""
    memory, layout, staging = make_pool(num_blocks)
    fill(memory, num_blocks)
    endpoint = open_grpc(memory, "source", SOURCE).export()
    codecs = open_codecs(FORMAT)
    print(endpoint_to_json(endpoint), flush=True)
    while name := (await read_line()).strip():
        tokens = num_blocks * BLOCK_TOKENS
        export = KvExport(layout, tokens, KvWindow(BLOCK_TOKENS), tokens, lambda complete: None)
        recent = (tokens - RECENT_TOKENS) // BLOCK_TOKENS
        chosen = ExportCodec(KvCodecName(name), KvCodecName.LOSSLESS, recent)
        encoder = BlockEncoder(layout, staging, codecs, chosen) if name != "none" else None
        export.attach_reader(endpoint, encoder)
        block_ids = tuple(BlockId(index) for index in range(num_blocks))
        keys = (BlockKey(b"k" * 16),) * num_blocks
        export.record_progress(PrefillProgress(RequestId("r"), tokens, block_ids, keys, 0))
        export.finish_prefill(TokenId(1), finished=False)

        async def acknowledge(export: KvExport = export) -> None:
            count = 0
            while count < num_blocks:
                count = int(await read_line())
                export.acknowledge(count)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(acknowledge())
            async for event in export.events():
                if isinstance(event, KvTransferChunk):
                    refs = [
                        [ref.offset_bytes, ref.size_bytes, ref.checksum, ref.codec.value]
                        for ref in event.blocks
                    ]
                    print(json.dumps([event.first_block, refs]), flush=True)
        export.close()
        staging.check_integrity()
        assert staging.used_bytes == 0


async def run_reader(num_blocks: int) -> None:
    """Read transfers: the endpoint comes in the first line, then codecs and chunks in turn."""
    memory, layout, staging = make_pool(num_blocks)
    np.frombuffer(memory.view, dtype=np.uint8)[:] = 0  # touch all pages
    transport = open_grpc(memory, "reader", READER)
    decoder = BlockDecoder(layout, staging, open_codecs(FORMAT), CLOCK, TIMEOUT_SECONDS)
    peer = transport.connect(endpoint_from_json(await read_line()))
    print("ready", flush=True)
    while (await read_line()).strip():
        began, count, size = 0.0, 0, 0
        while count < num_blocks:
            first, refs = json.loads(await read_line())
            began = began or CLOCK.monotonic()
            blocks = [
                BlockRef(at, n, checksum, BlockKey(b""), KvCodecName(codec))
                for at, n, checksum, codec in refs
            ]
            ids = [BlockId(index) for index in range(first, first + len(blocks))]
            await read_chunk(transport, peer, layout, decoder, blocks, ids)
            count, size = first + len(blocks), size + sum(block.size_bytes for block in blocks)
            print(json.dumps({"ack": count}), flush=True)
        print(json.dumps({"seconds": CLOCK.monotonic() - began, "bytes": size}), flush=True)


async def read_chunk(
    transport: Transport, peer: Peer, layout: KvLayout, decoder: BlockDecoder,
    blocks: list[BlockRef], ids: list[BlockId],
) -> None:  # fmt: skip
    if any(block.codec is not KvCodecName.NONE for block in blocks):
        decoder.check(blocks, decoder.accepted(exact=False))
        result = await decoder.read(transport, peer, blocks, ids, TIMEOUT_SECONDS)
        assert not result.bad
        return
    verify = partial(layout.verify_blocks, CHECKSUM_XXH3, blocks, ids)
    spans = layout.transfer_ranges(blocks, ids)
    read = await read_and_verify(transport, peer, spans, verify, TIMEOUT_SECONDS, CLOCK)
    assert read.num_verified == len(blocks)


# -- the two processes ---------------------------------------------------------------------------


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def joined_namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces that are joined by a veth pair."""
    names = f"baton-source-{os.getpid()}", f"baton-reader-{os.getpid()}"
    try:
        for name in names:
            shell(f"ip netns add {name}")
        shell(f"ip link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}")
        for name, address in zip(names, (SOURCE, READER), strict=True):
            shell(f"ip -n {name} address add {address}/24 dev veth0")
            shell(f"ip -n {name} link set lo up")
            shell(f"ip -n {name} link set veth0 up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def limit_rate(names: tuple[str, str], gigabytes_per_second: float) -> None:
    bits = int(gigabytes_per_second * 8e9)
    burst = max(65_536, int(gigabytes_per_second * 1e9 / 250))
    for name in names:
        shell(
            f"tc -n {name} qdisc replace dev veth0 root tbf rate {bits}bit burst {burst} "
            "latency 50ms"
        )


@asynccontextmanager
async def process(
    namespace: str, role: str, blocks: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", namespace, sys.executable, "-m", "benchmarks.codec_handoff",
        "--role", role, "--tokens", str(blocks * BLOCK_TOKENS),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=2**22,
    )  # fmt: skip
    try:
        yield started
    finally:
        started.kill()
        await started.wait()


async def transfer(
    source: asyncio.subprocess.Process, reader: asyncio.subprocess.Process, codec: str
) -> dict[str, float]:
    """Let the source send everything in a codec; return the reader's report."""
    assert source.stdin and source.stdout and reader.stdin and reader.stdout

    async def pass_chunks() -> None:
        while True:
            assert source.stdout and reader.stdin
            reader.stdin.write(await source.stdout.readline())

    source.stdin.write(f"{codec}\n".encode())
    reader.stdin.write(f"{codec}\n".encode())
    passing = asyncio.create_task(pass_chunks())
    try:
        while "ack" in (report := json.loads(await reader.stdout.readline())):
            source.stdin.write(f"{report['ack']}\n".encode())
    finally:
        passing.cancel()
    await asyncio.sleep(0.2)
    return dict(report)


async def measure(
    arguments: argparse.Namespace, show: Callable[[str], None]
) -> list[dict[str, object]]:
    num_blocks = arguments.tokens // BLOCK_TOKENS
    raw = num_blocks * FORMAT.size_bytes
    rows: list[dict[str, object]] = []
    with joined_namespaces() as names:
        async with (
            process(names[0], "source", num_blocks) as source,
            process(names[1], "reader", num_blocks) as reader,
        ):
            assert source.stdout and reader.stdin and reader.stdout
            reader.stdin.write(await source.stdout.readline())
            await reader.stdout.readline()
            await transfer(source, reader, "none")  # warm-up, at full speed
            for link in map(float, arguments.links.split(",")):
                limit_rate(names, link)
                for codec in arguments.codecs.split(","):
                    found = await transfer(source, reader, codec)
                    row = {"link_gb_per_s": link, "codec": codec, "raw_bytes": raw} | found
                    rows.append(row)
                    show(
                        f"{link:6g} GB/s  {codec:9} {found['seconds']:8.3f} s  "
                        f"{found['bytes'] / raw:5.2f} of {raw / 1e6:,.0f} MB; the link alone: "
                        f"{raw / link / 1e9:.3f} s raw"
                    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--links", default="0.1,1")
    parser.add_argument("--codecs", default="none,lossless,fp8,int4")
    parser.add_argument("--recompute-tokens-per-second", type=float)
    parser.add_argument("--role", choices=("source", "reader"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        run = run_source if arguments.role == "source" else run_reader
        asyncio.run(run(arguments.tokens // BLOCK_TOKENS))
        return
    print(json.dumps(describe()), asdict(FORMAT), f"{arguments.tokens} tokens, seed {SEED}")
    rows = asyncio.run(measure(arguments, print))
    if speed := arguments.recompute_tokens_per_second:
        print(f"computing the prompt again: {arguments.tokens / speed:.3f} s")
    print(json.dumps({"machine": describe(), "tokens": arguments.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
