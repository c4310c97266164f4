"""The time of a KV transfer and of a prefix fetch over a limited link, by codec.

    sudo python -m benchmarks.codec_handoff [--tokens 4096,32768] [--links 0.1,1,10]
        [--codecs none,lossless,fp8,int4] [--rounds 3] [--limit-seconds 690] [--transport grpc]
        [--json FILE]

Two processes run in network namespaces of their own, joined by a veth pair whose rate ``tc tbf``
limits in both directions. This needs root, iproute2 (``apt-get install iproute2``), and memory for
the KV of the longest prompt on both sides (32,768 tokens: 4.8 GB each). The KV is that of an 8B
model (36 layers, 8 KV heads of 128, BF16, blocks of 16 tokens): normal values with a scale per
channel.

**transfer**: a prefill worker announces all blocks at once, and a decode worker reads them; the
time is that from the request until the last block is decoded. Announcements travel through pipes,
which are not limited. **fetch**: a prefill worker reads a prefix from another host's store node,
whose blocks were encoded when they were put. Encoding, reading and decoding are those of the
workers.

For each cell, the production policies choose from what the workers measure and report. The
conductor chooses the codec of the transfer, for each ``kv_codec_wire``. The conductor and the
worker choose whether to fetch or to compute the prompt again, on an H100 (the simulator's measured
profile) and on this CPU (one layer, measured). ``of best`` is the measured time of the choice
divided by the shortest; at most 1.05 is wanted. Both processes share this machine's cores, as no
two hosts do, so they may be the limit instead of a fast link. ``TCP`` is what a plain socket
reaches. With ``--transport nixl``, UCX's TCP sockets of one namespace have refused those of the
other so far.

Codecs take turns in transfers; rounds are repeated while the time of ``--limit-seconds`` suffices.
Smoke run: ``--tokens 512 --links 1 --rounds 1``. JSON is the last line.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from baton.core.cost import PrefillCost
from baton.core.kv_codec import CodecSpeed, KvCodecName
from baton.errors import BatonError
from benchmarks.codec_links import raw_tcp, recompute, table
from benchmarks.codec_links.commands import bench_process
from benchmarks.codec_links.kv_pool import (
    BLOCK_TOKENS,
    KV_BYTES_PER_TOKEN,
    SEED,
    check_memory,
)
from benchmarks.codec_links.measurements import FetchMeasurement, TransferMeasurement
from benchmarks.codec_links.network import joined_namespaces, limit_rate
from benchmarks.codec_links.rounds import run_rounds, shares
from benchmarks.machine import SYSTEM_CLOCK, describe

TCP_SECONDS = 1.0
RATIOS = {"none": 1.0, "lossless": 0.71, "fp8": 0.5, "int4": 0.29, "int2": 0.16}
"""Approximate ratios of the codecs, by which the time is divided."""

FIRST_ROUND_MARGIN = 1.3
"""A first round is expected to take this many times as long as the link alone."""

PYTHON_SHARE = 0.4
"""The share of a plain socket's fastest speed that a transfer is expected to reach."""

GRACE_SECONDS = 15.0


