"""The fields of a response that repeat its request."""

from typing import Any

from router.openai.encoders import ResponseMetadata
from router.responses.schema import ReasoningConfig, ResponsesBody, TextConfig
from router.responses.tools import OfferedTools


def response_fields(
    metadata: ResponseMetadata, body: ResponsesBody, tools: OfferedTools, *, is_stored: bool
) -> dict[str, Any]:
    """Return the fields that are the same in all states of a response. Hosted tools, which the
    model does not see, are left out."""
    return {
        "id": metadata.id,
        "object": "response",
        "created_at": metadata.created,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "model": metadata.model,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "presence_penalty": body.presence_penalty or 0.0,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": _reasoning(body.reasoning or ReasoningConfig()),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": _text(body.text or TextConfig()),
        "tool_choice": body.tool_choice or "auto",
        "tools": tools.kept,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _reasoning(config: ReasoningConfig) -> dict[str, Any]:
    return {"effort": config.effort, "summary": config.summary if config.wants_summary else None}


def _text(config: TextConfig) -> dict[str, Any]:
    return {
        "format": config.format.answer_format if config.format else {"type": "text"},
        "verbosity": config.verbosity or "medium",
    }
