"""The models that a router serves, and how requests name them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.core.adapter import AdapterRef
from baton.core.ids import TenantId
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.generation.adapter_directory import AdapterDirectory, ServedAdapter
from router.generation.generation_context import GenerationContext
from router.generation.model_workers import ModelWorkers
from router.generation.prefix_pinner import PrefixPinner
from router.openai.grammar_validator import GrammarValidator
from router.openai.model_text import ModelText
from router.openai.parsers.model_output_format import ModelOutputFormat
from router.openai.preprocessor import ModelLimits
from router.tenants.fair_limiter import FairLimiter
from router.tenants.tenant import Tenant

ADAPTER_RETRY_SECONDS = "2"
"""When to retry a request whose adapter no worker has loaded. Loading takes a second or so."""


@dataclass(slots=True)
class ServedModel:
    """A model, and the router's components for it. ``aliases`` are other names that clients may
    use for it. ``adapter`` is the LoRA adapter with which a request uses the model; None means the
    model itself."""

    name: str
    vocab_size: int
    text: ModelText
    workers: ModelWorkers
    generation_context: GenerationContext
    aliases: frozenset[str] = frozenset()
    prefix_pinner: PrefixPinner | None = None
    adapter: AdapterRef | None = None

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
    def shown_name(self) -> str:
        """The name in answers: the adapter's, or the model's."""
        return self.name if self.adapter is None else self.adapter.name

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.workers.max_model_tokens, self.vocab_size)


class ModelDirectory:
    """All models that a router serves, at least one. The first one that a tenant may use answers
    the tenant's requests that name no model. An alias that several models share names none of them.

    ``limiter`` limits the answers in progress over all models. No model can use all of it while
    there are others, so the requests for one model, however many, leave room for those for another.
    ``adapters`` are the LoRA adapters of the models; None if there are none.
    """

    def __init__(self, models: Sequence[ServedModel], max_concurrent_requests: int) -> None:
        assert models, "a router serves at least one model"
        self.all = tuple(models)
        self.adapters: AdapterDirectory | None = None
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

    def by_name(self, name: str) -> ServedModel:
        """Return the model with this name or alias, which must exist."""
        return self._by_name[name]

    def of_tenant(self, tenant: Tenant) -> Sequence[ServedModel]:
        """Return the models that a tenant may use."""
        if tenant.models is None:
            return self.all
        return [model for model in self.all if model.name in tenant.models]

    def find(self, name: str | None, tenant: Tenant) -> ServedModel:
        """Return the model that a tenant's request names. Raises ApiError (404) if there is no such
        model, or if the tenant may not use it, and ApiError (503) if it is an adapter that no
        worker has loaded."""
        usable = self.of_tenant(tenant)
        model = self._by_name.get(name) if name is not None else next(iter(usable), None)
        if model is not None and model in usable:
            return model
        adapter = self._find_adapter(name, tenant) if model is None else None
        if adapter is not None:
            return replace(self._by_name[adapter.model], adapter=loaded_ref(adapter))
        served = ", ".join(repr(each.name) for each in usable) or "no model for this API key"
        message = f"The model {name!r} does not exist; this server has {served}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def adapters_of_tenant(self, tenant: Tenant) -> Sequence[ServedAdapter]:
        """Return the adapters that a tenant may use: those of its models, and those that are among
        its models by their own names."""
        return [
            adapter
            for adapter in (self.adapters.list() if self.adapters is not None else ())
            if adapter.model in self._by_name and _may_use(tenant, adapter)
        ]

    def _find_adapter(self, name: str | None, tenant: Tenant) -> ServedAdapter | None:
        if name is None or self.adapters is None:
            return None
        adapter = self.adapters.find(name)
        if adapter is None or adapter.model not in self._by_name:
            return None
        return adapter if _may_use(tenant, adapter) else None

    def acquire(self, model: ServedModel, count: int) -> None:
        """Add ``count`` answers to those of ``model`` that are in progress. Raises Overloaded if
        too many are."""
        self.limiter.acquire(count, TenantId(model.name), 1.0, shared=len(self.all) > 1)

    def release(self, model: ServedModel, count: int) -> None:
        self.limiter.release(count, TenantId(model.name))


def loaded_ref(adapter: ServedAdapter) -> AdapterRef:
    """Return the reference of an adapter. Raises ApiError (503) if no ready worker has loaded
    it."""
    if adapter.loaded_on:
        return adapter.ref
    reason = "no worker can load it" if adapter.errors else "no worker has loaded it yet"
    raise ApiError(
        503,
        f"the adapter {adapter.ref.name} is not loaded: {reason}",
        error_type="service_unavailable_error",
        code="adapter_not_loaded",
        headers={"retry-after": ADAPTER_RETRY_SECONDS},
    )


def _may_use(tenant: Tenant, adapter: ServedAdapter) -> bool:
    return tenant.models is None or not {adapter.model, adapter.ref.name}.isdisjoint(tenant.models)
