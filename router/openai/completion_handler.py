"""Handles completion requests."""

from typing import Any

from baton.core.ids import TenantId
from router.http.raw_body import RawBody
from router.openai.encoders import AnswerEncoder, CompletionEncoder, ResponseMetadata
from router.openai.generation_handler import GenerationHandler
from router.openai.preprocessor import Preprocessor, Prompt
from router.openai.schema import ChatBody, CompletionBody


class CompletionHandler(GenerationHandler):
    endpoint = "completions"
    id_prefix = "cmpl-"

    async def _read_body(self, raw: RawBody, tenant: TenantId) -> ChatBody | CompletionBody:
        return await self._parse(CompletionBody, raw, tenant)

    def _build_prompts(self, preprocessor: Preprocessor, body: Any) -> list[Prompt]:
        return preprocessor.prepare_completion(body)

    def _create_encoder(
        self, metadata: ResponseMetadata, body: ChatBody | CompletionBody
    ) -> AnswerEncoder:
        with_logprobs = body.num_logprobs is not None
        return CompletionEncoder(metadata, self._model.text.tokenizer, with_logprobs=with_logprobs)
