"""The models that a router serves, and how requests name them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import TenantId
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.generation.generation_context import GenerationContext
from router.generation.model_workers import ModelWorkers
from router.generation.prefix_pinner import PrefixPinner
from router.openai.grammar_validator import GrammarValidator
from router.openai.model_text import ModelText
from router.openai.parsers.model_output_format import ModelOutputFormat
from router.openai.preprocessor import ModelLimits
from router.tenants.fair_limiter import FairLimiter
from router.tenants.tenant import Tenant


@dataclass(slots=True)
class ServedModel:
    """A model, and the router's components for it. ``aliases`` are other names that clients may
    use for it."""

    name: str
    vocab_size: int
    text: ModelText
    workers: ModelWorkers
    generation_context: GenerationContext
    aliases: frozenset[str] = frozenset()
    prefix_pinner: PrefixPinner | None = None

    @classmethod
    def build(
        cls,
        tokenizer: Tokenizer,
        workers: ModelWorkers,
        generation_context: GenerationContext,
        *,
        vocab_size: int,
        aliases: frozenset[str] = frozenset(),
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        grammar_validator: GrammarValidator | None = None,
        prefix_pinner: PrefixPinner | None = None,
    ) -> "ServedModel":
        """Wire a model's components together. Without ``grammar_validator``, grammars are not
        checked; without ``prefix_pinner``, prefixes are not pinned. Raises Invalid if a parser does
        not fit the model."""
        output_format = ModelOutputFormat.detect(tokenizer, tool_parser, reasoning_parser)
        return cls(
            workers.model,
            vocab_size,
            ModelText(tokenizer, output_format, grammar_validator or GrammarValidator()),
            workers,
            generation_context,
            aliases,
            prefix_pinner,
        )

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.workers.max_model_tokens, self.vocab_size)


class ModelDirectory:
    """All models that a router serves, at least one. The first one that a tenant may use answers
    the tenant's requests that name no model. An alias that several models share names none of them.

    ``limiter`` limits the answers in progress over all models. No model can use all of it while
    there are others, so the requests for one model, however many, leave room for those for another.
    """

    def __init__(self, models: Sequence[ServedModel], max_concurrent_requests: int) -> None:
        assert models, "a router serves at least one model"
        self.all = tuple(models)
        self.limiter = FairLimiter(max_concurrent_requests, user="model")
        self._by_name = {model.name: model for model in models}
        num_owners = Counter(alias for model in models for alias in model.aliases)
        for model in models:
            unique = (alias for alias in model.aliases if num_owners[alias] == 1)
            self._by_name |= {alias: model for alias in unique if alias not in self._by_name}

    @property
    def max_model_tokens(self) -> int:
        """The length of the longest context of all models, in tokens."""
        return max(model.workers.max_model_tokens for model in self.all)

    def of_tenant(self, tenant: Tenant) -> Sequence[ServedModel]:
        """Return the models that a tenant may use."""
        if tenant.models is None:
            return self.all
        return [model for model in self.all if model.name in tenant.models]

    def find(self, name: str | None, tenant: Tenant) -> ServedModel:
        """Return the model that a tenant's request names. Raises ApiError (404) if there is no such
        model, or if the tenant may not use it."""
        usable = self.of_tenant(tenant)
        model = self._by_name.get(name) if name is not None else next(iter(usable), None)
        if model is not None and model in usable:
            return model
        served = ", ".join(repr(each.name) for each in usable) or "no model for this API key"
        message = f"The model {name!r} does not exist; this server has {served}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def acquire(self, model: ServedModel, count: int) -> None:
        """Add ``count`` answers to those of ``model`` that are in progress. Raises Overloaded if
        too many are."""
        self.limiter.acquire(count, TenantId(model.name), 1.0, shared=len(self.all) > 1)

    def release(self, model: ServedModel, count: int) -> None:
        self.limiter.release(count, TenantId(model.name))
