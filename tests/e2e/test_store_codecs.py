"""Tests a cluster whose KV store keeps encoded blocks, in DRAM and on the SSD, and whose workers
reload them."""

import json

import numpy as np

from testkit.local_cluster import LocalCluster, local_cluster

NUM_PROMPTS, PROMPT_TOKENS = 16, 400
SETTINGS: dict[str, object] = {
    "threads": 1,
    "dtype": "float32",
    "num_blocks": 80,  # three prompts, so that the others come from the store
    "max_model_tokens": 700,
    "store_bytes": 8 << 20,
    "store_disk_bytes": 64 << 20,
    "store_reload": "fetch",
    "kv_codec_store": "lossless",
    "kv_codec_disk": "lossless",
    "transports": "grpc",
}


def answers(cluster: LocalCluster, prompts: list[list[int]]) -> list[list[int]]:
    return [cluster.complete(prompt, 6, temperature=0, ignore_eos=True) for prompt in prompts]


def test_answers_from_encoded_blocks_equal_computed_ones() -> None:
    random = np.random.default_rng(11)
    shape = (NUM_PROMPTS, PROMPT_TOKENS)
    prompts = random.integers(3, 4000, size=shape).tolist()
    with local_cluster(prefill=1, decode=1, settings=SETTINGS) as cluster:
        computed = answers(cluster, prompts)
        assert answers(cluster, prompts) == computed
        [stats] = json.loads(cluster.baton("kv", "stats", "--json").stdout).values()
        assert cluster.baton("check", check=False).returncode == 0
    assert stats["violation"] == "" and stats["checksum_failures"] == 0
    assert stats["hit_blocks_disk"] > 0 and stats["hit_blocks_dram"] > 0
    assert stats["used_bytes"] < stats["raw_bytes"]
    assert stats["disk_used_bytes"] < stats["disk_raw_bytes"]
