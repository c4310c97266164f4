"""A step that is launched on its device, and whose output may not be complete yet."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from baton.core.request import TokenLogprob
from baton.engine.plan import SampledToken, StepOutput


class SampledBatch(Protocol):
    """The sampled tokens of a batch. ``tokens`` [num_rows] are on the device."""

    @property
    def tokens(self) -> torch.Tensor: ...

    def wait(self) -> list[SampledToken | None]:
        """Wait until the device has done all work up to the sampling, and return one token per row,
        or None for a row whose mask allows no token."""
        ...


class SampledOnHost:
    """Implements :class:`SampledBatch` for a sampler that computes on the host."""

    def __init__(self, sampled: list[SampledToken | None]) -> None:
        self._sampled = sampled

    @property
    def tokens(self) -> torch.Tensor:
        return torch.tensor([0 if each is None else each.token_id for each in self._sampled])

    def wait(self) -> list[SampledToken | None]:
        return self._sampled


class LaunchedModelStep:
    """A launched step of :class:`baton.engine.runner.ModelRunner`. Of its ``num_rows`` rows, those
    with the indices ``sampled_rows`` sample, in the order of ``sampled``. ``following`` is that of
    :class:`baton.engine.plan.StepOutput`."""

    def __init__(
        self,
        num_rows: int,
        sampled_rows: Sequence[int],
        sampled: SampledBatch,
        prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...],
        following: Mapping[int, tuple[SampledToken, ...]] = MappingProxyType({}),
    ) -> None:
        self.sampled_rows = sampled_rows
        self.sampled = sampled
        self._num_rows = num_rows
        self._prompt_logprobs = prompt_logprobs
        self._following = following
        self._output: StepOutput | None = None

    def wait(self) -> StepOutput:
        """Implement :meth:`baton.engine.executor.LaunchedStep.wait`."""
        if self._output is None:
            tokens: list[SampledToken | None] = [None] * self._num_rows
            for index, token in zip(self.sampled_rows, self.sampled.wait(), strict=True):
                tokens[index] = token
            self._output = StepOutput(tuple(tokens), self._prompt_logprobs, self._following)
        return self._output
