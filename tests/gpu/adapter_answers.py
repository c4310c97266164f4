"""Generates answers with adapters (LoRA) in one engine."""

import itertools
from collections.abc import Sequence
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
from tests.gpu.device import CHUNK_TOKENS, GREEDY

PROMPTS = [[5 + 7 * n % 300 for n in range(size)] for size in (9, 40, 70)]


def answers_with_adapters(place: str, model: Path, folders: Sequence[Path]) -> list[list[int]]:
    """Return the greedy answers, in FP32 on the device ``place``, to each of ``PROMPTS`` in one
    batch: first without an adapter, then with each."""
    runner = ModelRunner.load(model, RunnerOptions(device=place, dtype="float32", num_blocks=256))
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
    for number, (ref, prompt) in enumerate(itertools.product(refs, PROMPTS)):
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
