"""What was asked for, once it has been checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from baton.cli.bench.drive import Limits
from baton.cli.bench.load import Load
from baton.cli.bench.outcome import Slo
from baton.cli.bench.target import Target
from baton.clock import SystemClock
from baton.errors import Invalid

OURS = ("model", "messages", "prompt", "max_tokens", "stream", "stream_options")
"""Fields that every body has anyway."""

FORMS = ("text", "tokens")
ENDPOINTS = ("chat", "completions")


@dataclass(frozen=True, kw_only=True)
class Question:
    """``chat``: of chat completions, else of completions. ``salt`` begins every prompt."""

    target: Target
    model: str | None
    chat: bool
    as_tokens: bool
    salt: str
    extra: dict[str, Any]
    load: Load
    limits: Limits
    slo: Slo
    processes: int
    plots: Path | None
    output: Path | None
    as_json: bool


def form_of(endpoint: str | None, prompts: str) -> tuple[bool, bool]:
    """Whether it is chat, and whether prompts are token ids. Raises Invalid."""
    if prompts not in FORMS:
        raise Invalid(f"--prompts {prompts}: it is text or tokens")
    if endpoint not in (None, *ENDPOINTS):
        raise Invalid(f"--endpoint {endpoint}: it is chat or completions")
    as_tokens = prompts == "tokens"
    if as_tokens and endpoint == "chat":
        raise Invalid("--prompts tokens needs --endpoint completions: a chat has text")
    return not as_tokens and endpoint != "completions", as_tokens


def extra_of(text: str, ignore_eos: bool) -> dict[str, Any]:
    """Raises Invalid for what is no JSON object, or has fields of ours."""
    try:
        extra = orjson.loads(text)
    except ValueError as error:
        raise Invalid(f"--extra is no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise Invalid(f"--extra must be a JSON object, not {text}")
    for name in OURS:
        if name in extra:
            raise Invalid(f"--extra has {name!r}, which bench sets itself")
    return {**extra, "ignore_eos": True} if ignore_eos else extra


def salt_of(given: str | None) -> str:
    """Of the moment, so that nobody has cached the prompts of this run."""
    return f"{SystemClock().wall_nanoseconds():x}-" if given is None else given
