"""Counts the tokens of a chat's prompt."""

from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.openai.chat_renderer import ChatRenderer
from router.openai.preprocessor import ModelLimits
from router.openai.schema import ChatBody


def count_prompt_tokens(body: ChatBody, tokenizer: Tokenizer, limits: ModelLimits) -> int:
    """Return the number of tokens of the prompt, which may exceed the model's context. Raises
    ApiError or Invalid."""
    text = ChatRenderer(tokenizer).render(body, body.offered_tools)
    limit = limits.max_request_tokens
    if tokenizer.exceeds_tokens(text, limit):
        message = f"messages has more than {limit} tokens, the limit of one request"
        raise ApiError(400, message, param="messages", code="too_many_tokens")
    return len(tokenizer.encode(text, bool(body.add_special_tokens)))
