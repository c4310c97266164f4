"""Prints the measured cells and what the policies choose in them, and returns them as rows."""

from collections.abc import Mapping, Sequence

from baton.core.cost import PrefillCost
from baton.core.kv_codec import CodecSpeed, KvCodecName
from benchmarks.codec_links.choice import choose_codec, choose_reload
from benchmarks.codec_links.kv_pool import KV_BYTES_PER_TOKEN
from benchmarks.codec_links.measurements import LINK, FetchMeasurement, TransferMeasurement

Row = dict[str, object]


def print_recompute(costs: Mapping[str, PrefillCost], tokens: Sequence[int]) -> None:
    for where, cost in costs.items():
        times = ", ".join(f"{count} tokens {cost.seconds(count):.3f} s" for count in tokens)
        print(f"computing the prompt again on {where}: {times}", flush=True)


def print_speeds(encoders: Sequence[CodecSpeed], decoders: Sequence[CodecSpeed]) -> None:
    for encoder, decoder in zip(encoders, decoders, strict=True):
        print(
            f"{encoder.codec:9} ratio {encoder.ratio:.3f}, encode "
            f"{encoder.encode_bytes_per_second / 1e9:.2f} GB/s, decode "
            f"{decoder.decode_bytes_per_second / 1e9:.2f} GB/s",
            flush=True,
        )


def transfer_rows(
    tokens: int, link: float, codecs: Sequence[KvCodecName], measured: TransferMeasurement
) -> list[Row]:
    """Print a line per codec, and one per choice."""
    rate = measured.meters[link].bytes_per_second(LINK)
    assert rate is not None
    raw = tokens * KV_BYTES_PER_TOKEN
    print(f"transfer, {tokens} tokens, {link:g} GB/s; measured link {rate / 1e9:.3f} GB/s")
    rows: list[Row] = []
    seconds = {}
    for codec in codecs:
        timings = measured.timings[link, codec]
        seconds[codec] = timings.median_seconds
        row: Row = {
            "row": "transfer", "tokens": tokens, "link": link, "codec": codec.value,
            "seconds": timings.median_seconds, "all_seconds": timings.seconds,
            "cpu_seconds": timings.median_cpu_seconds, "bytes": timings.size_bytes,
            "link_bytes_per_second": rate,
        }  # fmt: skip
        rows.append(row)
        print(
            f"  {codec:9} {timings.median_seconds:8.3f} s ({len(timings.seconds)} rounds), "
            f"{timings.median_cpu_seconds:7.3f} s of processors, {timings.size_bytes / raw:.3f} of "
            f"{raw / 1e6:,.0f} MB, the link alone {timings.size_bytes / link / 1e9:.3f} s"
        )
    for wire in [codec for codec in codecs if codec is not KvCodecName.NONE]:
        choice = choose_codec(tokens, rate, measured.encoders, measured.decoders, wire, seconds)
        predicted = ", ".join(f"{c} {s:.3f} s" for c, s in choice.predicted_seconds.items())
        print(
            f"  kv_codec_wire={wire}: {choice.codec}, {choice.of_best:.3f} of best "
            f"(predicted: {predicted})",
            flush=True,
        )
        rows.append(
            {
                "row": "codec choice",
                "tokens": tokens,
                "link": link,
                "wire": wire.value,
                "codec": choice.codec.value,
                "of_best": choice.of_best,
                "predicted_seconds": {c.value: s for c, s in choice.predicted_seconds.items()},
            }
        )
    return rows


def fetch_rows(
    tokens: int,
    codec: KvCodecName,
    measured: FetchMeasurement,
    speeds: Sequence[CodecSpeed],
    costs: Mapping[str, PrefillCost],
) -> list[Row]:
    """Print a line per link for ``codec``, and the choice between fetching and computing on each
    kind of hardware in ``costs``."""
    by_codec = {speed.codec: speed for speed in speeds}
    rows: list[Row] = []
    for (link, fetched), timings in measured.timings.items():
        if fetched is not codec:
            continue
        row: Row = {
            "row": "fetch", "tokens": tokens, "link": link, "codec": codec.value,
            "seconds": timings.median_seconds, "all_seconds": timings.seconds,
            "cpu_seconds": timings.median_cpu_seconds, "bytes": timings.size_bytes,
            "estimate_seconds": timings.estimate_seconds,
            "link_bytes_per_second": timings.link_bytes_per_second,
        }  # fmt: skip
        print(
            f"fetch, {tokens} tokens, {link:g} GB/s, {codec:9} {timings.median_seconds:8.3f} s "
            f"({len(timings.seconds)} rounds; worker's estimate {timings.estimate_seconds:.3f} s), "
            f"link {timings.link_bytes_per_second / 1e9:.3f} GB/s"
        )
        for where, cost in costs.items():
            choice = choose_reload(
                tokens, timings.link_bytes_per_second, by_codec.get(codec), cost,
                timings.estimate_seconds, timings.median_seconds,
            )  # fmt: skip
            row[where] = {
                "compute_seconds": cost.seconds(tokens), "conductor": choice.conductor.value,
                "worker": choice.mode.value, "of_best": choice.of_best,
            }  # fmt: skip
            print(
                f"  {where}: computing {cost.seconds(tokens):.3f} s; conductor {choice.conductor}, "
                f"worker {choice.mode}, {choice.of_best:.3f} of best",
                flush=True,
            )
        rows.append(row)
    return rows
