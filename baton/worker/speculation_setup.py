"""Decides whether a worker speculates, and loads its draft model."""

from dataclasses import replace

import structlog

from baton.checkpoints.checkpoint import load_model_limits
from baton.checkpoints.hub import resolve_model
from baton.config import Settings
from baton.engine.runner import ModelRunner
from baton.engine.speculation.draft_source import DraftSource
from baton.errors import Invalid
from baton.worker.engine_settings import runner_options

log = structlog.get_logger(__name__)


def check_speculation(settings: Settings) -> None:
    """Raise Invalid if the settings of speculation contradict one another. This is called before
    the model is loaded, which may take minutes."""
    wanted = settings.speculation
    if wanted == "draft" and not settings.draft_model:
        raise Invalid("speculation is draft, so draft_model must be set", param="draft_model")
    if wanted == "ngram" and settings.draft_model:
        raise Invalid("speculation is ngram, so draft_model must not be set", param="draft_model")
    if settings.draft_model and wanted != "off":
        _check_draft_model(settings)


def _check_draft_model(settings: Settings) -> None:
    """Raise Invalid unless the draft model has the model's tokenizer and vocabulary."""
    assert settings.draft_model is not None
    folders = resolve_model(settings.model), resolve_model(settings.draft_model)
    tokenizers = [(folder / "tokenizer.json").read_bytes() for folder in folders]
    sizes = [load_model_limits(folder).vocab_size for folder in folders]
    if tokenizers[0] != tokenizers[1] or sizes[0] != sizes[1]:
        raise Invalid(
            f"draft_model is {settings.draft_model}; it must have the tokenizer (tokenizer.json) "
            f"and the vocabulary size of {settings.model}",
            param="draft_model",
        )


def uses_speculation(settings: Settings, runner: ModelRunner) -> bool:
    """Whether to use speculative decoding. Raises Invalid if it is set, but would change answers
    with this runner."""
    if settings.speculation in ("ngram", "draft") and not runner.supports_speculation:
        raise Invalid(
            f"speculation is {settings.speculation}, but this worker computes with "
            f"{runner.description}. Speculation needs Baton's CPU kernels, whose results don't "
            "depend on how many tokens are computed at once. Set speculation to auto or off",
            param="speculation",
        )
    return settings.speculation != "off" and runner.supports_speculation


def load_draft_source(settings: Settings, runner: ModelRunner) -> DraftSource | None:
    """Load the draft model, if there is one and the worker speculates. Raises Invalid."""
    if settings.draft_model is None or not uses_speculation(settings, runner):
        return None
    from baton.engine.speculation.draft_model import DraftModelSource

    options = replace(
        runner_options(settings),
        num_blocks=None,
        pool_bytes=settings.draft_pool_bytes,
        deterministic=False,
        max_adapters=0,
    )
    drafter = ModelRunner.load(resolve_model(settings.draft_model), options)
    log.info("draft_model_loaded", computed_by=drafter.description)
    return DraftModelSource(drafter, drafter.limits.max_position_embeddings)
