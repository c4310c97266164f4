"""Lists the test programs of the client libraries, with the exact result expected from each of
their cases."""

from collections.abc import Mapping
from typing import Any

from tests.clients.programs import Environment, Program
from tests.clients.scripted_model import (
    BRIEF_SECOND,
    BRIEF_TEXT,
    BRIEF_WEATHER,
    COMMAND_DONE,
    DATA,
    DATA_TEXT,
    EDITED,
    REASONED,
    REASONING,
    SECOND,
    STORY,
    TEXT,
    WEATHER,
)

CHAT, RESPONSES, MESSAGES = "chat completions", "responses", "messages"
QUESTION = "What is the weather in Paris?"
CITY, CITY_TEXT = {"city": "Paris"}, '{"city": "Paris"}'
CALLED = ["get_weather", CITY_TEXT, WEATHER]
"""A tool loop: the call's name and arguments, and the answer to its result."""

Cases = Mapping[str, Any]

AGENTS: Cases = {
    "run": BRIEF_TEXT,
    "stream": [BRIEF_TEXT, True],
    "second question": BRIEF_SECOND,
    "tool loop": BRIEF_WEATHER,
    "streamed tool loop": [BRIEF_WEATHER, True],
    "structured output": DATA,
}
PYDANTIC_AI: Cases = {
    "run": TEXT,
    "stream": [TEXT, True],
    "tool loop": WEATHER,
    "structured output by tool": DATA,
    "structured output by schema": DATA,
    "tool loop with structured output": DATA,
}
LANGCHAIN: Cases = {
    "invoke": TEXT,
    "stream": [TEXT, 1],
    "batch": [TEXT] * 3,
    "tool loop": ["get_weather", CITY, WEATHER],
    "structured output by schema": DATA,
    "structured output by tool": DATA,
}
AI_SDK: Cases = {
    "generateText": [TEXT, "stop"],
    "streamText": [TEXT, True],
    "tool loop": [[["get_weather", CITY]], WEATHER],
    "streamed tool loop": [WEATHER, True],
    "generateObject": DATA,
}


def _python(package: str, api: str, file: str, *arguments: str) -> Program:
    return Program((package,), api, Environment.PYTHON, file, arguments)


def _evaluation(package: str, api: str, file: str) -> Program:
    return Program((package,), api, Environment.EVALUATION, file)


def _node(packages: tuple[str, ...], api: str, file: str, *arguments: str) -> Program:
    return Program(packages, api, Environment.NODE, file, arguments)


CHAT_PROGRAMS: Mapping[Program, Cases] = {
    _python("openai", CHAT, "openai_chat.py"): {
        "create": [TEXT, "stop"],
        "stream": [TEXT, True],
        "concurrent async streams": [TEXT] * 3,
        "tool loop": CALLED,
        "streamed tool call": ["get_weather", CITY_TEXT, True],
        "parse": DATA,
        "reasoning": [REASONING, REASONED],
        "completions": [STORY, "stop", True],
        "five stop strings": ["One day a small robot counted: two, three, four,", "stop"],
        "models": ["scripted"],
        "embeddings": [
            400,
            "/v1/embeddings is not supported by the model 'scripted': no server that offers it is "
            "attached for this model",
        ],
    },
    _python("langchain-openai", CHAT, "langchain_chain.py", "chat"): {
        **LANGCHAIN,
        "completions": STORY,
    },
    _python("litellm", CHAT, "litellm_chat.py"): {
        "create": [TEXT, "stop"],
        "stream": TEXT,
        "tool loop": CALLED,
        "structured output": DATA_TEXT,
        "completions": STORY,
    },
    _python("pydantic-ai-slim", CHAT, "pydantic_ai_agent.py", "chat"): PYDANTIC_AI,
    _python("openai-agents", CHAT, "openai_agents.py", "chat"): AGENTS,
    _evaluation("instructor", CHAT, "instructor_chat.py"): {
        "by tool (its default)": DATA,
        "by strict tool": DATA,
        "by schema": DATA,
        "by JSON mode": DATA,
        "streamed": DATA,
    },
    Program(("litellm",), CHAT, Environment.LITELLM_PROXY, "litellm_proxy.py"): {
        "create": TEXT,
        "fallback on overflow": [TEXT, "1"],
        "overflow without fallback": [400, "litellm.ContextWindowExceededError"],
        "fallback on overflow of Messages": [TEXT, "1"],
        "embeddings, then a chat": [400, TEXT],
    },
    Program(("aider-chat",), CHAT, Environment.AIDER, "aider_edit.py"): {
        "edit": [EDITED, True],
        "overflow": [True, "Hi\n"],
    },
    # Requests that were answered, requests that failed, and the lengths of the answers.
    _evaluation("guidellm", CHAT, "guidellm_run.py"): {
        "sweep over chat completions": [[4, 0, [16]]] * 3,
        "completions": [[4, 0, [16]]],
        "responses": [[4, 0, [16]]],
    },
    _evaluation("lm-eval", CHAT, "lm_eval_tasks.py"): {
        "local-chat-completions": {"exact_match,none": 1.0},
        "local-completions with five stop strings": {"exact_match,none": 1.0},
        "local-completions with multiple choice": {"acc,none": 1.0},
    },
    _node(("openai",), CHAT, "openai_chat.mjs"): {
        "create": [TEXT, "stop"],
        "stream": TEXT,
        "tool loop": [WEATHER, ["Paris"]],
        "parse": DATA,
        "completions": STORY,
    },
    _node(("ai", "@ai-sdk/openai"), CHAT, "ai_sdk.mjs", "chat"): {
        **AI_SDK,
        "five stop sequences": ["Hello! I am a", "stop"],
    },
}

