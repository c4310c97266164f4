"""Tests which device a worker computes on, and what it runs there before the first request."""

import pytest
import torch

from baton.checkpoints.checkpoint import DEMO_MODEL
from baton.engine.plan import Plan, StepOutput
from baton.engine.runner import ModelRunner, pick_device
from baton.engine.runner_options import RunnerOptions
from baton.errors import Invalid


@pytest.mark.parametrize(("name", "index"), [("auto", 2), ("cuda", 2), ("cuda:1", 1)])
def test_gpu_has_an_index(monkeypatch: pytest.MonkeyPatch, name: str, index: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 2)
    assert pick_device(name) == torch.device("cuda", index)


def test_without_gpu_auto_means_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(Invalid, match="torch finds no GPU"):
        pick_device("cuda:0")


@pytest.mark.parametrize(
    ("num_blocks", "sizes"), [(64, [8, 8, 16, 32, 64, 128, 256, 512]), (3, [8, 8, 16, 32]), (1, [])]
)
def test_warm_up_steps_fit_into_the_pool(
    num_blocks: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RunnerOptions(device="cpu", num_blocks=num_blocks, block_tokens=16)
    runner = ModelRunner.load(DEMO_MODEL, options)
    plans: list[Plan] = []
    run = runner.run

    def spy(plan: Plan) -> StepOutput:
        plans.append(plan)
        return run(plan)

    monkeypatch.setattr(runner, "run", spy)
    runner.run_warm_up_steps()
    assert [sum(row.num_tokens for row in plan.rows) for plan in plans] == sizes
    windows = [[row.attention_window is not None for row in plan.rows] for plan in plans]
    assert windows == [[number == 1] * 2 for number in range(len(plans))]
    assert all(len(plan.rows) == 2 and plan.rows[0].num_tokens == 1 for plan in plans)
