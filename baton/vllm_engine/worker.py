"""Makes vLLM's workers sample by Baton's rules and keep the KV cache in memory that other processes
can read. vLLM creates its workers from the class that its argument ``worker_cls`` names, in Baton's
process or in one process per rank. The classes for CPUs and GPUs are
:mod:`baton.vllm_engine.cpu_worker` and :mod:`baton.vllm_engine.gpu_worker`."""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput

from baton.engine.plan import Row, SampledToken
from baton.engine.prompt_logprobs import PromptLogprobs, score_row
from baton.system.child_guard import die_with_parent
from baton.system.stop_signals import ignore_stop_signals
from baton.vllm_engine.rank_monitor import send_heartbeats

Sampler = Callable[[torch.Tensor, Sequence[Row]], list[SampledToken | None]]
StepRows = Mapping[str, Row]
"""The plan's rows by vLLM's request id."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The result of a step: by vLLM's request id, the sampled token of each row that samples, and
    the logprobs of each row's prompt logprob targets."""

    sampled: dict[str, SampledToken | None]
    prompt_logprobs: dict[str, PromptLogprobs]


class RowSampler(torch.nn.Module):
    """Replaces vLLM's sampler. Each request is sampled as its row of the plan says, as in Baton's
    own engine, so that a token depends on (seed, position) and not on the worker or the batch.

    Before each step, set ``rows`` to the step's rows in batch order, with None for each request
    that is not sampled. After the step, ``result`` has one entry per entry of ``rows``: the sampled
    token, or None if there is none."""

    def __init__(self, sample: Sampler) -> None:
        super().__init__()
        self._sample = sample
        self.rows: list[Row | None] = []
        self.result: list[SampledToken | None] = []

    def forward(
        self, logits: torch.Tensor, sampling_metadata: object, **_: object
    ) -> SamplerOutput:
        wanted = [index for index, row in enumerate(self.rows) if row is not None]
        rows = [row for row in self.rows if row is not None]
        picked = logits if len(wanted) == len(self.rows) else logits[wanted]
        sampled = self._sample(picked.float(), rows)
        self.result = [None] * len(self.rows)
        tokens = torch.zeros((len(self.rows), 1), dtype=torch.int32)
        for index, token in zip(wanted, sampled, strict=True):
            self.result[index] = token
            if token is not None:
                tokens[index, 0] = token.token_id
        return SamplerOutput(sampled_token_ids=tokens.to(logits.device), logprobs_tensors=None)


class SamplingWorker:
    """Mix-in that makes a worker class of vLLM sample by Baton's rules. A subclass lists this class
    before vLLM's worker class among its bases."""

    model_runner: Any
    rank: int

    def init_device(self) -> None:
        if multiprocessing.parent_process() is not None:  # this process is a rank
            die_with_parent()
            ignore_stop_signals()
        super().init_device()  # type: ignore[misc]
        self._sampler = RowSampler(self._make_sampler())

    def _make_sampler(self) -> Sampler:
        """Return the function that samples rows on the worker's device."""
        raise NotImplementedError

    def compile_or_warm_up_model(self) -> Any:
        warmed_up = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.model_runner.sampler = self._sampler  # the warm-up needs vLLM's own sampler
        return warmed_up

    def attention_identity(self) -> str:
        """Return the device's type and the attention kernels, which determine the order of the
        bytes within a page of the KV cache. Call it after ``initialize_from_config``."""
        kernels = {
            f"{group.backend.get_name()}/{getattr(group.get_metadata_builder(), 'isa', '')}"
            for groups in self.model_runner.attn_groups
            for group in groups
        }
        return f"{current_platform.device_type}:{'+'.join(sorted(kernels))}"

    def unsupported_feature(self) -> str:
        """Return what the loaded model does that Baton does not support; an empty text if there is
        nothing."""
        if getattr(self.model_runner.model, "token_lookback_depth", 0):
            return "the model reads token ids from before a prefill chunk"
        return ""

    def send_heartbeats(self, path: str) -> None:
        """Send heartbeats to the :class:`RankMonitor` through the shared memory file at
        ``path``."""
        send_heartbeats(path, self.rank)

    def sample_step(self, rows: StepRows) -> SampledStep:
        """Sample the step that ``execute_model`` has computed. ``rows`` must contain every request
        that is sampled or needs prompt logprobs; it may leave out the others."""
        runner = self.model_runner
        state = runner.execute_model_state
        assert state is not None, "execute_model() comes first"
        request_ids = list(runner.input_batch.req_ids)
        scores = self._score_prompts(rows, request_ids, state)
        self._sampler.rows = [_sampled_row(rows.get(request_id)) for request_id in request_ids]
        self.sample_tokens(None)  # type: ignore[attr-defined]
        result = zip(request_ids, self._sampler.rows, self._sampler.result, strict=True)
        return SampledStep(
            {request_id: token for request_id, row, token in result if row is not None}, scores
        )

    def _score_prompts(
        self, rows: StepRows, request_ids: list[str], state: Any
    ) -> dict[str, PromptLogprobs]:
        """Compute the prompt logprobs from the step's hidden states."""
        if not any(row.prompt_logprob_targets for row in rows.values()):
            return {}
        scores: dict[str, PromptLogprobs] = {}
        start = 0
        for request_id in request_ids:
            row = rows.get(request_id)
            if row is not None and row.prompt_logprob_targets:
                hidden = state.hidden_states[start:]
                scores[request_id] = score_row(partial(self._logits, hidden), row)
            start += state.scheduler_output.num_scheduled_tokens[request_id]
        return scores

    @torch.inference_mode()
    def _logits(self, hidden: torch.Tensor, start: int, end: int) -> torch.Tensor:
        logits: torch.Tensor = self.model_runner.model.compute_logits(hidden[start:end])
        return logits.float()


def _sampled_row(row: Row | None) -> Row | None:
    return row if row is not None and row.sample else None
