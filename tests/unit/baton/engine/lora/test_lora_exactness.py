"""Tests that adapters in the engine give the tokens of transformers and peft, in FP32: mixed with
one another and the base model in one batch, in chunks, after preemptions, KV transfers and
failovers, and with reused prefixes."""

import gc
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from baton.clock import SystemClock
from baton.core.adapter import AdapterRef
from baton.core.ids import BlockId, BlockKey, RequestId, TokenId
from baton.core.request import RequestSpec
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.executor import ThreadedExecutor
from baton.engine.native.decoder import NativeModel
from baton.engine.plan import Plan, Row
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from baton.errors import Invalid, Unavailable
from testkit.lora_zoo import ATTENTION, MLP, make_adapter
from testkit.model_zoo import make_model
from tests.engine_state import cached_tokens
from tests.exactness import Reference, greedy_spec, reference_of
from tests.unit.baton.engine.native_helpers import each_instruction_set, needs_kernels

__all__ = ["each_instruction_set"]

SEED = 20261121
TOKENS = 12
ROUNDS = 100
LENGTHS = [1, 15, 16, 17, 40, 70]
BLOCK = 16
WITHOUT_WINDOWS = ["llama", "qwen2", "qwen3-odd", "qwen3-moe"]
WITH_WINDOWS = ["mistral-window", "gemma3", "gpt-oss"]
KERNELS = ["auto", "off"]

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Tokens = list[int]


@dataclass(frozen=True)
class Case:
    """One prompt with its reference, to be answered with one adapter or the base model."""

    adapter: AdapterRef | None
    reference: Reference

    def spec(self, name: str, num_known: int = 0) -> RequestSpec:
        """Return the request after ``num_known`` tokens of its answer."""
        prompt = self.reference.prompt
        spec = greedy_spec(RequestId(name), prompt, len(self.reference.tokens))
        known = (TokenId(token) for token in self.reference.tokens[:num_known])
        return replace(spec, adapter=self.adapter, token_ids=(*spec.token_ids, *known))


class LoraModel:
    """A random model with three random adapters, and references for each of them."""

    def __init__(self, folder: Path, architecture: str, lengths: Sequence[int] = LENGTHS) -> None:
        self.model = make_model(folder / "model", architecture, seed=SEED)
        mlp = () if architecture in ("qwen3-moe", "gpt-oss") else MLP
        self.folders = [
            make_adapter(folder / "all", self.model, seed=2, targets=(*ATTENTION, *mlp)),
            make_adapter(
                folder / "attention", self.model, seed=3, rank=9, targets=("q_proj", "v_proj"),
                ranks={"q_proj": 3}, alpha_pattern={"v_proj": 5}, use_rslora=True,
            ),
            make_adapter(
                folder / "late", self.model, seed=4, rank=16, dtype=torch.bfloat16,
                targets=(*mlp[:1], *mlp[2:], "o_proj"),
            ),
        ]  # fmt: skip
        self._references = [self._refer(adapter, lengths) for adapter in (None, *self.folders)]

    def _refer(self, adapter: Path | None, lengths: Sequence[int]) -> list[Reference]:
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
        size = model.config.vocab_size
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter).eval()
        prompts = [
            np.random.default_rng(length).integers(3, size, size=length).tolist()
            for length in lengths
        ]
        return [reference_of(model, prompt, TOKENS) for prompt in prompts]

    def load_adapters(self, runner: ModelRunner, engine: Engine) -> list[Case]:
        """Load the adapters and return the cases: each prompt without and with each adapter."""
        refs: list[AdapterRef | None] = [None]
        for folder in self.folders:
            adapter = runner.load_adapter(folder)
            engine.add_adapter(adapter)
            refs.append(AdapterRef(folder.name, adapter.digest))
        return [
            Case(ref, reference)
            for ref, references in zip(refs, self._references, strict=True)
            for reference in references
        ]


def load(model: Path, kernels: str = "auto", **options: object) -> ModelRunner:
    given = {"device": "cpu", "dtype": "float32", "num_blocks": 400, "block_tokens": BLOCK}
    return ModelRunner.load(model, RunnerOptions(**{**given, "cpu_kernels": kernels, **options}))  # type: ignore[arg-type]


