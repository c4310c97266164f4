"""Compares the answers of models with adapters (LoRA) on a GPU with the CPU's; run by
``gpu_check``."""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.clock import SystemClock
from baton.core.adapter import AdapterRef
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from tools.gpu_correctness import CHUNK_TOKENS
from tools.gpu_speed import GREEDY
from tools.gpu_timing import GpuTableRow


def adapters_are_right(place: str = "cuda") -> Iterator[GpuTableRow]:
    """Compare the GPU's greedy tokens with the CPU's, in FP32, for batches of prompts without and
    with each of two adapters. Prompts are computed in chunks, beside decodes of other requests."""
    from tests.lora_zoo import ATTENTION, MLP, make_adapter
    from tests.model_zoo import make_model

    prompts = [[5 + 7 * n % 300 for n in range(size)] for size in (9, 40, 70)]
    with tempfile.TemporaryDirectory() as folder:
        for name, targets in (("qwen3", (*ATTENTION, *MLP)), ("qwen3-moe", ATTENTION)):
            path = make_model(Path(folder) / name, name)
            adapters = [
                make_adapter(Path(folder) / f"{name} {seed}", path, seed=seed, targets=targets)
                for seed in (1, 2)
            ]
            got, wanted = (
                _answers_with_adapters(
                    ModelRunner.load(
                        path, RunnerOptions(device=each, dtype="float32", num_blocks=256)
                    ),
                    adapters,
                    prompts,
                )
                for each in (place, "cpu")
            )
            pairs = zip(itertools.chain(*got), itertools.chain(*wanted), strict=True)
            equal, total = sum(ours == theirs for ours, theirs in pairs), sum(map(len, wanted))
            differ = len({tuple(answer) for answer in wanted})
            result = f"{equal} of {total} tokens equal the CPU's, {differ} different answers"
            yield GpuTableRow(f"{name} with adapters in FP32, greedy", result, ok=equal == total)


def _answers_with_adapters(
    runner: ModelRunner, folders: Sequence[Path], prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the greedy answers to the prompts: first without an adapter, then with each."""
    engine = Engine(
        runner,
        EngineConfig(
            block_tokens=runner.block_tokens,
            max_model_tokens=512,
            max_batched_tokens=CHUNK_TOKENS,
            vocab_size=runner.model_config.vocab_size,
            window_tokens=runner.limits.kv_window_tokens,
            num_full_groups=runner.limits.num_full_groups,
            num_windowed_groups=runner.limits.num_windowed_groups,
        ),
        model_digest=b"model",
        kv_dtype=runner.kv_dtype,
        eos_token_ids=frozenset(),
        clock=SystemClock(),
        executor=runner.make_executor(),
        adapters=runner.adapters,
    )
    refs: list[AdapterRef | None] = [None]
    for folder in folders:
        adapter = runner.load_adapter(folder)
        engine.add_adapter(adapter)
        refs.append(AdapterRef(folder.name, adapter.digest))
    answers: dict[RequestId, list[int]] = {}
    for number, (ref, prompt) in enumerate(itertools.product(refs, prompts)):
        request_id = RequestId(str(number))
        answers[request_id] = []
        tokens = tuple(map(TokenId, prompt))
        spec = RequestSpec(request_id, Epoch(1), tokens, len(tokens), GREEDY, adapter=ref)
        engine.add(spec, Task.PREFILL_AND_DECODE)
    while engine.has_work():
        for output in engine.step().outputs:
            answers[output.request_id] += map(int, output.token_ids)
    engine.close()
    return list(answers.values())