RESPONSES_PROGRAMS: Mapping[Program, Cases] = {
    _python("openai", RESPONSES, "openai_responses.py"): {
        "create": [TEXT, "completed"],
        "stream": [TEXT, "response.created", "response.completed", True],
        "concurrent async responses": [TEXT] * 3,
        "second question": SECOND,
        "tool loop with previous_response_id": CALLED,
        "tool loop with all items": CALLED,
        "parse": DATA,
        "parse a stream": DATA,
        "reasoning": [["reasoning", "message"], REASONED],
        "retrieve and delete": TEXT,
        "background": ["queued", "completed", TEXT],
        "input items": [
            ["message", "user", [QUESTION]],
            ["function_call", "get_weather", CITY_TEXT],
            ["function_call_output", True, "21 degrees"],
        ],
    },
    _python("langchain-openai", RESPONSES, "langchain_chain.py", "responses"): LANGCHAIN,
    _python("litellm", RESPONSES, "litellm_responses.py"): {
        "create": TEXT,
        "stream": TEXT,
        "tool loop": CALLED,
    },
    _python("pydantic-ai-slim", RESPONSES, "pydantic_ai_agent.py", "responses"): PYDANTIC_AI,
    _python("openai-agents", RESPONSES, "openai_agents.py", "responses"): AGENTS,
    _node(("openai",), RESPONSES, "openai_responses.mjs"): {
        "create": [TEXT, "completed"],
        "stream": TEXT,
        "tool loop": CALLED,
        "parse": DATA,
    },
    # This API has no stop strings: the SDK drops them.
    _node(("ai", "@ai-sdk/openai"), RESPONSES, "ai_sdk.mjs", "responses"): AI_SDK,
    _node(("@openai/codex",), RESPONSES, "codex.mjs"): {
        "tool loop": [[[0, True]], [COMMAND_DONE]],
        "tool loop with reasoning": [[[0, True]], [COMMAND_DONE]],
    },
}

MESSAGES_PROGRAMS: Mapping[Program, Cases] = {
    _python("anthropic", MESSAGES, "anthropic_messages.py"): {
        "create": [[BRIEF_TEXT], "end_turn", "assistant"],
        "stream": [TEXT, True, True],
        "concurrent async messages": [TEXT] * 3,
        "tool loop": ["get_weather", CITY, "tool_use", WEATHER],
        "streamed tool loop": ["get_weather", CITY, "tool_use", WEATHER],
        "thinking": [["thinking", "text"], REASONED],
        "five stop sequences": ["Hello! I am a", "stop_sequence", " scripted"],
        "count_tokens": True,
    },
    _python("litellm", MESSAGES, "litellm_messages.py"): {
        "create": [TEXT, "stop"],
        "stream": TEXT,
        "tool loop": CALLED,
    },
    _node(("@anthropic-ai/claude-code",), MESSAGES, "claude_code.mjs"): {
        "tool loop": [["hello"], COMMAND_DONE],
    },
}

# The numbers of requests and answers, and each of the tool's counts that is not Baton's.
LOAD_PROGRAMS: Mapping[Program, Cases] = {
    Program(("aiperf",), "all four", Environment.LOAD, "aiperf_run.py"): {
        "chat with n=2": [4, 8, {}],
        "multi-turn chat": [4, 4, {}],
        "trace": [3, 3, {}],
        "completions": [4, 4, {}],
        "responses": [3, 3, {}],
        "messages": [3, 3, {}],
    },
    Program(
        ("inference-perf",),
        "completions, metrics",
        Environment.LOAD,
        "inference_perf_run.py",
        needs="prometheus",
    ): {"completions": [8, {}]},
}