def make_engine(runner: ModelRunner, *, threaded: bool = False, **fields: object) -> Engine:
    limits = runner.limits
    config = {
        "max_model_tokens": 400,
        "max_batched_tokens": 64,
        "chunk_tokens": 24,
        "window_tokens": limits.kv_window_tokens,
        "num_full_groups": limits.num_full_groups,
        "num_windowed_groups": limits.num_windowed_groups,
        **fields,
    }
    return Engine(
        runner,
        EngineConfig(block_tokens=BLOCK, **config),  # type: ignore[arg-type]
        model_digest=runner.model_digest,
        kv_dtype=runner.kv_dtype,
        eos_token_ids=frozenset(),
        clock=SystemClock(),
        executor=ThreadedExecutor(runner) if threaded else None,
        adapters=runner.adapters,
    )


def run(engine: Engine, specs: Sequence[RequestSpec]) -> tuple[list[Tokens], list[int]]:
    """Answer the requests in one batch. Return the new tokens of each, and its number of cached
    tokens."""
    answers: dict[RequestId, Tokens] = {spec.request_id: [] for spec in specs}
    cached = dict.fromkeys(answers, 0)
    for spec in specs:
        engine.add(spec, Task.PREFILL_AND_DECODE)
    while engine.has_work():
        for output in engine.step().outputs:
            answers[output.request_id] += output.token_ids
            cached[output.request_id] += output.cached_tokens
    engine.check_integrity()
    return list(answers.values()), list(cached.values())


def specs_of(cases: Sequence[Case]) -> list[RequestSpec]:
    return [case.spec(str(number)) for number, case in enumerate(cases)]


def tokens_of(cases: Sequence[Case]) -> list[Tokens]:
    return [case.reference.tokens for case in cases]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", [*WITHOUT_WINDOWS, *WITH_WINDOWS])
