"""What the router does with a request, without HTTP: prepare, send on its journeys, account."""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from baton.clock import Clock
from baton.core.ids import Epoch, RequestId, TenantId
from baton.core.request import RequestSpec
from baton.errors import BatonError, Invalid, Overloaded, Unavailable
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.generation.block_key_hasher import BlockKeyHasher
from router.generation.cluster import Cluster
from router.generation.generation import Generation, GenerationContext
from router.generation.prefix_pinner import PrefixPinner
from router.generation.record import GenerationHistory, GenerationRecord
from router.http.peer_routers import PeerRouters
from router.http.raw_body import BodyBudget, RawBody
from router.openai.choice_stream import ChoiceStream, DeltaHandler, PromptLogprobsBuilder, TextSink
from router.openai.grammar_validator import GrammarValidator
from router.openai.offload_executor import OffloadExecutor
from router.openai.parsers.model_output_format import ModelOutputFormat
from router.openai.preprocessor import ModelLimits, Preprocessor, Prompt
from router.openai.prompt_logprobs import build_prompt_token_entries
from router.openai.prompt_logprobs_budget import PromptLogprobsBudget
from router.openai.schema import ChatBody, CompletionBody
from router.openai.special_tokens import SpecialTokenFilter
from router.telemetry.metrics import RouterMetrics
from router.telemetry.tracing import RequestTracer
from router.tenants.admission import AdmissionController
from router.tenants.authentication import Authenticator
from router.tenants.fair_limiter import FairLimiter
from router.tenants.quota_client import QuotaClient
from router.tenants.quota_store import QuotaStore
from router.tenants.tenant import TenantAttributes
from router.tenants.usage_flusher import UsageFlusher
from router.tenants.usage_recorder import UsageRecorder
from router.tenants.usage_store import MemoryUsageStore, UsageStore

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """``aliases`` are other names that a client may use for ``model``. ``control_socket`` is that
    of the supervisor, if there is one."""

    model: str
    vocab_size: int
    aliases: frozenset[str] = frozenset()
    max_body_bytes: int = 8 * 1024 * 1024
    max_inflight_body_bytes: int = 128 * 1024 * 1024
    max_concurrent_requests: int = 1024
    body_seconds: float = 60.0
    tenant_secret: str | None = None
    slo_first_token_seconds: float = 0.0
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    control_socket: str | None = None
    request_seconds: float = 3600.0
    cors_origins: tuple[str, ...] = ()
    known_hosts: tuple[str, ...] | None = None
    """The names that a request without a key may call us by; None: any."""
    access_log: bool = False
    refuses_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Who asks, as one request has found it. ``chain`` names the blocks of its prompts, None while
    there are no workers; ``session`` is empty where none is named."""

    tenant: TenantId
    standing: TenantAttributes
    chain: BlockKeyHasher | None
    session: str = ""


def session_id(tenant: TenantId, cache_key: str | None) -> str:
    """A tenant's own, and as short as any: empty for no key."""
    if not cache_key:
        return ""
    named = f"{tenant}/{cache_key}".encode(errors="replace")
    return hashlib.blake2b(named, digest_size=12).hexdigest()


def _random_id() -> str:
    return secrets.token_hex(16)


def _random_seed() -> int:
    return secrets.randbits(63)


