"""Prints the result of ``baton bench engine`` as tables."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from baton.engine.bench.bench_case_result import BenchCaseResult

if TYPE_CHECKING:
    from command_line.bench_engine.run import EngineBenchResult

GIGA = 1e9


def print_engine_result(console: Console, result: "EngineBenchResult") -> None:
    def print_line(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    print_line(_title(result))
    for kind in ("prefill", "decode"):
        if figures := [each for each in result.figures if each.case.kind == kind]:
            console.print(_table(kind, figures, on_cpu=result.device == "cpu"))
    print_line(_ceilings(result))
    for line in result.left_out:
        print_line(f"! left out: {line}")


def _title(result: "EngineBenchResult") -> str:
    threads = f", {result.threads} threads" if result.device == "cpu" else ""
    return (
        f"{result.model}, {result.dtype}, on {result.machine}{threads}; "
        f"computed by {result.computes}; prompts in chunks of {result.chunk_tokens} tokens"
    )


def _ceilings(result: "EngineBenchResult") -> str:
    ceilings = result.ceilings.wall
    return (
        f"ceilings: {ceilings.flops_per_second / GIGA:,.0f} GFLOP/s, "
        f"{ceilings.bytes_per_second / GIGA:,.1f} GB/s ({result.ceilings.method})"
    )


def _table(kind: str, figures: list[BenchCaseResult], *, on_cpu: bool) -> Table:
    table = Table(kind, box=None)
    names = ["tokens/s", "ms", "GFLOP/s", "GB/s", "FLOP/byte", "bound by", "of ceiling"]
    for name in [*names, "CPU ms", "of CPU ceiling"] if on_cpu else names:
        table.add_column(name, justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(f"{figure.case.batch} × {figure.case.context:,}", *_cells(figure, on_cpu))
    return table


def _cells(figure: BenchCaseResult, on_cpu: bool) -> list[str]:
    cells = [
        f"{figure.tokens_per_second:,.1f}",
        f"{figure.elapsed.wall * 1e3:,.2f}",
        f"{figure.flops_per_second / GIGA:,.1f}",
        f"{figure.bytes_per_second / GIGA:,.2f}",
        f"{figure.demand.intensity:,.1f}",
        figure.bound,
        f"{figure.roofline_share:.0%}",
    ]
    if on_cpu:
        cells += [f"{figure.elapsed.cpu * 1e3:,.2f}", f"{figure.cpu_roofline_share:.0%}"]
    return cells
