"""Runs guidellm with its default settings, except for the data and the number of requests."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import MODEL_PATH, URL, run


def benchmark(profile: str, request_format: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-m", "guidellm", "run"),
            *("--backend", f"kind=openai_http,target={URL},request_format={request_format}"),
            *("--profile", profile),
            *("--tokenizer", f"kind=hf_auto,model={MODEL_PATH}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
            *("--constraint", "kind=max_requests,count=4"),
            *("--output", f"kind=json,path={report}", "--disable-console"),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=200)
        return [_summary(benchmark) for benchmark in json.loads(report.read_text())["benchmarks"]]


def _summary(benchmark: Any) -> Any:
    requests = benchmark["requests"]
    tokens = {request["output_metrics"]["text_tokens"] for request in requests["successful"]}
    return [len(requests["successful"]), len(requests["errored"]), sorted(tokens)]


run(
    {
        "sweep over chat completions": lambda: benchmark(
            "kind=sweep,sweep_size=3", "/v1/chat/completions"
        ),
        "completions": lambda: benchmark("kind=synchronous", "/v1/completions"),
        "responses": lambda: benchmark("kind=synchronous", "/v1/responses"),
    }
)
