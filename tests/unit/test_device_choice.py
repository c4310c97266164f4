"""Tests which device a worker computes on."""

import pytest
import torch

from baton.engine.runner import pick_device
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
