"""What all programs in this folder share: the cluster's address, and how results are printed."""

import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

URL = os.environ["BASE_URL"]
MODEL = os.environ["MODEL"]
MODEL_PATH = os.environ["MODEL_PATH"]

QUESTION = "What is the weather in Paris?"
SECOND_QUESTION = "And in Rome?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": PARAMETERS,
    },
}
TOOL_RESULT = "21 degrees"


def run(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Run all cases and print one JSON object: each case's result or its traceback."""
    print(json.dumps({name: _run_case(case) for name, case in cases.items()}))


def _run_case(case: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": case()}
    except Exception:
        return {"error": traceback.format_exc()}
