"""Adds up the usage of a request's answers, and selects the best answers (``best_of``)."""

from collections.abc import Sequence
from dataclasses import replace

from router.openai.choice_stream import ChoiceStream
from router.openai.encoders import ChoiceResult, Usage


def response_usage(choices: Sequence[ChoiceStream], per_prompt: int) -> Usage:
    """Return the usage of a whole request that has ``per_prompt`` answers for each prompt. A
    prompt's tokens count once. Its cached tokens are those that were cached for all of its
    answers."""
    records = [choice.record for choice in choices]
    groups = [records[start : start + per_prompt] for start in range(0, len(records), per_prompt)]
    return Usage(
        prompt_tokens=sum(group[0].num_prompt_tokens for group in groups),
        completion_tokens=sum(choice.num_tokens for choice in choices),
        cached_tokens=sum(min(record.cached_tokens or 0 for record in group) for group in groups),
        reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices),
    )


def prompt_usage(choice: ChoiceStream) -> Usage:
    """Return the usage of an answer's prompt alone."""
    record = choice.record
    return Usage(record.num_prompt_tokens, 0, record.cached_tokens or 0)


def select_best(
    choices: Sequence[ChoiceStream], answers: Sequence[ChoiceResult], candidates: int, wanted: int
) -> Sequence[ChoiceResult]:
    """Return the ``wanted`` best of each prompt's ``candidates`` answers: those whose tokens have
    the highest mean logprob."""
    if candidates == wanted:
        return answers
    best: list[ChoiceResult] = []
    for start in range(0, len(answers), candidates):
        ranked = sorted(
            range(start, start + candidates), key=lambda index: -choices[index].mean_logprob
        )
        best += [answers[index] for index in ranked[:wanted]]
    return [replace(answer, index=index) for index, answer in enumerate(best)]
