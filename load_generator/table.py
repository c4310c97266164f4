"""The result of ``baton bench`` as tables."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from load_generator.result import MAX_CPU_SHARE, BenchResult, Summary

LATENCIES: tuple[tuple[str, Callable[[BenchResult], Summary]], ...] = (
    ("time to first token (TTFT)", lambda outcome: outcome.ttft_seconds),
    ("inter-token latency, mean of an answer", lambda outcome: outcome.tbt_seconds),
    ("inter-token latency, each token (ITL)", lambda outcome: outcome.itl_seconds),
    ("end to end", lambda outcome: outcome.e2e_seconds),
    ("lateness of the load generator", lambda outcome: outcome.lag_seconds),
)


def print_result(console: Console, title: str, outcome: BenchResult) -> None:
    console.print(title, highlight=False)
    console.print(_rates(outcome))
    console.print(_latencies(outcome))
    if outcome.errors:
        console.print(_errors(outcome))
    for line in warnings(outcome):
        console.print(f"! {line}", style="bold", highlight=False, markup=False)


def warnings(outcome: BenchResult) -> list[str]:
    """Return the reasons why the figures may not be valid."""
    found = []
    if not outcome.kept_up:
        late = (outcome.lag_seconds["p99"] or 0.0) * 1e3
        lag = f"the generator did not keep up: requests were sent {late:.0f} ms late (p99)"
        if outcome.cpu_share > MAX_CPU_SHARE:
            found.append(f"{lag}, and it took {outcome.cpu_share:.0%} of a core: use --processes N")
        else:
            found.append(f"{lag}, although it used less than a core: is this machine too busy?")
    if not outcome.num_requests:
        found.append("nothing was measured: the load ended during the warm-up")
    elif not outcome.completed:
        found.append("not one request was answered")
    return found


def _rates(outcome: BenchResult) -> Table:
    table = Table(box=None, show_header=False)
    for name, value in _rows(outcome):
        table.add_row(name, value)
    return table


def _rows(outcome: BenchResult) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{outcome.num_requests:,} in {outcome.seconds:.1f} s, "
                     f"{outcome.most_at_once:,} in flight at most"),
        ("answered", f"{outcome.completed:,}, {outcome.throughput_rps:.2f} per second"),
        ("rejected, failed", f"{outcome.rejected_ratio:.1%} (429), {outcome.failed_ratio:.1%}"),
        ("tokens per second", f"{outcome.output_tokens_per_second:,.0f} out, "
                              f"{outcome.input_tokens_per_second:,.0f} in"),
        ("mean tokens of a prompt, an answer", f"{_format_count(outcome.prompt_tokens)}, "
                                               f"{_format_count(outcome.answer_tokens)}"),
    ]  # fmt: skip
    if outcome.hit_ratio_tokens is not None:
        rows.append(("cached prompt tokens", f"{outcome.hit_ratio_tokens:.1%}"))
    if outcome.goodput_rps is not None and outcome.attainment is not None:
        shares = _format_shares(outcome.attainment_by_length_quartile or ())
        rows.append(("goodput", f"{outcome.goodput_rps:.2f} per second within the SLO"))
        rows.append(
            ("within the SLO", f"{outcome.attainment:.1%}; short to long prompts: {shares}")
        )
    cost = outcome.cpu_seconds_per_request * 1e3
    rows.append(("CPU of the load generator", f"{cost:.2f} ms per request"))
    return rows


def _latencies(outcome: BenchResult) -> Table:
    table = Table("milliseconds", box=None)
    for name in outcome.ttft_seconds:
        table.add_column(name, justify="right")
    for label, pick in LATENCIES:
        table.add_row(label, *(_format_milliseconds(value) for value in pick(outcome).values()))
    return table


def _errors(outcome: BenchResult) -> Table:
    table = Table("status", "kind", "count", "first message", box=None)
    for error in outcome.errors:
        message = Text(str(error["message"])[:100])
        table.add_row(str(error["status"] or "-"), error["code"], f"{error['count']:,}", message)
    return table


def _format_milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f}"


def _format_count(counts: Summary) -> str:
    return "-" if counts["mean"] is None else f"{counts['mean']:,.0f}"


def _format_shares(shares: Sequence[float | None]) -> str:
    return " ".join("-" if share is None else f"{share:.1%}" for share in shares)
