"""One placement of one request at a mock worker."""

import math
from dataclasses import dataclass, field

from baton.core.ids import RequestId, TokenId, WorkerId
from baton.core.request import FinishReason, RequestOutput, RequestSpec
from baton.core.task import Task
from baton.rpc.output_encoder import OutputEncoder, encode_output
from baton.worker.mock.model import MockModel
from baton.worker.mock.output_stream import MockStream

EncodedToken = tuple[bytes, FinishReason | None]
"""An output in its encoded form, and the reason if it was the last."""


@dataclass(slots=True, eq=False)
class MockJob:
    """``source`` computes its prompt, if another does. ``key`` is the answer's in the lexicon,
    ``next_index`` the position of its next token, ``blocks`` the names of its prompt's full blocks.
    Times are the event loop's."""

    spec: RequestSpec
    task: Task
    stream: MockStream
    source: WorkerId | None
    key: int
    next_index: int
    blocks: tuple[int, ...]
    arrived_at: float
    deadline: float = math.inf
    cached_tokens: int = 0
    _frames: OutputEncoder = field(init=False)
    _stops: frozenset[TokenId] = field(init=False)

    def __post_init__(self) -> None:
        self._frames = OutputEncoder(self.spec.request_id, self.spec.epoch)
        self._stops = frozenset(self.spec.sampling.stop_token_ids)

    @property
    def id(self) -> RequestId:
        return self.spec.request_id

    @property
    def num_known(self) -> int:
        """Tokens of the prompt, and of the answer so far."""
        return self.spec.num_prompt_tokens + self.next_index

    def say_first(self, lexicon: MockModel) -> EncodedToken:
        """With what is told once."""
        index, token_id, reason = self._advance(lexicon)
        return self._whole(lexicon, index, token_id, reason), reason

    def say(self, lexicon: MockModel) -> EncodedToken:
        index, token_id, reason = self._advance(lexicon)
        if self.spec.sampling.logprobs is not None:
            return self._whole(lexicon, index, token_id, reason), reason
        if reason is None:
            return self._frames.token(index, token_id), None
        return self._frames.last(index, token_id, reason), reason

    def _advance(self, lexicon: MockModel) -> tuple[int, TokenId, FinishReason | None]:
        index = self.next_index
        token_id = lexicon.token(self.key, index)
        self.next_index = index + 1
        if token_id in self._stops:
            return index, token_id, FinishReason.STOP
        if index + 1 >= self.spec.sampling.max_tokens:
            return index, token_id, FinishReason.LENGTH
        return index, token_id, None

    def _whole(
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
