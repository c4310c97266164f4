"""Measures transfers and fetches between two processes, for one number of tokens."""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.core.kv_codec import CodecSpeed, KvCodecName
from baton.errors import Unavailable
from baton.transport.link_meter import LinkMeter
from benchmarks.codec_links.commands import BenchProcess, bench_process
from benchmarks.codec_links.kv_pool import BLOCK_TOKENS
from benchmarks.machine import SYSTEM_CLOCK

LINK = "link"


@dataclass
class Timings:
    """The times of one codec over one link. ``cpu_seconds`` are those of both processes of a
    transfer, and of the reader of a fetch."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    size_bytes: int = 0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_cpu_seconds(self) -> float:
        return statistics.median(self.cpu_seconds)


class TransferMeasurement:
    """Transfers KV from a prefill worker to a decode worker. ``meters`` are fed as that of the
    decode worker is."""

    def __init__(self, source: BenchProcess, reader: BenchProcess) -> None:
        self._source, self._reader = source, reader
        self.encoders: tuple[CodecSpeed, ...] = ()
        self.decoders: tuple[CodecSpeed, ...] = ()
        self.meters: dict[float, LinkMeter] = {}
        self.timings: dict[tuple[float, KvCodecName], Timings] = {}

    @classmethod
    @asynccontextmanager
    async def open(
        cls, names: tuple[str, str], num_tokens: int, transport: str
    ) -> AsyncIterator["TransferMeasurement"]:
        """Start both workers, one after the other: each measures its codecs alone."""
        count = num_tokens // BLOCK_TOKENS
        async with bench_process("source", count, transport, namespace=names[0]) as source:
            found = await source.receive()
            async with bench_process("reader", count, transport, namespace=names[1]) as reader:
                made = cls(source, reader)
                made.encoders = _speeds(found["speeds"])
                made.decoders = _speeds((await reader.ask(found["endpoint"]))["speeds"])
                yield made

    async def warm_up(self) -> None:
        """Connect, and use both ways of reading once."""
        for codec in (KvCodecName.NONE, KvCodecName.LOSSLESS):
            await self._transfer(codec)

    async def measure(self, link: float, codecs: Sequence[KvCodecName]) -> None:
        """Transfer everything in each of the codecs."""
        meter = self.meters.setdefault(link, LinkMeter())
        for codec in codecs:
            began = SYSTEM_CLOCK()
            report, cpu = await self._transfer(codec)
            timings = self.timings.setdefault((link, codec), Timings())
            timings.seconds.append(report["ended"] - began)
            timings.cpu_seconds.append(cpu + report["cpu_seconds"])
            timings.size_bytes = report["bytes"]
            meter.record(LINK, report["bytes"], report["link_seconds"])

    async def _transfer(self, codec: KvCodecName) -> tuple[dict[str, Any], float]:
        """Return the reader's report with the time of its arrival, and the processor time of the
        source."""
        self._source.send(codec.value)
        async with asyncio.TaskGroup() as tasks:
            chunks = tasks.create_task(self._pass_chunks())
            report = tasks.create_task(self._pass_acknowledgements())
        return report.result(), chunks.result()

    async def _pass_chunks(self) -> float:
        while not (line := await self._source.receive_line()).startswith(b"{"):
            self._reader.send_line(line)
        return float(json.loads(line)["cpu_seconds"])

    async def _pass_acknowledgements(self) -> dict[str, Any]:
        while isinstance(answer := await self._reader.receive(), int):
            self._source.send(answer)
        return {**answer, "ended": SYSTEM_CLOCK()}


@dataclass
class FetchTimings(Timings):
    """Times of fetches, and what the worker measured and estimated before the last one."""

    estimate_seconds: float = 0.0
    link_bytes_per_second: float = 0.0


class FetchMeasurement:
    """Fetches a prefix from a store node, in one codec after the other: the store has room for
    one."""

    def __init__(self, num_blocks: int, store: BenchProcess, fetcher: BenchProcess) -> None:
        self._num_blocks = num_blocks
        self._store, self._fetcher = store, fetcher
        self._stored_bytes = 0
        self.timings: dict[tuple[float, KvCodecName], FetchTimings] = {}

    @classmethod
    @asynccontextmanager
    async def open(
        cls, names: tuple[str, str], num_tokens: int, transport: str
    ) -> AsyncIterator["FetchMeasurement"]:
        count = num_tokens // BLOCK_TOKENS
        async with bench_process("store", count, transport, namespace=names[0]) as store:
            address = (await store.receive())["address"]
            arguments = (count, transport, address)
            async with bench_process("fetcher", *arguments, namespace=names[1]) as fetcher:
                await fetcher.receive()
                yield cls(count, store, fetcher)

    async def publish(self, codec: KvCodecName) -> None:
        """Store the prefix in ``codec``."""
        self._stored_bytes = (await self._store.ask(codec.value))["bytes"]

    async def measure(self, link: float, codec: KvCodecName) -> None:
        """Fetch the prefix, which was published in ``codec``."""
        report = await self._fetcher.ask(self._stored_bytes)
        if report["error"] or report["num_blocks"] != self._num_blocks:
            raise Unavailable(
                f"only {report['num_blocks']} of {self._num_blocks} blocks were fetched over "
                f"{link:g} GB/s: {report['error'] or 'a block was damaged'}"
            )
        timings = self.timings.setdefault((link, codec), FetchTimings())
        timings.seconds.append(report["seconds"])
        timings.cpu_seconds.append(report["cpu_seconds"])
        timings.size_bytes = self._stored_bytes
        timings.estimate_seconds = report["estimate_seconds"]
        timings.link_bytes_per_second = report["link_bytes_per_second"]


def _speeds(found: list[dict[str, Any]]) -> tuple[CodecSpeed, ...]:
    return tuple(CodecSpeed(**{**each, "codec": KvCodecName(each["codec"])}) for each in found)