def test_mixed_batch_has_the_tokens_of_peft(name: str, kernels: str, tmp_path: Path) -> None:
    """All prompts are the same with each adapter and the base model, and all are in one batch, so
    a block that is reused by another adapter would change an answer."""
    source = LoraModel(tmp_path, name, [*LENGTHS, 150] if name in WITH_WINDOWS else LENGTHS)
    runner = load(source.model, kernels)
    engine = make_engine(runner)
    cases = source.load_adapters(runner, engine)
    assert len({tuple(case.reference.tokens) for case in cases}) > len(cases) * 3 // 4
    answers, cached = run(engine, specs_of(cases))
    assert answers == tokens_of(cases)
    assert cached == [0] * len(cases)
    answers, cached = run(engine, specs_of(cases))
    assert answers == tokens_of(cases)
    assert sum(cached) > 0


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> LoraModel:
    return LoraModel(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.mark.parametrize("threaded", [False, True])
def test_preempted_requests_have_the_tokens_of_peft(qwen3: LoraModel, threaded: bool) -> None:
    runner = load(qwen3.model, num_blocks=24)
    engine = make_engine(
        runner, threaded=threaded, forecasts_memory=False, watermark_blocks=0, growth_tokens=0
    )
    cases = qwen3.load_adapters(runner, engine)
    assert run(engine, specs_of(cases))[0] == tokens_of(cases)
    assert engine.stats().num_preemptions > 0
    engine.close()


def test_failover_continues_with_the_tokens_of_peft(qwen3: LoraModel) -> None:
    runner = load(qwen3.model)
    engine = make_engine(runner)
    cases = qwen3.load_adapters(runner, engine)
    specs = [case.spec(str(n), num_known=1 + n % (TOKENS - 1)) for n, case in enumerate(cases)]
    answers, _ = run(engine, specs)
    known = [spec.num_emitted_tokens for spec in specs]
    assert answers == [
        tokens[count:] for tokens, count in zip(tokens_of(cases), known, strict=True)
    ]


def test_kv_transfer_continues_with_the_tokens_of_peft(qwen3: LoraModel) -> None:
    runners = [load(qwen3.model), load(qwen3.model)]
    left, right = engines = [make_engine(runner) for runner in runners]
    cases, _ = (qwen3.load_adapters(*each) for each in zip(runners, engines, strict=True))
    answers: dict[RequestId, Tokens] = {}
    tables = {}
    for spec in specs_of(cases):
        left.add(spec, Task.PREFILL)
    while left.has_work():
        result = left.step()
        tables |= {each.request_id: each.block_ids for each in result.progress}
        for output in result.outputs:
            answers[output.request_id] = list(output.token_ids)
    for spec in specs_of(cases):
        reservation = right.reserve_blocks(spec)
        assert reservation is not None
        pairs = list(zip(tables[spec.request_id], reservation.block_ids, strict=True))
        for source, target in pairs[reservation.num_cached_blocks :]:
            runners[1].pool.tensor[target] = runners[0].pool.tensor[source]
        right.start_decoding(spec.request_id, TokenId(answers[spec.request_id][0]))
        left.release_export(spec.request_id)
    while right.has_work():
        for output in right.step().outputs:
            answers[output.request_id] += output.token_ids
    assert [answers[spec.request_id] for spec in specs_of(cases)] == tokens_of(cases)
    for engine in engines:
        engine.check_integrity()


def test_store_serves_no_block_of_another_adapter(qwen3: LoraModel) -> None:
    """The first engine stores all its blocks by key; the second one imports what it finds there.
    Only the case that was computed before finds anything."""
    runners = [load(qwen3.model), load(qwen3.model)]
    left, right = (make_engine(runner) for runner in runners)
    cases = qwen3.load_adapters(runners[0], left)
    qwen3.load_adapters(runners[1], right)
    adapters = list(dict.fromkeys(case.adapter for case in cases))
    for adapter in adapters:
        own = [case for case in cases if case.adapter == adapter]
        others = [case for case in cases if case.adapter != adapter]
        store = _compute_and_store(left, runners[0], own)
        for case in others:
            assert not _import(right, runners[1], case.spec("x"), store)
        assert sum(_import(right, runners[1], case.spec("x"), store) for case in own) > 0
        answers, cached = run(right, specs_of(own))
        assert answers == tokens_of(own)
        assert sum(cached) > 0


def _compute_and_store(
    engine: Engine, runner: ModelRunner, cases: Sequence[Case]
) -> dict[BlockKey, torch.Tensor]:
    store: dict[BlockKey, torch.Tensor] = {}
    run(engine, specs_of(cases))
    for spec in specs_of(cases):
        keys = engine.key_hasher.make_chain(spec).keys
        block_ids = engine.pin_cached_blocks(keys, 0)
        for key, block_id in zip(keys, block_ids, strict=True):
            store[key] = runner.pool.tensor[block_id].clone()
        engine.unpin_blocks(block_ids)
    return store


def _import(
    engine: Engine, runner: ModelRunner, spec: RequestSpec, store: dict[BlockKey, torch.Tensor]
) -> int:
    """Import the prompt's blocks that are in the store, and return how many there are."""
    known = cached_tokens(engine, spec) // BLOCK
    keys = engine.key_hasher.make_chain(spec).keys
    found = [key for key in keys[known:] if key in store]
    block_ids = engine.begin_import(found, preceding_keys=keys[:known])
    assert block_ids is not None
    for key, block_id in zip(found, block_ids, strict=True):
        runner.pool.tensor[block_id] = store[key]
    engine.finish_import(found, block_ids, len(found))
    return len(found)


def test_adapters_come_and_go_under_traffic(qwen3: LoraModel) -> None:
    """A thread reads and packs adapters while steps run, as in a worker. Each adapter is unloaded
    while its request runs, and disappears from memory with the last one."""
    runner = load(qwen3.model)
    engine = make_engine(runner, threaded=True)
    cases = [case for case in qwen3.load_adapters(runner, engine) if case.adapter is not None]
    for adapter in engine.adapters.digests:
        engine.remove_adapter(adapter)
    assert engine.adapters.num_loaded == 0
    answers: dict[RequestId, Tokens] = {}
    expected: dict[RequestId, Tokens] = {}
    prepared: list[weakref.ref[object]] = []

    def step() -> None:
        if engine.has_work():
            for output in engine.step().outputs:
                answers[output.request_id] += output.token_ids

    with ThreadPoolExecutor(1) as thread:
        for number in range(ROUNDS):
            case = cases[number * 5 % len(cases)]
            assert case.adapter is not None
            folder = next(each for each in qwen3.folders if each.name == case.adapter.name)
            loading = thread.submit(runner.load_adapter, folder)
            while not loading.done():
                step()
            adapter = loading.result()
            prepared.append(weakref.ref(adapter.prepared))
            engine.add_adapter(adapter)
            del adapter, loading
            spec = case.spec(f"round-{number}")
            answers[spec.request_id], expected[spec.request_id] = [], case.reference.tokens
            engine.add(spec, Task.PREFILL_AND_DECODE)
            step()
            engine.remove_adapter(case.adapter.digest)
            with pytest.raises(Unavailable, match="is not loaded on this worker"):
                engine.add(case.spec("refused"), Task.PREFILL_AND_DECODE)
            engine.check_integrity()
    while engine.has_work():
        step()
        engine.drop_unused_adapters()
    engine.drop_unused_adapters()
    assert answers == expected
    assert engine.adapters.num_loaded == engine.adapters.size_bytes == 0
    pool = engine.stats().pool
    assert pool.free + pool.idle == pool.num_blocks
    engine.close()
    gc.collect()
    assert [each() for each in prepared if each() is not None] == []


@pytest.mark.parametrize("kernels", KERNELS)
def test_base_model_has_the_same_bits_beside_adapters(qwen3: LoraModel, kernels: str) -> None:
    """With the kernels, a row's logits are the same bits in any batch, with and without adapters
    beside it; with torch, the rows of the base model are close to it."""
    runner = load(qwen3.model, kernels)
    engine = make_engine(runner)
    cases = qwen3.load_adapters(runner, engine)
    rows = rows_of(cases)
    together = logits_of(runner, rows)
    for row, logits in zip(rows, together, strict=True):
        (alone,) = logits_of(runner, [row])
        if runner.backend.is_native:
            assert torch.equal(logits, alone)
        else:
            torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def rows_of(cases: Sequence[Case]) -> list[Row]:
    """Return a row for each case's whole prompt, decodes first."""
    specs = specs_of(cases)
    rows = [
        Row(
            spec.request_id, spec.token_ids, 0, tuple(BlockId(5 * n + i) for i in range(5)), True,
            spec.sampling, adapter=spec.adapter_digest,
        )
        for n, spec in enumerate(specs)
    ]  # fmt: skip
    return sorted(rows, key=lambda row: len(row.token_ids) > 1)


@torch.inference_mode()
def logits_of(runner: ModelRunner, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Return the logits of each row's last token."""
    prepared = runner.prepare(Plan(1, tuple(rows)))
    tokens = torch.tensor([token for row in rows for token in row.token_ids])
    hidden = runner._model.hidden(tokens, prepared.batch, lora=prepared.lora)
    return list(runner._model.logits(hidden, prepared.sampled_indices).unbind())


@needs_kernels
@pytest.mark.usefixtures("each_instruction_set")
def test_each_instruction_set_has_the_tokens_of_peft(qwen3: LoraModel) -> None:
    runner = load(qwen3.model)
    assert isinstance(runner._model, NativeModel)
    engine = make_engine(runner)
    cases = qwen3.load_adapters(runner, engine)
    assert run(engine, specs_of(cases))[0] == tokens_of(cases)


def test_steps_with_adapters_use_no_cuda_graph(qwen3: LoraModel) -> None:
    """The graphs were captured without adapters. Here they are replaced with a function that counts
    its calls, and has no graph for any batch."""
    runner = load(qwen3.model)
    engine = make_engine(runner)
    cases = qwen3.load_adapters(runner, engine)
    graphs = Mock(logits=Mock(return_value=None))
    runner._graphs = graphs
    for case in (cases[0], cases[-1]):
        graphs.logits.reset_mock()
        run(engine, [case.spec("x")])
        assert graphs.logits.called == (case.adapter is None)


def test_gpu_refuses_adapters_if_it_must_be_deterministic(qwen3: LoraModel) -> None:
    runner = load(qwen3.model, deterministic=True)
    runner.load_adapter(qwen3.folders[0])
    runner._device = torch.device("cuda")
    with pytest.raises(Invalid, match="not supported with deterministic=true"):
        runner.load_adapter(qwen3.folders[0])


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|down)_proj", "use_rslora": True},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 3}, "alpha_pattern":
            {"layers.1.self_attn.q_proj": 5}, "layers_to_transform": [1]},
    ],
)  # fmt: skip
def test_folder_that_peft_has_written(
    qwen3: LoraModel, options: dict[str, Any], tmp_path: Path
) -> None:
    """peft writes all its options, most of them with their defaults."""
    model = AutoModelForCausalLM.from_pretrained(qwen3.model, dtype=torch.float32)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, init_lora_weights=False, **options
    )
    torch.manual_seed(SEED)
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path)
    reference = reference_of(adapted, list(range(3, 40)), TOKENS)
    runner = load(qwen3.model)
    adapter = runner.load_adapter(tmp_path)
    engine = make_engine(runner)
    engine.add_adapter(adapter)
    case = Case(AdapterRef("saved", adapter.digest), reference)
    assert run(engine, [case.spec("x")])[0] == [reference.tokens]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bfloat16_is_close_to_torch(qwen3: LoraModel, quantization: str) -> None:
    """The kernels round where torch's modules do. BF16 has eight bits, and every layer rounds a
    dozen times, hence the tolerance."""
    results = []
    for kernels in KERNELS:
        runner = load(qwen3.model, kernels, dtype="bfloat16", quantization=quantization)
        cases = qwen3.load_adapters(runner, make_engine(runner))
        rows = rows_of(cases)
        results.append(torch.stack(logits_of(runner, rows)))
    worst = (results[0] - results[1]).abs().max() / results[1].abs().max()
    assert worst <= 5e-2
