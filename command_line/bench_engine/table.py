"""What was measured, on a terminal."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from baton.engine.bench.bench_result import BenchResult

if TYPE_CHECKING:
    from command_line.bench_engine.run import EngineBenchResult

GIGA = 1e9


def print_engine_result(console: Console, told: "EngineBenchResult") -> None:
    def tell(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    tell(_title(told))
    for kind in ("prefill", "decode"):
        if figures := [each for each in told.figures if each.work.kind == kind]:
            console.print(_table(kind, figures, on_cpu=told.device == "cpu"))
    tell(_ceilings(told))
    for line in told.left_out:
        tell(f"! left out: {line}")


def _title(told: "EngineBenchResult") -> str:
    where = f"{told.machine}, {told.threads} threads" if told.device == "cpu" else told.machine
    return (
        f"{told.model}, {told.dtype}, on {where}; computed by {told.computes}; "
        f"prompts {told.chunk_tokens} tokens a step"
    )


def _ceilings(told: "EngineBenchResult") -> str:
    ceilings = told.ceilings.wall
    return (
        f"ceilings: {ceilings.flops_per_second / GIGA:,.0f} GFLOP/s, "
        f"{ceilings.bytes_per_second / GIGA:,.1f} GB/s ({told.ceilings.method})"
    )


def _table(kind: str, figures: list[BenchResult], *, on_cpu: bool) -> Table:
    table = Table(kind, box=None)
    names = ["tokens/s", "ms", "GFLOP/s", "GB/s", "FLOP/byte", "bound by", "of the roof"]
    for name in [*names, "CPU ms", "of a core's"] if on_cpu else names:
        table.add_column(name, justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(f"{figure.work.batch} × {figure.work.context:,}", *_cells(figure, on_cpu))
    return table


def _cells(figure: BenchResult, on_cpu: bool) -> list[str]:
    cells = [
        f"{figure.tokens_per_second:,.1f}",
        f"{figure.spent.wall * 1e3:,.2f}",
        f"{figure.flops_per_second / GIGA:,.1f}",
        f"{figure.bytes_per_second / GIGA:,.2f}",
        f"{figure.demand.intensity:,.1f}",
        figure.bound,
        f"{figure.share:.0%}",
    ]
    if on_cpu:
        cells += [f"{figure.spent.cpu * 1e3:,.2f}", f"{figure.cpu_share:.0%}"]
    return cells
