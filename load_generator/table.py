"""An outcome on a terminal."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from load_generator.result import MAX_CPU_SHARE, BenchResult, Summary

LATENCIES: tuple[tuple[str, Callable[[BenchResult], Summary]], ...] = (
    ("first token (TTFT)", lambda outcome: outcome.ttft_seconds),
    ("between tokens, mean of an answer (TBT)", lambda outcome: outcome.tbt_seconds),
    ("between tokens, each (ITL)", lambda outcome: outcome.itl_seconds),
    ("whole answer", lambda outcome: outcome.e2e_seconds),
    ("late by the generator itself", lambda outcome: outcome.lag_seconds),
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
    """What makes the figures doubtful."""
    found = []
    if not outcome.kept_up:
        late = (outcome.lag_seconds["p99"] or 0.0) * 1e3
        told = f"the generator did not keep up: requests left {late:.0f} ms late (p99)"
        if outcome.cpu_share > MAX_CPU_SHARE:
            found.append(f"{told}, and it took {outcome.cpu_share:.0%} of a core: --processes N")
        else:
            found.append(f"{told}, and not for want of its own core: is this machine too busy?")
    if not outcome.num_requests:
        found.append("nothing was measured: the warm-up was not over")
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
                     f"{outcome.most_at_once:,} at once at most"),
        ("answered", f"{outcome.completed:,}, {outcome.throughput_rps:.2f} per second"),
        ("refused, failed", f"{outcome.rejected_ratio:.1%} (429), {outcome.failed_ratio:.1%}"),
        ("tokens per second", f"{outcome.output_tokens_per_second:,.0f} out, "
                              f"{outcome.input_tokens_per_second:,.0f} in"),
        ("tokens of a prompt, an answer", f"{_count(outcome.prompt_tokens)}, "
                                          f"{_count(outcome.answer_tokens)} in the mean"),
    ]  # fmt: skip
    if outcome.hit_ratio_tokens is not None:
        rows.append(("cached of prompts", f"{outcome.hit_ratio_tokens:.1%}"))
    if outcome.goodput_rps is not None and outcome.attainment is not None:
        shares = _shares(outcome.attainment_by_length_quartile or ())
        rows.append(("goodput", f"{outcome.goodput_rps:.2f} per second within the SLO"))
        rows.append(
            ("within the SLO", f"{outcome.attainment:.1%}; short to long prompts: {shares}")
        )
    cost = outcome.cpu_seconds_per_request * 1e3
    rows.append(("the generator's own CPU", f"{cost:.2f} ms per request"))
    return rows


def _latencies(outcome: BenchResult) -> Table:
    table = Table("milliseconds", box=None)
    for name in outcome.ttft_seconds:
        table.add_column(name, justify="right")
    for label, pick in LATENCIES:
        table.add_row(label, *(_milliseconds(value) for value in pick(outcome).values()))
    return table


def _errors(outcome: BenchResult) -> Table:
    table = Table("status", "kind", "count", "first message", box=None)
    for error in outcome.errors:
        told = Text(str(error["message"])[:100])
        table.add_row(str(error["status"] or "-"), error["code"], f"{error['count']:,}", told)
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f}"


def _count(counts: Summary) -> str:
    return "-" if counts["mean"] is None else f"{counts['mean']:,.0f}"


def _shares(shares: Sequence[float | None]) -> str:
    return " ".join("-" if share is None else f"{share:.1%}" for share in shares)
