"""Descriptions of models, with the fields of OpenAI's and of Anthropic's API, which have no name in
common but ``id``."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def describe_model(name: str, created: int, max_tokens: int) -> dict[str, Any]:
    """Describe a model. ``created`` is in seconds since 1970; ``max_tokens`` is the length of the
    context."""
    openai = {"object": "model", "created": created, "owned_by": "baton"}
    anthropic = {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_tokens,
        "max_tokens": max_tokens,
    }
    return {"id": name, **openai, "max_model_len": max_tokens, **anthropic}


def describe_models(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe the list of all models, which is a single page."""
    ids = [model["id"] for model in models]
    page = {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
    return {"object": "list", "data": list(models), **page}
