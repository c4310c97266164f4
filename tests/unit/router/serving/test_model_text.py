"""Tests how large a body counts as for the choice of where its prompt is tokenised."""

from pathlib import Path

import pytest

from router.serving.offload_executor import MIN_OFFLOAD_BYTES
from router.serving.parsers.model_output_format import ModelOutputFormat
from router.serving.served_model import MAX_INDENTED_INLINE_BYTES, ModelText
from tests.unit.small_chats import TEMPLATE, load_tokenizer

INDENTING = TEMPLATE + "{% for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}"
SMALL, LARGE = MAX_INDENTED_INLINE_BYTES, MAX_INDENTED_INLINE_BYTES + 1


@pytest.mark.parametrize(
    ("template", "body_bytes", "expected"),
    [
        (TEMPLATE, LARGE, LARGE),
        (TEMPLATE, MIN_OFFLOAD_BYTES + 7, MIN_OFFLOAD_BYTES + 7),
        (INDENTING, SMALL, SMALL),
        (INDENTING, LARGE, MIN_OFFLOAD_BYTES + 1),
        (INDENTING, MIN_OFFLOAD_BYTES + 7, MIN_OFFLOAD_BYTES + 7),
    ],
)
def test_bodies_count_as_large_earlier_if_the_template_indents_json(
    tmp_path: Path, template: str, body_bytes: int, expected: int
) -> None:
    tokenizer = load_tokenizer(tmp_path, template)
    text = ModelText(tokenizer, ModelOutputFormat.detect(tokenizer))
    assert text.tokenizing_bytes(body_bytes) == expected
