"""Says how a simulated configuration is deployed: with ``baton up``, and with the Helm chart."""

from collections.abc import Mapping

from baton.config import Settings
from simulator.parallelism import Parallelism, PoolParallelism

ROLES = ("prefill", "decode", "mixed")

DEFAULT_POOLS = ("prefill", "decode")
"""The pools that the chart has unless they are disabled."""

DEFAULT_SLO = (
    Settings.model_fields["slo_ttft_seconds"].default,
    Settings.model_fields["slo_itl_seconds"].default,
)


def up_command(
    workers: Mapping[str, int], pools: PoolParallelism, slo: tuple[float, float]
) -> str | None:
    """Return the command that starts the workers on GPUs; MODEL stands for the model's folder or
    id. ``slo`` is the SLO for TTFT and ITL in seconds. Return None if ``baton up`` can't start such
    workers; :func:`deployment_note` says why."""
    if deployment_note(workers, pools) is not None:
        return None
    roles = _used_roles(workers)
    size = _size(pools, roles[0])
    parts = ["baton up --model MODEL --device cuda"]
    parts += [f"--{role} {workers[role]}" for role in roles]
    if size.num_gpus > 1:
        parts.append(f"--engine vllm --engine-args='{_engine_arguments(size)}'")
    parts += [f"--set {name}={value:g}" for name, value in _changed_settings(slo).items()]
    return " ".join(parts)


def helm_values(
    workers: Mapping[str, int], pools: PoolParallelism, slo: tuple[float, float]
) -> str | None:
    """Return the chart's values for the pools, as YAML; None if no workers can be started with
    these sizes."""
    roles, lines = _used_roles(workers), ["pools:"]
    if _replicates_attention(workers, pools):
        return None
    lines += [f"  {role}: {{enabled: false}}" for role in DEFAULT_POOLS if role not in roles]
    for role in roles:
        size = _size(pools, role)
        lines += [f"  {role}:", f"    role: {role}", f"    replicas: {workers[role]}"]
        lines.append(f"    gpu: {{count: {size.num_gpus}}}")
        if size.num_gpus > 1:
            lines.append(f'    settings: {{engine_args: "{_engine_arguments(size)}"}}')
    settings = [f"{name}: {value:g}" for name, value in _changed_settings(slo).items()]
    if any(_size(pools, role).num_gpus > 1 for role in roles):
        settings.append("engine: vllm")
    if settings:
        lines += ["settings:", *(f"  {setting}" for setting in settings)]
    return "\n".join(lines)


def deployment_note(workers: Mapping[str, int], pools: PoolParallelism) -> str | None:
    """Say why ``baton up`` can't start the workers; None if it can."""
    sizes = {_size(pools, role) for role in _used_roles(workers)}
    if _replicates_attention(workers, pools):
        return (
            "EP above TP (each group of GPUs computes attention for its own requests) is only "
            "simulated so far: no worker of Baton can be started like this"
        )
    if len({size.num_gpus for size in sizes}) > 1:
        return "baton up gives all workers the same number of GPUs"
    if len(sizes) > 1:
        return "baton up gives all workers the same --engine-args"
    return None


def expert_note(workers: Mapping[str, int], pools: PoolParallelism) -> str | None:
    """Say what the expert-parallel sizes mean; None if there are none."""
    notes = []
    for role in _used_roles(workers):
        size = _size(pools, role)
        if size.expert > 1:
            notes.append(
                f"{role} worker, EP {size.expert}: each of {size.expert} GPUs has 1/{size.expert} "
                "of the experts, whole; tokens are sent to their experts and back"
            )
    return "; ".join(notes) or None


def _replicates_attention(workers: Mapping[str, int], pools: PoolParallelism) -> bool:
    return any(_size(pools, role).num_replicas > 1 for role in _used_roles(workers))


def _size(pools: PoolParallelism, role: str) -> Parallelism:
    size: Parallelism = getattr(pools, role)
    return size


def _used_roles(workers: Mapping[str, int]) -> list[str]:
    return [role for role in ROLES if workers.get(role)]


def _engine_arguments(size: Parallelism) -> str:
    """Return vLLM's arguments; its expert-parallel size is always the number of GPUs."""
    whole_experts = " --enable-expert-parallel" if size.expert > 1 else ""
    return f"--tensor-parallel-size {size.tensor}{whole_experts}"


def _changed_settings(slo: tuple[float, float]) -> dict[str, float]:
    names = ("slo_ttft_seconds", "slo_itl_seconds")
    return {
        name: value
        for name, value, default in zip(names, slo, DEFAULT_SLO, strict=True)
        if value != default
    }