class LinkBenchmark:
    """Measures all cells, and collects their rows."""

    def __init__(self, options: argparse.Namespace, names: tuple[str, str]) -> None:
        self.options = options
        self.names = names
        self.end = SYSTEM_CLOCK() + options.limit_seconds
        self.costs: dict[str, PrefillCost] = {}
        self.speeds: tuple[CodecSpeed, ...] = ()
        self.rows: list[dict[str, object]] = []
        self.missing: list[str] = []
        self.fastest_socket = 0.0

    async def run(self) -> None:
        """Measure, but end some seconds after the time limit, whatever is left."""
        try:
            async with asyncio.timeout(self.options.limit_seconds + GRACE_SECONDS):
                await self._run()
        except TimeoutError:
            self.missing.append("all that follows the last lines above")

    async def _run(self) -> None:
        options = self.options
        self.costs["H100"] = recompute.h100_cost()
        if not options.no_cpu_prefill:
            self.costs["this CPU"] = await recompute.cpu_cost()
        table.print_recompute(self.costs, options.tokens)
        await self._measure_tcp()
        left = [tokens * weight for tokens in options.tokens for weight in (2, 1)]
        for tokens in options.tokens:
            check_memory(tokens)
            until = shares(left, SYSTEM_CLOCK(), self.end)
            await self._measure_transfers(tokens, until)
            del left[0]
            until = shares(left, SYSTEM_CLOCK(), self.end)
            await self._measure_fetches(tokens, until)
            del left[0]

    async def _measure_tcp(self) -> None:
        async with bench_process("raw_tcp", "serve", namespace=self.names[0]) as server:
            await server.receive()
            for link in self.options.links:
                limit_rate(self.names, link)
                rate = await raw_tcp.measure(self.names[1], TCP_SECONDS)
                self.fastest_socket = max(self.fastest_socket, rate)
                print(f"{link:6g} GB/s  TCP: {rate / 1e9:.2f} GB/s", flush=True)
                self.rows.append({"row": "tcp", "link": link, "bytes_per_second": rate})

    async def _measure_transfers(self, tokens: int, until: float) -> None:
        codecs = self.options.codecs
        async with TransferMeasurement.open(
            self.names, tokens, self.options.transport
        ) as measurement:
            self.speeds = measurement.encoders
            table.print_speeds(measurement.encoders, measurement.decoders)
            limit_rate(self.names, max(self.options.links))
            await measurement.warm_up()

            async def measure(link: float) -> None:
                limit_rate(self.names, link)
                await measurement.measure(link, codecs)

            missing = await self._rounds(tokens, codecs, measure, until)
        self.missing += [f"transfer of {tokens} tokens over {link:g} GB/s" for link in missing]
        for link in [link for link in self.options.links if link not in missing]:
            self.rows += table.transfer_rows(tokens, link, codecs, measurement)

    async def _measure_fetches(self, tokens: int, until: float) -> None:
        codecs = self.options.codecs
        async with FetchMeasurement.open(self.names, tokens, self.options.transport) as measurement:
            weights = [RATIOS[codec] for codec in codecs]
            for number, codec in enumerate(codecs):
                await measurement.publish(codec)

                async def measure(link: float, codec: KvCodecName = codec) -> None:
                    limit_rate(self.names, link)
                    await measurement.measure(link, codec)

                part = shares(weights[number:], SYSTEM_CLOCK(), until)
                missing = await self._rounds(tokens, [codec], measure, part)
                self.missing += [
                    f"fetch of {tokens} tokens in {codec} over {link:g} GB/s" for link in missing
                ]
                self.rows += table.fetch_rows(tokens, codec, measurement, self.speeds, self.costs)

    async def _rounds(
        self, tokens: int, codecs: Sequence[KvCodecName], measure: object, until: float
    ) -> list[float]:
        size = tokens * KV_BYTES_PER_TOKEN * sum(RATIOS[codec] for codec in codecs)

        def first_seconds(link: float) -> float:
            rate = min(link * 1e9, PYTHON_SHARE * self.fastest_socket)
            return FIRST_ROUND_MARGIN * size / rate

        assert callable(measure)
        return await run_rounds(
            self.options.links, self.options.rounds, measure, first_seconds, until, self.end,
            SYSTEM_CLOCK,
        )  # fmt: skip


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], epilog="See the module's docstring."
    )
    parser.add_argument("--tokens", type=partial(_numbers, int), default=[4096, 32768])
    parser.add_argument("--links", type=partial(_numbers, float), default=[0.1, 1.0, 10.0])
    parser.add_argument(
        "--codecs", type=partial(_numbers, KvCodecName),
        default=[KvCodecName(name) for name in ("none", "lossless", "fp8", "int4")],
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-seconds", type=float, default=690.0)
    parser.add_argument("--transport", choices=("grpc", "nixl"), default="grpc")
    parser.add_argument("--no-cpu-prefill", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the JSON to this file")
    options = parser.parse_args(arguments)
    if any(tokens < BLOCK_TOKENS or tokens % BLOCK_TOKENS for tokens in options.tokens):
        parser.error(f"--tokens must be multiples of {BLOCK_TOKENS}")
    if any(link <= 0 for link in options.links) or options.rounds < 1:
        parser.error("--links must be positive, and --rounds at least 1")
    if {KvCodecName.NONE, KvCodecName.LOSSLESS} - {*options.codecs}:
        parser.error("--codecs must include none and lossless, between which a conductor chooses")
    return options


def _numbers(kind: type, text: str) -> list[object]:
    return [kind(part) for part in text.split(",")]


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    machine = describe()
    print(json.dumps(machine), f"seed {SEED}, transport {options.transport}", flush=True)
    began = SYSTEM_CLOCK()
    if options.transport == "nixl":
        os.environ["UCX_TLS"] = "tcp,self"  # by itself, UCX would copy through the common memory
    try:
        with joined_namespaces() as names:
            benchmark = LinkBenchmark(options, names)
            asyncio.run(benchmark.run())
    except BatonError as error:
        sys.exit(f"error: {error}")
    for each in benchmark.missing:
        print(f"not measured, for lack of time: {each}")
    seconds = SYSTEM_CLOCK() - began
    result = json.dumps(
        {
            "machine": machine,
            "transport": options.transport,
            "seconds": seconds,
            "rows": benchmark.rows,
            "missing": benchmark.missing,
        }
    )
    if options.json is not None:
        options.json.write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    main(sys.argv[1:])