@dataclass(slots=True)
class RouterContext:
    """The router's parts, wired. Randomness and time come in."""

    config: RouterConfig
    tokenizer: Tokenizer
    cluster: Cluster
    guide: GenerationContext
    doorkeeper: Authenticator
    clock: Clock
    new_id: Callable[[], str] = _random_id
    new_seed: Callable[[], int] = _random_seed
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    records: GenerationHistory = field(default_factory=GenerationHistory)
    formats: GrammarValidator = field(default_factory=GrammarValidator)
    scores: PromptLogprobsBudget = field(default_factory=PromptLogprobsBudget)
    large_work: OffloadExecutor = field(default_factory=OffloadExecutor)
    dialect: ModelOutputFormat = field(init=False)
    gate: FairLimiter = field(init=False)
    bodies: BodyBudget = field(init=False)
    ledger: UsageRecorder = field(init=False)
    entrance: AdmissionController = field(init=False)
    usage: UsageStore = field(default_factory=MemoryUsageStore)
    treasury: QuotaStore | None = None
    """Where routers share tenants' limits; None: each gives an equal part."""
    pinner: PrefixPinner | None = None
    tenancy: UsageFlusher | None = None
    """Of a router that runs."""
    draining: bool = False
    refuses_when_draining: bool = True
    """Not where others listen at the same port: new connections go to them, and whoever is
    connected to this one still is answered."""
    tracing: RequestTracer | None = None
    """None: no request is traced."""
    peers: PeerRouters | None = None
    special_tokens: SpecialTokenFilter = field(init=False)
    own_id: str = field(default_factory=lambda: _random_id()[:8])
    """Tells this router's request ids from others'."""

    def __post_init__(self) -> None:
        config = self.config
        self.dialect = ModelOutputFormat.of(
            self.tokenizer, config.tool_parser, config.reasoning_parser
        )
        self.special_tokens = SpecialTokenFilter(self.tokenizer)
        self.gate = FairLimiter(self.config.max_concurrent_requests)
        self.bodies = BodyBudget(self.config.max_inflight_body_bytes)
        self.ledger = UsageRecorder(self.metrics.tenants, self.clock)
        self.entrance = AdmissionController(
            self.gate,
            lambda: self.doorkeeper.roll,
            lambda: self.cluster.num_routers,
            self.ledger,
            self.clock,
            self._bank(),
        )

    def _bank(self) -> QuotaClient | None:
        if self.treasury is None:
            return None
        return QuotaClient(
            self.treasury, self.own_id, self.clock, self.metrics.tenants.limits_split
        )

    def check_open(self) -> None:
        """Raises Unavailable while draining."""
        if self.draining and self.refuses_when_draining:
            raise Unavailable("this router is draining")

    def check_model(self, name: str | None) -> None:
        """A body without a model means the one that there is. Raises Problem (404)."""
        if name is not None and name != self.config.model and name not in self.config.aliases:
            message = f"The model {name!r} does not exist; this is {self.config.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def raw_body(self, tenant_id: TenantId) -> RawBody:
        """For a body of this tenant's that is about to come."""
        weight = self.doorkeeper.roll.tenant(tenant_id).weight
        return self.bodies.body(tenant_id, weight, shared=self.entrance.is_shared)

    def asker(self, tenant: TenantId, body: ChatBody | CompletionBody) -> RequestContext:
        """As of now: the roll and the workers may be others later."""
        standing = self.doorkeeper.roll.tenant(tenant).standing(
            self.config.tenant_secret, body.cache_salt, body.priority or 0
        )
        session = session_id(tenant, body.prompt_cache_key) if isinstance(body, ChatBody) else ""
        return RequestContext(tenant, standing, self.cluster.key_chain(standing.salt), session)

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.cluster.max_model_tokens, self.config.vocab_size)

    def preparer(self, asker: RequestContext) -> Preprocessor:
        return Preprocessor(self.tokenizer, self.dialect, self.limits, asker.chain, self.new_seed())

    def choices(
        self,
        request_id: str,
        asker: RequestContext,
        body: ChatBody | CompletionBody,
        prompts: Sequence[Prompt],
        arrived_at: float,
    ) -> list[ChoiceStream]:
        """All candidates for each prompt, in the order of their indexes."""
        tenant, standing, chain = asker.tenant, asker.standing, asker.chain
        total = len(prompts) * body.candidates
        choices: list[ChoiceStream] = []
        for prompt in prompts:
            for number in range(body.candidates):
                name = request_id if total == 1 else f"{request_id}-{len(choices)}"
                size = len(prompt.token_ids)
                record = GenerationRecord(
                    RequestId(name), arrived_at, size, tenant, standing.is_urgent
                )
                if prompt.pins and number == 0 and self.pinner is not None:
                    self.pinner.expect(record, prompt.pins)
                spec = _request_spec(
                    prompt, name, number, standing, self.config.slo_first_token_seconds
                )
                model = self.config.model
                journey = Generation(
                    self.guide, spec, tenant, model, chain, prompt.keys, record, asker.session
                )
                choices.append(self._choice(len(choices), journey, body, prompt))
        self.records.add(request_id, [choice.record for choice in choices])
        return choices

    def _choice(
        self, index: int, journey: Generation, body: ChatBody | CompletionBody, prompt: Prompt
    ) -> ChoiceStream:
        reader, shown = None, frozenset[int]()
        if isinstance(body, ChatBody):
            reader = self.dialect.reader(
                body.offered_tools,
                forced=body.must_call,
                in_thought=prompt.in_thought,
                max_calls=body.max_calls,
            )
            shown = self.dialect.shown if reader is not None else shown
        if body.skip_special_tokens is False:
            shown = self.tokenizer.special_ids
        return ChoiceStream(
            index,
            journey,
            self.tokenizer.detokenizer(shown),
            body.stop,
            every_token=bool(body.return_token_ids) or body.num_logprobs is not None,
            reader=reader,
            shows_stop=bool(body.include_stop_str_in_output),
            score_prompt=self._score_prompt(prompt),
            offset=len(prompt.text),
            silent=prompt.silent,
        )

    def _score_prompt(self, prompt: Prompt) -> PromptLogprobsBuilder | None:
        if prompt.sampling.prompt_logprobs is None:
            return None
        return partial(build_prompt_token_entries, prompt.token_ids, self.tokenizer)

    async def follow_all(
        self, choices: Sequence[ChoiceStream], emit: DeltaHandler, outlet: TextSink | None = None
    ) -> None:
        """Runs all to their ends. The first that fails ends the others, and raises."""
        if len(choices) == 1:
            await self._follow(choices[0], emit, outlet)
            return
        failure: BatonError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                for choice in choices:
                    tasks.create_task(self._follow(choice, emit, outlet))
        except* BatonError as group:
            failure = _first_leaf_error(group)
        if failure is not None:
            raise failure

    async def _follow(
        self, choice: ChoiceStream, emit: DeltaHandler, outlet: TextSink | None
    ) -> None:
        """Exactly one terminal state is written down: complete, error or cancelled."""
        record = choice.record
        self.metrics.running.inc()
        try:
            record.note_end(await choice.run(emit, outlet), self.clock.monotonic())
        except BatonError as error:
            record.note_end("error", self.clock.monotonic(), str(error))
            _log_failure(record, error)
            raise
        except asyncio.CancelledError:
            record.note_end("cancelled", self.clock.monotonic())
            raise
        finally:
            record.note_end("error", self.clock.monotonic(), "internal error")
            self.metrics.running.dec()
            self.metrics.note_answer(record)


def _request_spec(
    prompt: Prompt, name: str, number: int, standing: TenantAttributes, first_token_seconds: float
) -> RequestSpec:
    sampling = replace(prompt.sampling, seed=(prompt.sampling.seed + number) % 2**64)
    return RequestSpec(
        request_id=RequestId(name),
        epoch=Epoch(1),
        token_ids=prompt.token_ids,
        num_prompt_tokens=len(prompt.token_ids),
        sampling=sampling,
        tenant_salt=standing.salt,
        first_token_seconds=first_token_seconds if standing.is_urgent else 0.0,
        tenant=standing.tag,
        priority=standing.priority,
        weight=standing.weight,
    )


def _log_failure(record: GenerationRecord, error: BatonError) -> None:
    """Whoever is refused may come again, or asked wrongly; everything else is a failure of ours."""
    refused = isinstance(error, Overloaded | Invalid)
    tell, event = (log.info, "request_refused") if refused else (log.warning, "request_failed")
    tell(event, error=str(error), placements=len(record.placements), **record.named)


def _first_leaf_error(group: BaseExceptionGroup[BatonError]) -> BatonError:
    first = group.exceptions[0]
    return _first_leaf_error(first) if isinstance(first, BaseExceptionGroup) else first
