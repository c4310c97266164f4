"""Descriptions of models, which contain the fields of both OpenAI's and Anthropic's API. The only
field that both APIs have is ``id``."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from router.serving.sampling_defaults import SamplingDefaults


def describe_model(
    name: str,
    created: int,
    max_tokens: int,
    formats: Mapping[str, str],
    sampling: SamplingDefaults,
    kv_codec: str | None = None,
    capabilities: Sequence[str] = (),
) -> dict[str, Any]:
    """Describe a model. ``created`` is in seconds since 1970; ``max_tokens`` is the length of the
    context; ``formats`` are the names of the formats of tool calls and reasoning; ``sampling``
    has the values of requests that leave them out; ``kv_codec`` is the strongest codec that the KV
    of requests may pass, None to leave it out; ``capabilities`` are the paths under which the model
    can be used."""
    openai = {"object": "model", "created": created, "owned_by": "baton"}
    anthropic = {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_tokens,
        "max_tokens": max_tokens,
    }
    own = {"max_model_len": max_tokens, **formats, "generation_defaults": sampling.json}
    own["capabilities"] = list(capabilities)
    if kv_codec is not None:
        own["kv_codec"] = kv_codec
    return {"id": name, **openai, **own, **anthropic}


def describe_adapter(name: str, parent: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a LoRA adapter of the model ``parent``, with vLLM's fields ``parent`` and
    ``root``."""
    own = {"id": name, "display_name": name, "parent": parent["id"], "root": name}
    return {**parent, **own}


def describe_models(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the list of all models as a single page."""
    ids = [model["id"] for model in models]
    page = {
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }
    return {"object": "list", "data": list(models), **page}
