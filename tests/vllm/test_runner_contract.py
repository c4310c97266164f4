"""Runs the contract tests of model runners on vLLM: with one rank in this process, and with two
ranks in processes of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.checkpoints.checkpoint import load_model_limits
from baton.vllm_engine.runner import VllmRunner
from testkit.model_zoo import make_model
from tests.contract.runner_contract import (
    ANSWER_TOKENS,
    ARCHITECTURE,
    PROMPT_TOKENS,
    Request,
    RunnerContract,
    Steps,
    prompt,
    runner_options,
)

EAGER = "--enforce-eager"
ARGUMENTS = {"one rank": EAGER, "two ranks": f"{EAGER} --tensor-parallel-size 2"}


@pytest.fixture(scope="module", autouse=True)
def ranks_share_cores() -> Iterator[None]:
    """Let all ranks share the cores. By default, vLLM binds each rank to its own NUMA node, and
    fails to start if there are fewer nodes than ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), ARCHITECTURE)


def load(model: Path, arguments: str = EAGER, **changes: object) -> VllmRunner:
    return VllmRunner.load(model, load_model_limits(model), runner_options(**changes), arguments)


@pytest.fixture(scope="module", params=ARGUMENTS.values(), ids=ARGUMENTS.keys())
def runner(request: pytest.FixtureRequest, model: Path) -> Iterator[VllmRunner]:
    loaded = load(model, request.param)
    yield loaded
    loaded.close()


@pytest.mark.timeout(300)
class TestVllmRunner(RunnerContract):
    """Runs the contract tests of model runners on :class:`VllmRunner`."""


@pytest.mark.timeout(300)
def test_kv_can_be_exchanged_whatever_the_number_of_ranks(model: Path) -> None:
    runners = [load(model, arguments) for arguments in ARGUMENTS.values()]
    try:
        first, second = runners
        assert first.kv_layout == second.kv_layout
        assert first.model_digest == second.model_digest
        steps = [Steps(runner) for runner in runners]
        expected = steps[0].finish(steps[0].request("expected", prompt(1)))
        for source, target in (steps, steps[::-1]):
            prefill = source.request("prefill", prompt(1))
            source.advance(prefill)
            blocks = target.blocks(PROMPT_TOKENS + ANSWER_TOKENS)
            for ours, theirs in zip(prefill.block_ids, blocks, strict=True):
                target.runner.pool.tensor[theirs].copy_(source.runner.pool.tensor[ours])
            decode = Request(
                "decode", prefill.tokens, blocks,
                num_computed=prefill.num_computed, num_prompt_tokens=PROMPT_TOKENS,
            )  # fmt: skip
            assert target.finish(decode) == expected
    finally:
        for runner in runners:
            runner.close()


@pytest.mark.timeout(300)
def test_kv_is_not_exchanged_between_other_models_or_types(model: Path, tmp_path: Path) -> None:
    def identity(path: Path, **changes: object) -> tuple[str, bytes]:
        runner = load(path, **changes)
        runner.close()
        return runner.kv_layout, runner.model_digest

    first = identity(model)
    assert identity(model, num_blocks=20) == first
    others = {
        identity(model, dtype="bfloat16"),
        identity(make_model(tmp_path, ARCHITECTURE, seed=2), block_tokens=64),
    }
    assert len(others) == 2
    assert not {first[0]} & {layout for layout, _ in others}
    assert not {first[1]} & {digest for _, digest in others}
