"""Runs the recorded outputs of the conformance suite ``canitoolcall`` through the parser of the
router: each whole, in eight ways to cut it into deltas, and a character at a time.

    python -m tests.tool_formats

prints each case that is not read as the suite expects, and a table. The format of each family is
chosen by name, since tokenizers and templates can't be fetched here; units are the family's marks,
and pieces of 1 to 5 characters between them.
"""

import collections
import re
import sys
from collections.abc import Sequence
from functools import cache

from canitoolcall.checks import run_checks
from canitoolcall.chunking import DEFAULT_STRATEGIES, split
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status, worst_status

from router.serving.parsers.model_output_format import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ModelOutputFormat,
)
from router.serving.parsers.output_parts import ReasoningPart, TextPart, ToolCallStart

FAMILIES = load_families()

FORMATS = (
    # the family, a part of the model's name, its format of calls, and of reasoning
    ("deepseek", "V4.1", "deepseek_v41", "think"),
    ("deepseek", "V4", "deepseek_v4", "think"),
    ("deepseek", "V3.2", "deepseek_v32", "think"),
    ("deepseek", "V3.1", "deepseek_v31", "think"),
    ("deepseek", "", "deepseek_v3", "think"),
    ("gemma4", "", "gemma4", "gemma4"),
    ("glm", "4.5", "glm45", "think"),
    ("glm", "", "glm47", "think"),
    ("gpt-oss", "", "harmony", "harmony"),
    ("kimi", "K3", "kimi_k3", "kimi_k3"),
    ("kimi", "", "kimi_k2", "think"),
    ("llama", "Llama-4", "pythonic", ""),
    ("llama", "", "llama3", ""),
    ("mistral", "Magistral-Small-2506", "mistral", "think"),
    ("mistral", "v0.3", "mistral_v3", ""),
    ("mistral", "", "mistral", "mistral"),
    ("qwen3-hermes", "", "hermes", "think"),
    ("qwen3-xml", "", "qwen3_xml", "think"),
)


def fixtures() -> list[Fixture]:
    return list(load_fixtures())


def is_cut(fixture: Fixture) -> bool:
    """Whether the output was cut off by ``max_tokens``."""
    return any("trunc" in tag for tag in fixture.tags)


@cache
def output_format(family: str, model: str) -> ModelOutputFormat:
    tools, reasoning = next(
        (tools, reasoning)
        for name, part, tools, reasoning in FORMATS
        if name == family and part in model
    )
    return ModelOutputFormat(TOOL_PARSERS[tools], True, REASONING_PARSERS.get(reasoning))


def parse(fixture: Fixture, pieces: Sequence[str], *, is_whole: bool) -> ParseResult:
    """Parse an output as the router does. A whole answer does not have calls that are cut off."""
    family = FAMILIES[fixture.family]
    reference = family.reference_for(fixture.models[0])
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = (reference.default_generation_prompt if reference else "") or ""
    form = output_format(fixture.family, fixture.models[0])
    parser = form.create_parser(
        [dict(tool) for tool in fixture.tools],
        forced=False,
        in_reasoning=form.starts_in_reasoning(prompt),
        max_calls=None,
    )
    text = reasoning = ""
    calls: dict[int, list[str]] = {}
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    for part in parts:
        if isinstance(part, TextPart):
            text += part.text
        elif isinstance(part, ReasoningPart):
            reasoning += part.text
        elif isinstance(part, ToolCallStart):
            calls[part.index] = [part.name, ""]
        else:
            calls[part.index][1] += part.arguments
    for index in parser.cut_calls if is_whole else ():
        del calls[index]
    return ParseResult(
        content=text or None,
        reasoning_content=reasoning or None,
        tool_calls=tuple(ParsedToolCall(*call) for call in calls.values()),
    )


def units_of(fixture: Fixture) -> tuple[list[str], set[str]]:
    family = FAMILIES[fixture.family]
    stops = (stop for model in family.reference_models for stop in model.stop_tokens)
    marks = {*family.markers, *stops}
    longest_first = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    units = re.findall(rf"{longest_first}|\s?\w{{1,5}}|\s+|[^\w\s]{{1,2}}", fixture.raw_output)
    assert "".join(units) == fixture.raw_output, fixture.id
    return units, marks


def check(fixture: Fixture) -> tuple[Status, str]:
    """Return the worst status of all ways to cut the output, and why it is not ``PASS``."""
    units, marks = units_of(fixture)
    streams = {
        strategy.id: parse(
            fixture, ["".join(group) for group in split(units, strategy, marks)], is_whole=False
        )
        for strategy in DEFAULT_STRATEGIES
    }
    streams["character"] = parse(fixture, list(fixture.raw_output), is_whole=False)
    whole = parse(fixture, [fixture.raw_output], is_whole=True)
    rows = run_checks(fixture, FAMILIES[fixture.family], Observation(whole, streams))
    status = worst_status(row.status for row in rows)
    failed = next((row for row in rows if row.status is status), None)
    return status, "" if failed is None else f"{failed.check} {failed.strategy}: {failed.detail}"


def main() -> None:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for fixture in fixtures():
        status, reason = check(fixture)
        for row in (fixture.family, "cut off" if is_cut(fixture) else "whole"):
            counts[row][status.name] += 1
        if status not in (Status.PASS, Status.SOFT_PASS):
            print(f"{fixture.id}: {reason[:200]}")
    print()
    for row, found in sorted(counts.items()):
        print(f"{row:14} {dict(found)}")
    total = counts["whole"] + counts["cut off"]
    print(f"passed {total['PASS']}, soft {total['SOFT_PASS']} of {total.total()}")


if __name__ == "__main__":
    sys.exit(main())
