"""The models that a router serves, and how requests name them."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.concurrency.budget import Budget
from baton.core.adapter import AdapterRef
from baton.core.ids import TenantId
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError, invalid_field
from router.generation.adapter_directory import AdapterDirectory, ServedAdapter
from router.generation.generation_context import GenerationContext
from router.generation.model_workers import ModelWorkers
from router.generation.prefix_pinner import PrefixPinner
from router.serving.grammar_validator import GrammarValidator
from router.serving.offload_executor import MIN_OFFLOAD_BYTES
from router.serving.parsers.model_output_format import ModelOutputFormat
from router.serving.preprocessor import ModelLimits
from router.serving.request import CHAT_NAMES, FieldNames
from router.serving.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from router.serving.schema.message import Message
from router.tenants.tenant import Tenant

UNTRUSTED_ROLES = ("user", "tool")
"""Roles whose content may come from someone other than the application."""


class SpecialTokenFilter:
    """Finds the special tokens of one tokenizer, such as ``<|im_start|>``, in messages.

    The tokenizer (as in vLLM and SGLang) turns such text into a real special token, with which a
    message can begin a turn of any role. If the setting ``special_tokens_in_messages`` is
    ``refused``, such messages are refused. This is for deployments that don't trust the authors of
    these messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = sorted(filter(None, map(tokenizer.token, tokenizer.special_ids)))
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def check(self, messages: Sequence[Message], names: FieldNames = CHAT_NAMES) -> None:
        """Check the messages of roles in :data:`UNTRUSTED_ROLES`. Raises ApiError (400) for the
        first special token found."""
        if self._pattern is None:
            return
        for number, message in enumerate(messages):
            found = message.role in UNTRUSTED_ROLES and self._pattern.search(message.content)
            if found:
                raise invalid_field(
                    names.message(number),
                    f"the message contains the special token {found[0]!r}; this server refuses "
                    "such messages",
                    "special_token",
                )


MAX_INDENTED_INLINE_BYTES = MIN_OFFLOAD_BYTES // 8
"""If the chat template indents JSON, larger bodies are rendered and tokenised in a thread. JSON
that is nested as deeply as it may be becomes some 60 times as long then: a body of 4 KiB takes up
to 9 ms, one of 32 KiB 70 ms."""


@dataclass(slots=True)
class ModelText:
    """The served model's tokenizer and output format, and the checks of clients' grammars and of
    special tokens in messages."""

    tokenizer: Tokenizer
    output_format: ModelOutputFormat
    grammar_validator: GrammarValidator = field(default_factory=GrammarValidator)
    special_tokens: SpecialTokenFilter = field(init=False)

    def __post_init__(self) -> None:
        self.special_tokens = SpecialTokenFilter(self.tokenizer)

    def tokenizing_bytes(self, body_bytes: int) -> int:
        """Return the size that an :class:`OffloadExecutor` should take for a body whose prompt is
        rendered and tokenised: that of the body, or more if its text may be much longer."""
        indents = "indent" in self.tokenizer.chat_template_source
        if indents and body_bytes > MAX_INDENTED_INLINE_BYTES:
            return max(body_bytes, MIN_OFFLOAD_BYTES + 1)
        return body_bytes


ADAPTER_RETRY_SECONDS = "2"
"""When to retry a request whose adapter no worker has loaded. Loading takes a second or so."""


@dataclass(slots=True)
class ServedModel:
    """A model, and the router's components for it. ``aliases`` are other names that clients may
    use for it. ``adapter`` is the LoRA adapter with which a request uses the model; None means the
    model itself. ``sampling_defaults`` are used where a request has no value."""

    name: str
    vocab_size: int
    text: ModelText
    workers: ModelWorkers
    generation_context: GenerationContext
    aliases: frozenset[str] = frozenset()
    prefix_pinner: PrefixPinner | None = None
    adapter: AdapterRef | None = None
    sampling_defaults: SamplingDefaults = OPENAI_DEFAULTS

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
        sampling_defaults: SamplingDefaults = OPENAI_DEFAULTS,
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
            sampling_defaults=sampling_defaults,
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
        self.limiter = Budget(max_concurrent_requests, user="model")
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
