"""Ask the assistant of `make up` ten questions, and write them and its answers as a table.

    python -m tools.first_questions [--model smollm2]

The decode worker is killed (kill -9) in the middle of the last answer, a longer one, which must be
the same as without the kill. Exits with 1 if it is not.
"""

import argparse
import os
import signal
import sys
from typing import Any

from testkit.local_cluster import LocalCluster, local_cluster
from testkit.streams import CompletionCase, stream_completion

QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is the largest planet in the solar system?",
    "Who wrote Romeo and Juliet?",
    "How many days are there in a week?",
    "What is the chemical symbol for water?",
    "What is the opposite of hot?",
    "Which animal says meow?",
    "What color is the sky on a clear day?",
    "In which continent is Egypt?",
)
STORY = "Once upon a time, there was a small robot who"
KILLED_AFTER = 30
"""Tokens of the story that have arrived when the worker is killed."""


def answer(cluster: LocalCluster, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 60}
    response = cluster.post("/v1/chat/completions", body)
    text: str = response["choices"][0]["message"]["content"]
    ended = response["choices"][0]["finish_reason"] == "stop"
    return " ".join(text.split()) + ("" if ended else " …")


def tell(cluster: LocalCluster, kill: bool) -> tuple[list[int], float]:
    """Return the tokens of a story, and the longest time between two of them, in seconds."""
    body: dict[str, Any] = {
        "prompt": STORY, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    pids = [process["pid"] for process in cluster.processes("decode")] if kill else []

    def on_token(number: int) -> None:
        while pids and number >= KILLED_AFTER:
            os.kill(pids.pop(), signal.SIGKILL)

    told = stream_completion(cluster.url, CompletionCase(body), on_token=on_token)
    if told.error:
        raise SystemExit(f"the story failed: {told.error}")
    return told.tokens, told.max_inter_token_seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    with local_cluster(options.model, 1, 1) as cluster:
        print("| question | answer |\n|---|---|")
        for question in QUESTIONS:
            print(f"| {question} | {answer(cluster, question)} |", flush=True)
        expected, _ = tell(cluster, kill=False)
        tokens, gap = tell(cluster, kill=True)
        is_same = tokens == expected
        print(
            f"\nThe decode worker was killed at token {KILLED_AFTER} of a story of {len(tokens)}: "
            f"{'the same tokens' if is_same else 'OTHER TOKENS'} as without, longest gap "
            f"{gap:.2f} s"
        )
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
