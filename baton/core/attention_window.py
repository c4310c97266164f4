"""Limits the tokens of its context that a request's tokens attend to."""

from dataclasses import dataclass

MAX_WINDOW_TOKENS = 2**31 - 1
"""The maximum of both numbers: kernels on a GPU have positions of 32 bits."""


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Each token attends to the first ``sink_tokens`` tokens of the request (0 or more), and to the
    last ``recent_tokens`` tokens up to itself, its own included (1 or more), in all layers
    (StreamingLLM, Xiao et al., ICLR 2024, section 3). Tokens keep their positions in the request,
    so the length of a context is still limited by the model's positions.

    The KV of a token depends on the window, so the window is part of the block keys' root. These
    sink tokens are not the learned sinks that some models have in their softmax."""

    sink_tokens: int
    recent_tokens: int

    @property
    def is_valid(self) -> bool:
        """True if both numbers are in range."""
        return (
            0 <= self.sink_tokens <= MAX_WINDOW_TOKENS
            and 1 <= self.recent_tokens <= MAX_WINDOW_TOKENS
        )

    @property
    def key_text(self) -> str:
        """The window as a part of the block keys' root (:class:`baton.core.block_key.KeyRoot`)."""
        return f"attention_window={self.sink_tokens}+{self.recent_tokens}"

    @property
    def max_attended(self) -> int:
        """The maximum number of tokens that a token attends to."""
        return self.sink_tokens + self.recent_tokens
