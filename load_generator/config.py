"""What was asked for, once it has been checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from baton.clock import SystemClock
from baton.errors import Invalid
from load_generator.driver import DriverLimits
from load_generator.load_spec import LoadSpec
from load_generator.result import SloTargets
from load_generator.target import BenchTarget

RESERVED_FIELDS = ("model", "messages", "prompt", "max_tokens", "stream", "stream_options")
"""Fields that every body has anyway."""

FORMS = ("text", "tokens")
ENDPOINTS = ("chat", "completions")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """``chat``: of chat completions, else of completions. ``salt`` begins every prompt."""

    target: BenchTarget
    model: str | None
    chat: bool
    as_tokens: bool
    salt: str
    extra: dict[str, Any]
    load: LoadSpec
    limits: DriverLimits
    slo: SloTargets
    processes: int
    plots: Path | None
    output: Path | None
    as_json: bool


def parse_form(endpoint: str | None, prompts: str) -> tuple[bool, bool]:
    """Whether it is chat, and whether prompts are token ids. Raises Invalid."""
    if prompts not in FORMS:
        raise Invalid(f"--prompts {prompts}: it is text or tokens")
    if endpoint not in (None, *ENDPOINTS):
        raise Invalid(f"--endpoint {endpoint}: it is chat or completions")
    as_tokens = prompts == "tokens"
    if as_tokens and endpoint == "chat":
        raise Invalid("--prompts tokens needs --endpoint completions: a chat has text")
    return not as_tokens and endpoint != "completions", as_tokens


def parse_extra(text: str, ignore_eos: bool) -> dict[str, Any]:
    """Raises Invalid for what is no JSON object, or has fields of ours."""
    try:
        extra = orjson.loads(text)
    except ValueError as error:
        raise Invalid(f"--extra is no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise Invalid(f"--extra must be a JSON object, not {text}")
    for name in RESERVED_FIELDS:
        if name in extra:
            raise Invalid(f"--extra has {name!r}, which bench sets itself")
    return {**extra, "ignore_eos": True} if ignore_eos else extra


def prompt_salt(given: str | None) -> str:
    """Of the moment, so that nobody has cached the prompts of this run."""
    return f"{SystemClock().wall_nanoseconds():x}-" if given is None else given
