"""Runs ``baton bench engine``: loads the model, measures each case, and reports the results."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from baton.checkpoints.checkpoint import ModelConfig, load_model_config
from baton.checkpoints.hub import resolve_model
from baton.engine.bench.bench_case import BenchCase, bench_cases
from baton.engine.bench.bench_case_result import BenchCaseResult
from baton.engine.bench.bench_runner import BenchRunner, max_blocks
from baton.engine.bench.ceilings import MeasuredCeilings, highest_ceilings, measure_ceilings
from baton.engine.bench.memory_fit import split_by_memory
from baton.engine.bench.roofline_demand import ElementSizes, roofline_demand
from baton.engine.bench.stopwatch import median_time, time_repeatedly
from baton.engine.native.processor import model_name
from baton.engine.runner import ModelRunner, pick_device, pick_dtype, pick_kv_dtype
from baton.errors import Invalid
from baton.reports.console import open_console
from baton.worker.engine_settings import runner_options
from command_line.bench_engine import roofline_plot
from command_line.bench_engine.config import EngineBenchConfig
from command_line.bench_engine.profile import run_profile

FORMAT = "baton-bench-engine-1"
CONTEXTS = (512, 4096)

ShowProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineBenchResult:
    """The results of a run, in which at least one case was measured. ``left_out`` describes the
    cases that were not measured because their KV does not fit into memory, and says how much memory
    each needs."""

    model: str
    dtype: str
    quantization: str
    device: str
    machine: str
    threads: int
    computes: str
    chunk_tokens: int
    figures: tuple[BenchCaseResult, ...]
    left_out: tuple[str, ...]

    @property
    def ceilings(self) -> MeasuredCeilings:
        """The machine's measured peak rates of arithmetic and of memory, the same for all
        cases."""
        return self.figures[0].ceilings

    def as_dict(self) -> dict[str, object]:
        named = {name: getattr(self, name) for name in self.__slots__ if name != "figures"}
        return {
            "format": FORMAT,
            **named,
            "ceilings": asdict(self.ceilings),
            "figures": [figure.as_dict() for figure in self.figures],
        }


def run_engine_bench(config: EngineBenchConfig) -> None:
    """Measure and report all cases. Raises Invalid for a wrong option, before anything is
    measured."""
    roofline_plot.check_plot_path(config.plot)
    _check_writable("--json", config.json_file)
    _check_writable("--profile", config.profile)
    if config.settings.threads:
        torch.set_num_threads(config.settings.threads)
    if config.profile is not None:
        with _progress() as show:
            run_profile(config, config.profile, show)
        return
    with _progress() as show:
        result = _measure(config, show)
    if config.plot is not None:
        roofline_plot.draw_roofline(
            config.plot, result.figures, f"{result.model}, {result.dtype}, {result.machine}"
        )
    if config.json_file is not None and not config.writes_to_stdout:
        text = json.dumps(result.as_dict(), indent=1) + "\n"
        config.json_file.write_text(text, encoding="utf-8")
    if config.writes_to_stdout:
        print(json.dumps(result.as_dict()))
    else:
        print_engine_result(open_console(), result)


def _measure(options: EngineBenchConfig, show: ShowProgress) -> EngineBenchResult:
    settings = options.settings
    path = resolve_model(settings.model)
    config = load_model_config(path)
    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device, config)
    kv_dtype = pick_kv_dtype(settings.kv_dtype, device, dtype)
    fitting, left_out = split_by_memory(_cases(options, config), config, device, dtype, kv_dtype)
    show(f"loading {path.name}")
    runner = _load(options, path, fitting)
    chunk = min(settings.chunk_tokens or settings.max_batched_tokens, settings.max_batched_tokens)
    bench_runner = BenchRunner(runner, chunk, options.seed)
    figures = _measure_cases(options, bench_runner, fitting, runner, dtype, show)
    return EngineBenchResult(
        model=path.name,
        dtype=str(dtype).removeprefix("torch."),
        quantization=runner.quantization,
        device=str(device),
        machine=torch.cuda.get_device_name(device) if device.type == "cuda" else model_name(),
        threads=torch.get_num_threads(),
        computes=runner.backend.description,
        chunk_tokens=chunk,
        figures=figures,
        left_out=tuple(left_out),
    )


def _measure_cases(
    options: EngineBenchConfig,
    bench_runner: BenchRunner,
    fitting: Sequence[BenchCase],
    runner: ModelRunner,
    dtype: torch.dtype,
    show: ShowProgress,
) -> tuple[BenchCaseResult, ...]:
    """Measure the cases. The ceilings are measured again after each case, since other load on the
    machine varies; the best of them apply to all cases."""
    tensor, config = runner.pool.tensor, runner.model_config
    element_sizes = ElementSizes.for_formats(dtype, runner.quantization, tensor.dtype)
    times, found = [], []
    for number, case in enumerate(fitting, start=1):
        show(f"{case} ({number} of {len(fitting)})")
        step = bench_runner.make_action(case)
        times.append(median_time(time_repeatedly(step, options.rounds, options.seconds)))
        found.append(measure_ceilings(tensor.device, dtype, torch.get_num_threads()))
    ceilings = highest_ceilings(found)
    return tuple(
        BenchCaseResult(case, elapsed, roofline_demand(case, config, element_sizes), ceilings)
        for case, elapsed in zip(fitting, times, strict=True)
    )


def _cases(options: EngineBenchConfig, config: ModelConfig) -> Sequence[BenchCase]:
    """Return all cases to measure. Raises Invalid for a context that is too long for the model."""
    most = config.max_position_embeddings
    contexts = options.contexts or [each for each in CONTEXTS if each <= most] or [most]
    if too_long := [context for context in contexts if context > most]:
        raise Invalid(f"--contexts has {too_long[0]}; the model has only {most:,} positions")
    return list(bench_cases(options.prefill_batches, options.decode_batches, contexts))


def _load(options: EngineBenchConfig, path: Path, fitting: Sequence[BenchCase]) -> ModelRunner:
    settings = options.settings
    num_blocks = max_blocks(fitting, settings.block_tokens)
    return ModelRunner.load(
        path,
        replace(runner_options(settings), num_blocks=num_blocks),
    )


def _check_writable(flag: str, path: Path | None) -> None:
    if path is None or (flag == "--json" and str(path) == "-"):
        return
    try:
        path.touch()
    except OSError as error:
        raise Invalid(f"{flag} {path}: {error.strerror}") from error


@contextmanager
def _progress() -> Iterator[ShowProgress]:
    """Report progress on stderr: on a terminal in a line that is updated in place, otherwise in a
    line per case."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(text)


GIGA = 1e9


def print_engine_result(console: Console, result: EngineBenchResult) -> None:
    def print_line(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    print_line(_title(result))
    for kind in ("prefill", "decode"):
        if figures := [each for each in result.figures if each.case.kind == kind]:
            console.print(_table(kind, figures, on_cpu=result.device == "cpu"))
    print_line(_ceilings(result))
    for line in result.left_out:
        print_line(f"! left out: {line}")


def _title(result: EngineBenchResult) -> str:
    threads = f", {result.threads} threads" if result.device == "cpu" else ""
    return (
        f"{result.model}, {result.dtype}, on {result.machine}{threads}; "
        f"computed by {result.computes}; prompts in chunks of {result.chunk_tokens} tokens"
    )


def _ceilings(result: EngineBenchResult) -> str:
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
