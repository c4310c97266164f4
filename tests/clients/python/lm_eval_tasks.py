"""Runs lm-eval with its models ``local-chat-completions`` and ``local-completions`` on a task of
three questions, with data from a local file."""

import json
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from cases import MODEL, MODEL_PATH, URL, run
from lm_eval.tasks import TaskManager

STOPS = ["no", "such", "text", " scripted", "zero"]
"""lm-eval sends all of them in a completion, and the first four in a chat."""

PATHS = {
    "local-chat-completions": "/v1/chat/completions",
    "local-completions": "/v1/completions",
}
GENERATION = {
    "output_type": "generate_until",
    "metric_list": [{"metric": "exact_match"}],
}
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": [" a small", " nothing"],
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


def evaluate(model: str, question: str, answer: str, task: dict[str, Any], **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        lines = [{"question": question, "answer": answer} for _ in range(3)]
        data.write_text("\n".join(map(json.dumps, lines)))
        config = {
            "task": "questions",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            "doc_to_target": 0 if "doc_to_choice" in task else "{{answer}}",
            **task,
        }
        (Path(folder) / "questions.yaml").write_text(json.dumps(config))
        manager = TaskManager(include_path=folder, include_defaults=False)
        results = lm_eval.simple_evaluate(
            model=model,
            model_args={"model": MODEL, "base_url": URL + PATHS[model], "tokenizer": MODEL_PATH},
            tasks=["questions"], task_manager=manager, bootstrap_iters=0, **options,
        )  # fmt: skip
    metrics = results["results"]["questions"]
    return {name: metrics[name] for name in ("exact_match,none", "acc,none") if name in metrics}


def chat() -> Any:
    task = {**GENERATION, "generation_kwargs": {"until": STOPS, "max_gen_toks": 40}}
    return evaluate("local-chat-completions", "Hi", "Hello! I am a", task, apply_chat_template=True)


def generation() -> Any:
    story = "One day a small robot counted: two, three, four"
    task = {**GENERATION, "generation_kwargs": {"until": [*STOPS[:4], ", five"]}}
    return evaluate("local-completions", "Count:", story, task)


run(
    {
        "local-chat-completions": chat,
        "local-completions with five stop strings": generation,
        "local-completions with multiple choice": lambda: evaluate(
            "local-completions", "One day", "", CHOICE
        ),
    }
)
