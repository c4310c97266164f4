"""Says how a simulated configuration is deployed: with ``baton up``, and with the Helm chart."""

from collections.abc import Mapping

from baton.config import Settings

ROLES = ("prefill", "decode", "mixed")

DEFAULT_POOLS = ("prefill", "decode")
"""The pools that the chart has unless they are disabled."""

DEFAULT_SLO = (
    Settings.model_fields["slo_ttft_seconds"].default,
    Settings.model_fields["slo_itl_seconds"].default,
)


def up_command(
    workers: Mapping[str, int], gpus_per_worker: Mapping[str, int], slo: tuple[float, float]
) -> str | None:
    """Return the command that starts the workers on GPUs; MODEL stands for the model's folder or
    id. ``slo`` is the SLO for TTFT and ITL in seconds. Return None if ``baton up`` can't start such
    workers; :func:`deployment_note` says why."""
    if deployment_note(workers, gpus_per_worker) is not None:
        return None
    roles = _used_roles(workers)
    num_gpus = gpus_per_worker[roles[0]]
    parts = ["baton up --model MODEL --device cuda"]
    parts += [f"--{role} {workers[role]}" for role in roles]
    if num_gpus > 1:
        parts.append(f"--engine vllm --engine-args='{_tensor_parallel(num_gpus)}'")
    parts += [f"--set {name}={value:g}" for name, value in _changed_settings(slo).items()]
    return " ".join(parts)


def helm_values(
    workers: Mapping[str, int], gpus_per_worker: Mapping[str, int], slo: tuple[float, float]
) -> str:
    """Return the chart's values for the pools, as YAML."""
    roles, lines = _used_roles(workers), ["pools:"]
    lines += [f"  {role}: {{enabled: false}}" for role in DEFAULT_POOLS if role not in roles]
    for role in roles:
        num_gpus = gpus_per_worker[role]
        lines += [f"  {role}:", f"    role: {role}", f"    replicas: {workers[role]}"]
        lines.append(f"    gpu: {{count: {num_gpus}}}")
        if num_gpus > 1:
            lines.append(f'    settings: {{engine_args: "{_tensor_parallel(num_gpus)}"}}')
    settings = [f"{name}: {value:g}" for name, value in _changed_settings(slo).items()]
    if any(gpus_per_worker[role] > 1 for role in roles):
        settings.append("engine: vllm")
    if settings:
        lines += ["settings:", *(f"  {setting}" for setting in settings)]
    return "\n".join(lines)


def deployment_note(workers: Mapping[str, int], gpus_per_worker: Mapping[str, int]) -> str | None:
    """Say why ``baton up`` can't start the workers; None if it can."""
    if len({gpus_per_worker[role] for role in _used_roles(workers)}) > 1:
        return "baton up gives all workers the same number of GPUs"
    return None


def _used_roles(workers: Mapping[str, int]) -> list[str]:
    return [role for role in ROLES if workers.get(role)]


def _tensor_parallel(num_gpus: int) -> str:
    return f"--tensor-parallel-size {num_gpus}"


def _changed_settings(slo: tuple[float, float]) -> dict[str, float]:
    names = ("slo_ttft_seconds", "slo_itl_seconds")
    return {
        name: value
        for name, value, default in zip(names, slo, DEFAULT_SLO, strict=True)
        if value != default
    }
