"""Fields of other APIs that change the answer and that requests of the Responses API do not
have."""

from collections.abc import Mapping
from types import MappingProxyType

from router.http.unknown_fields import UnsupportedField
from router.openai.schema import unsupported_fields as chat

_OTHER_NAMES = {
    "max_tokens": UnsupportedField("use max_output_tokens"),
    "max_completion_tokens": UnsupportedField("use max_output_tokens"),
    "messages": UnsupportedField("use input", ([],)),
    "response_format": UnsupportedField("use text.format"),
    "reasoning_effort": UnsupportedField("use reasoning.effort"),
    "verbosity": UnsupportedField("use text.verbosity"),
    "logprobs": UnsupportedField("use top_logprobs", (False,)),
    "system": UnsupportedField("use instructions", ("",)),
    "n": UnsupportedField("a response has one answer", (1,)),
    "functions": UnsupportedField("use tools", ([],)),
    "function_call": UnsupportedField("use tool_choice", ("none", "auto")),
    "allowed_token_ids": UnsupportedField("it is a field of chats and completions"),
    "bad_words": UnsupportedField("it is a field of chats and completions", ([],)),
    "continue_final_message": UnsupportedField("it is a field of chats", (False,)),
    "truncate_prompt_tokens": UnsupportedField("it is a field of chats and completions"),
    "guided_json": UnsupportedField("use text.format"),
    "guided_regex": UnsupportedField("use structured_outputs"),
    "guided_choice": UnsupportedField("use structured_outputs"),
    "guided_grammar": UnsupportedField("use structured_outputs"),
}

UNSUPPORTED_FIELDS: Mapping[str, UnsupportedField] = MappingProxyType(
    {**chat.UNSUPPORTED_FIELDS, **_OTHER_NAMES}
)
