"""Renders a registry's metrics as Prometheus text, some of them also under the names that other
servers give to what they mean, so that tools and dashboards made for those servers work with Baton.
An alias is computed from the collected metrics when they are rendered; nothing is counted twice."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

MODEL_LABEL = "model"
WORKER_INFO = "baton_worker_info"


@dataclass(frozen=True, slots=True)
class MetricAlias:
    """Another name of the metric family ``source``. Both names have no suffix such as ``_total``.

    ``labels`` maps labels of ``source`` to labels of the alias; samples that differ in other labels
    are added up. Only samples with one of the values in ``where``, by label, are included; an empty
    mapping includes all. With ``is_share``, the alias is their share of all samples' sum.
    ``values`` maps values of labels to those of the alias. The label ``model`` always becomes
    ``model_name``; a worker's metrics, which lack it, get the worker's model."""

    name: str
    source: str
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    is_share: bool = False


_USED_BLOCKS = ("filling", "referenced", "quarantined")

VLLM_ALIASES = (
    MetricAlias("vllm:prompt_tokens", "baton_prompt_tokens"),
    MetricAlias("vllm:prompt_tokens_cached", "baton_cached_tokens"),
    MetricAlias("vllm:prefix_cache_queries", "baton_prompt_tokens"),
    MetricAlias("vllm:prefix_cache_hits", "baton_cached_tokens", {"tier": ("device",)}),
    MetricAlias("vllm:generation_tokens", "baton_completion_tokens"),
    MetricAlias(
        "vllm:request_success",
        "baton_answers",
        labels={"reason": "finished_reason"},
        values={"tool_calls": "stop", "cancelled": "abort"},
    ),
    MetricAlias("vllm:e2e_request_latency_seconds", "baton_request_seconds"),
    MetricAlias("vllm:time_to_first_token_seconds", "baton_time_to_first_token_seconds"),
    MetricAlias("vllm:request_time_per_output_token_seconds", "baton_inter_token_latency_seconds"),
    MetricAlias("vllm:request_queue_time_seconds", "baton_worker_queue_seconds"),
    MetricAlias("vllm:num_requests_running", "baton_worker_sequences", {"state": ("running",)}),
    MetricAlias(
        "vllm:num_requests_waiting", "baton_worker_sequences", {"state": ("waiting", "reserved")}
    ),
    MetricAlias(
        "vllm:kv_cache_usage_perc", "baton_worker_blocks", {"state": _USED_BLOCKS}, is_share=True
    ),
    MetricAlias("vllm:num_preemptions", "baton_worker_preemptions"),
    MetricAlias("vllm:spec_decode_num_draft_tokens", "baton_worker_drafted_tokens"),
    MetricAlias("vllm:spec_decode_num_accepted_tokens", "baton_worker_accepted_tokens"),
)

METRIC_ALIASES: Mapping[str, Sequence[MetricAlias]] = MappingProxyType({
    "none": (),
    "vllm": VLLM_ALIASES,
})  # fmt: skip
"""The aliases for each value of the setting ``metric_aliases``."""


def render_metrics(registry: Collector, aliases: Iterable[MetricAlias] = ()) -> bytes:
    """Return the body of ``/metrics``. Each family with an alias is repeated under that; the
    registry is collected only once."""
    families = tuple(registry.collect())
    return generate_latest(_Families((*families, *alias_families(families, aliases))))


class _Families(Collector):
    """A collector of families that have already been collected."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def alias_families(families: Sequence[Metric], aliases: Iterable[MetricAlias]) -> Iterator[Metric]:
    """Yield the family of each alias whose source is among ``families``."""
    by_name = {family.name: family for family in families}
    info = by_name.get(WORKER_INFO)
    worker_model = info.samples[0].labels.get(MODEL_LABEL, "") if info and info.samples else ""
    for alias in aliases:
        source = by_name.get(alias.source)
        if source is not None:
            yield _aliased(source, alias, worker_model)


def _aliased(source: Metric, alias: MetricAlias, worker_model: str) -> Metric:
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    total = 0.0
    for sample in source.samples:
        suffix = sample.name.removeprefix(source.name)
        if suffix == "_created":
            continue
        total += sample.value
        labels = _alias_labels(sample.labels, alias, worker_model)
        key = suffix, tuple(labels.items())
        included = all(sample.labels[label] in values for label, values in alias.where.items())
        sums[key] = sums.get(key, 0.0) + (sample.value if included else 0.0)
    family = Metric(alias.name, f"alias of {source.name}: {source.documentation}", source.type)
    whole = total or 1.0 if alias.is_share else 1.0
    family.samples = [
        Sample(alias.name + suffix, dict(labels), value / whole)
        for (suffix, labels), value in sums.items()
    ]
    return family


def _alias_labels(
    labels: Mapping[str, str], alias: MetricAlias, worker_model: str
) -> dict[str, str]:
    kept = {"model_name": labels.get(MODEL_LABEL, worker_model)}
    for label, name in alias.labels.items():
        kept[name] = alias.values.get(labels[label], labels[label])
    if "le" in labels:
        kept["le"] = labels["le"]
    return kept
