"""What an engine refuses at its door, because it could never be served."""

from baton.core.request import RequestSpec
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.constraint import Constraint
from baton.errors import Invalid


def check_spec(spec: RequestSpec, task: Task, config: EngineConfig, num_blocks: int) -> None:
    """Raises Invalid when no amount of waiting would help."""
    num_tokens = len(spec.token_ids)
    if not 1 <= spec.num_prompt_tokens <= num_tokens:
        raise Invalid(
            f"num_prompt_tokens is {spec.num_prompt_tokens}, and must be between 1 and the "
            f"number of token_ids ({num_tokens})",
            param="prompt",
        )
    if spec.max_new_tokens < 1:
        raise Invalid(
            f"max_tokens is {spec.sampling.max_tokens}, and {spec.num_emitted_tokens} tokens "
            "were emitted: there is nothing left to generate",
            param="max_tokens",
        )
    if num_tokens + spec.max_new_tokens > config.max_model_tokens:
        raise Invalid(
            f"{num_tokens} tokens and {spec.max_new_tokens} to generate are more than the "
            f"{config.max_model_tokens} that the model takes",
            param="max_tokens",
            code="context_length_exceeded",
        )
    needed = config.blocks_for(most_kv_tokens(spec, task))
    if needed > num_blocks:
        raise Invalid(
            f"the request needs {needed} KV blocks, and there are {num_blocks}",
            param="max_tokens",
            code="context_length_exceeded",
        )


def check_constraint(spec: RequestSpec, constraint: Constraint | None) -> None:
    """Raises Invalid for a grammar that nobody would hold the answer to."""
    if spec.sampling.grammar is not None and constraint is None:
        raise Invalid("this worker can't follow grammars", param="response_format")


def most_kv_tokens(spec: RequestSpec, task: Task) -> int:
    """KV that the request may come to need; its last token is sampled and never computed."""
    growth = 0 if task is Task.PREFILL else spec.max_new_tokens - 1
    return len(spec.token_ids) + growth
