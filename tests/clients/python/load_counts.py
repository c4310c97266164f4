"""What the programs that run load tools share: Baton's own counts, to compare theirs with."""

import re
import urllib.request
from collections.abc import Mapping

from cases import MODEL, URL

_SERIES = {
    "requests": "baton_request_seconds_count",
    "answers": "baton_answers_total",
    "prompt_tokens": "baton_prompt_tokens_total",
    "cached_tokens": "baton_cached_tokens_total",
    "completion_tokens": "baton_completion_tokens_total",
    "first_tokens": "baton_time_to_first_token_seconds_count",
    "first_token_seconds": "baton_time_to_first_token_seconds_sum",
    "request_seconds": "baton_request_seconds_sum",
}


def read_counts() -> dict[str, float]:
    """Return the router's counts of the model so far, added up over other labels."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        name: sum(
            float(value)
            for labels, value in re.findall(rf"^{series}{{(.*)}} (\S+)$", text, re.MULTILINE)
            if f'model="{MODEL}"' in labels
        )
        for name, series in _SERIES.items()
    }


def counts_since(before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in read_counts().items()}
