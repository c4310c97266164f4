"""The checked configuration of ``baton bench``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from baton.clock import SystemClock
from baton.errors import Invalid
from load_generator.driver import DriverLimits
from load_generator.load_spec import LoadSpec
from load_generator.result import LatencyTargets
from load_generator.target import BenchTarget

RESERVED_FIELDS = ("model", "messages", "prompt", "max_tokens", "stream", "stream_options")
"""Fields of the request body that the load generator sets itself."""

PROMPT_FORMATS = ("text", "tokens")
ENDPOINTS = ("chat", "completions")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The settings of a benchmark. If ``chat`` is True, chat completions are requested, else
    completions. If ``as_tokens`` is True, prompts are sent as token ids. ``salt`` is the text with
    which every prompt begins."""

    target: BenchTarget
    model: str | None
    chat: bool
    as_tokens: bool
    salt: str
    extra: dict[str, Any]
    load: LoadSpec
    limits: DriverLimits
    slo: LatencyTargets
    processes: int
    plots: Path | None
    output: Path | None
    as_json: bool


def parse_prompt_format(endpoint: str | None, prompts: str) -> tuple[bool, bool]:
    """Return whether to request chat completions, and whether to send prompts as token ids. Raises
    Invalid for an unknown value, and for token ids in chat completions."""
    if prompts not in PROMPT_FORMATS:
        raise Invalid(f"--prompts is {prompts!r}; it must be text or tokens")
    if endpoint not in (None, *ENDPOINTS):
        raise Invalid(f"--endpoint is {endpoint!r}; it must be chat or completions")
    as_tokens = prompts == "tokens"
    if as_tokens and endpoint == "chat":
        raise Invalid("--prompts tokens needs --endpoint completions: chat messages are text")
    return not as_tokens and endpoint != "completions", as_tokens


def parse_extra(text: str, ignore_eos: bool) -> dict[str, Any]:
    """Parse the additional body fields. Raises Invalid if they are not a JSON object, or contain
    reserved fields."""
    try:
        extra = orjson.loads(text)
    except ValueError as error:
        raise Invalid(f"--extra is not valid JSON: {error}") from error
    if not isinstance(extra, dict):
        raise Invalid(f"--extra must be a JSON object, not {text}")
    for name in RESERVED_FIELDS:
        if name in extra:
            raise Invalid(f"--extra has {name!r}, which baton bench sets itself")
    return {**extra, "ignore_eos": True} if ignore_eos else extra


def prompt_salt(given: str | None) -> str:
    """Return the given salt. If there is none, make one from the current time, so that no server
    has cached the prompts of this run."""
    return f"{SystemClock().wall_nanoseconds():x}-" if given is None else given
