"""A job of a mock worker: one placement of a request."""

import math
from dataclasses import dataclass, field

from baton.core.ids import RequestId, TokenId, WorkerId
from baton.core.request import FinishReason, RequestOutput, RequestSpec
from baton.core.task import Task
from baton.rpc.output_encoder import OutputEncoder, encode_output
from baton.worker.mock.model import MockModel
from baton.worker.mock.output_stream import MockStream

EncodedToken = tuple[bytes, FinishReason | None]
"""An encoded output, and the finish reason if it is the answer's last output."""


@dataclass(slots=True, eq=False)
class MockJob:
    """A job's state. ``source`` is the worker that prefills the prompt, or None if this worker
    does. ``answer_key`` identifies the answer in the mock model. ``next_index`` is the position of
    the next answer token. ``block_hashes`` are the hashes of the prompt's full blocks. Times are
    from the event loop's clock."""

    spec: RequestSpec
    task: Task
    stream: MockStream
    source: WorkerId | None
    answer_key: int
    next_index: int
    block_hashes: tuple[int, ...]
    arrived_at: float
    deadline: float = math.inf
    cached_tokens: int = 0
    _encoder: OutputEncoder = field(init=False)
    _stop_token_ids: frozenset[TokenId] = field(init=False)

    def __post_init__(self) -> None:
        self._encoder = OutputEncoder(self.spec.request_id, self.spec.epoch)
        self._stop_token_ids = frozenset(self.spec.sampling.stop_token_ids)

    @property
    def id(self) -> RequestId:
        return self.spec.request_id

    @property
    def num_known(self) -> int:
        """The number of tokens of the prompt and of the answer so far, together."""
        return self.spec.num_prompt_tokens + self.next_index

    def encode_first_token(self, lexicon: MockModel) -> EncodedToken:
        """Generate the first token and encode its output, including the fields that only the first
        output has."""
        index, token_id, reason = self._advance(lexicon)
        return self._encode_full(lexicon, index, token_id, reason), reason

    def encode_next_token(self, lexicon: MockModel) -> EncodedToken:
        index, token_id, reason = self._advance(lexicon)
        if self.spec.sampling.logprobs is not None:
            return self._encode_full(lexicon, index, token_id, reason), reason
        if reason is None:
            return self._encoder.encode_token(index, token_id), None
        return self._encoder.encode_last_token(index, token_id, reason), reason

    def _advance(self, lexicon: MockModel) -> tuple[int, TokenId, FinishReason | None]:
        index = self.next_index
        token_id = lexicon.token_at(self.answer_key, index)
        self.next_index = index + 1
        if token_id in self._stop_token_ids:
            return index, token_id, FinishReason.STOP
        if index + 1 >= self.spec.sampling.max_tokens:
            return index, token_id, FinishReason.LENGTH
        return index, token_id, None

    def _encode_full(
        self, lexicon: MockModel, index: int, token_id: TokenId, reason: FinishReason | None
    ) -> bytes:
        output = RequestOutput(
            request_id=self.id,
            epoch=self.spec.epoch,
            first_index=index,
            token_ids=(token_id,),
            logprobs=lexicon.logprobs(self.spec.sampling, token_id),
            finish_reason=reason,
            cached_tokens=self.cached_tokens,
        )
        return encode_output(output)
