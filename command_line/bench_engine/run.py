"""``baton bench engine``: loads the model, measures work after work, tells what each took."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from baton.checkpoint import ModelConfig, load_model_config, resolve_model
from baton.console import wide_console
from baton.engine.bench.bench_case import BenchCase, bench_cases
from baton.engine.bench.bench_result import BenchResult
from baton.engine.bench.bench_runner import BenchRunner, max_blocks
from baton.engine.bench.ceilings import MeasuredCeilings, best_of, measure_ceilings
from baton.engine.bench.memory_fit import split_by_memory
from baton.engine.bench.roofline_demand import ElementSizes, roofline_demand
from baton.engine.bench.stopwatch import median_time, time_repeatedly
from baton.engine.native.processor import model_name
from baton.engine.runner import ModelRunner, pick_device, pick_dtype, pick_kv_dtype
from baton.errors import Invalid
from command_line.bench_engine import roofline_plot
from command_line.bench_engine.config import EngineBenchConfig
from command_line.bench_engine.table import print_engine_result

FORMAT = "baton-bench-engine-1"
CONTEXTS = (512, 4096)

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineBenchResult:
    """What a run found, at least one figure. ``left_out``: works for whose KV there is no memory,
    and what they need."""

    model: str
    dtype: str
    quantization: str
    device: str
    machine: str
    threads: int
    computes: str
    chunk_tokens: int
    figures: tuple[BenchResult, ...]
    left_out: tuple[str, ...]

    @property
    def ceilings(self) -> MeasuredCeilings:
        """All figures have the same."""
        return self.figures[0].ceilings

    def as_dict(self) -> dict[str, object]:
        named = {name: getattr(self, name) for name in self.__slots__ if name != "figures"}
        return {
            "format": FORMAT,
            **named,
            "ceilings": asdict(self.ceilings),
            "figures": [figure.as_dict() for figure in self.figures],
        }


def run_engine_bench(question: EngineBenchConfig) -> None:
    """Raises Invalid before anything is measured, if anything is wrong."""
    roofline_plot.check_plot_path(question.plot)
    _check_writable(question.json_file)
    if question.settings.threads:
        torch.set_num_threads(question.settings.threads)
    with _progress() as tell:
        told = _measure(question, tell)
    if question.plot is not None:
        roofline_plot.draw_roofline(
            question.plot, told.figures, f"{told.model}, {told.dtype}, {told.machine}"
        )
    if question.json_file is not None and not question.to_stdout:
        question.json_file.write_text(json.dumps(told.as_dict(), indent=1) + "\n", encoding="utf-8")
    if question.to_stdout:
        print(json.dumps(told.as_dict()))
    else:
        print_engine_result(wide_console(), told)


def _measure(question: EngineBenchConfig, tell: Tell) -> EngineBenchResult:
    settings = question.settings
    path = resolve_model(settings.model)
    config = load_model_config(path)
    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device, config)
    kv_dtype = pick_kv_dtype(settings.kv_dtype, device, dtype)
    fitting, left_out = split_by_memory(_works(question, config), config, device, dtype, kv_dtype)
    tell(f"loading {path.name}")
    runner = _load(question, path, fitting)
    chunk = min(settings.chunk_tokens or settings.max_step_tokens, settings.max_step_tokens)
    stage = BenchRunner(runner, chunk, question.seed)
    figures = _figures(question, stage, fitting, runner, dtype, tell)
    return EngineBenchResult(
        model=path.name,
        dtype=str(dtype).removeprefix("torch."),
        quantization=runner.quantization,
        device=str(device),
        machine=torch.cuda.get_device_name(device) if device.type == "cuda" else model_name(),
        threads=torch.get_num_threads(),
        computes=runner.choice.told,
        chunk_tokens=chunk,
        figures=figures,
        left_out=tuple(left_out),
    )


def _figures(
    question: EngineBenchConfig,
    stage: BenchRunner,
    fitting: Sequence[BenchCase],
    runner: ModelRunner,
    dtype: torch.dtype,
    tell: Tell,
) -> tuple[BenchResult, ...]:
    """Ceilings are measured after each work, as whatever else the machine does comes and goes; the
    best of them count for all."""
    tensor, config = runner.pool.tensor, runner.model_config
    widths = ElementSizes.of(dtype, runner.quantization, tensor.dtype)
    times, found = [], []
    for number, work in enumerate(fitting, start=1):
        tell(f"{work} ({number} of {len(fitting)})")
        times.append(
            median_time(time_repeatedly(stage.step(work), question.rounds, question.seconds))
        )
        found.append(measure_ceilings(tensor.device, dtype, torch.get_num_threads()))
    ceilings = best_of(found)
    return tuple(
        BenchResult(work, spent, roofline_demand(work, config, widths), ceilings)
        for work, spent in zip(fitting, times, strict=True)
    )


def _works(question: EngineBenchConfig, config: ModelConfig) -> Sequence[BenchCase]:
    """Raises Invalid for a context that the model has no positions for."""
    most = config.max_position_embeddings
    contexts = question.contexts or [each for each in CONTEXTS if each <= most] or [most]
    if too_long := [context for context in contexts if context > most]:
        raise Invalid(f"--contexts {too_long[0]}: the model has {most:,} positions")
    return list(bench_cases(question.prefill_batches, question.decode_batches, contexts))


def _load(question: EngineBenchConfig, path: Path, fitting: Sequence[BenchCase]) -> ModelRunner:
    settings = question.settings
    return ModelRunner.load(
        path,
        device=settings.device,
        dtype=settings.dtype,
        num_blocks=max_blocks(fitting, settings.block_tokens),
        block_tokens=settings.block_tokens,
        cpu_kernels=settings.cpu_kernels,
        quantization=settings.quantization,
        kv_dtype=settings.kv_dtype,
        deterministic=settings.deterministic,
        cuda_graphs=settings.cuda_graphs,
    )


def _check_writable(path: Path | None) -> None:
    if path is None or str(path) == "-":
        return
    try:
        path.touch()
    except OSError as error:
        raise Invalid(f"--json {path}: {error.strerror}") from error


@contextmanager
def _progress() -> Iterator[Tell]:
    """On stderr: a line that changes, where somebody looks; else a line for each work."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(text)
