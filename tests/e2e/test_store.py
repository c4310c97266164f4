"""Tests the KV store in a real cluster: a conversation stays cached on any worker and across
restarts, its cached token counts are exact, and an administrator can list and purge blocks."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from testkit.local_cluster import LocalCluster, local_cluster
from tests.conversation import BLOCK_TOKENS, EXACT, ScriptedConversation

pytestmark = pytest.mark.timeout(300)
TURNS = 8
POOLS = ("--prefill", "2", "--decode", "2")


@pytest.fixture(scope="module")
def warm() -> Iterator[LocalCluster]:
    with local_cluster(prefill=2, decode=2, settings=EXACT) as running:
        yield running


def kv(cluster: LocalCluster, *arguments: str) -> Any:
    return json.loads(cluster.baton("kv", *arguments, "--json").stdout)


def test_cached_tokens_are_exact_at_every_turn_and_after_a_restart(warm: LocalCluster) -> None:
    talk = ScriptedConversation(warm)
    for _ in range(TURNS):
        turn = talk.take_turn()
        assert turn.cached_tokens == turn.expected_tokens, turn
        assert sum(turn.tiers.values()) == turn.cached_tokens
    assert turn.cached_tokens > 1000
    num_stored = kv(warm, "stats")["kvstore"]["put_blocks"]

    warm.baton("down")
    port = warm.url.rpartition(":")[2]
    warm.baton("up", "--detach", *POOLS, "--port", port)
    stats = kv(warm, "stats")["kvstore"]
    assert (stats["disk_blocks"], stats["num_blocks"], stats["violation"]) == (num_stored, 0, "")
    again = ScriptedConversation(warm, known=talk)
    for before in talk.turns:
        turn = again.take_turn()
        assert turn.token_ids == before.token_ids
        # Everything up to the last token was computed before the restart.
        assert turn.cached_tokens == (len(turn.prompt_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert kv(warm, "stats")["kvstore"]["hit_blocks_disk"] > 0
    assert warm.baton("check").returncode == 0


def test_the_operator_can_find_warm_list_and_purge_blocks(warm: LocalCluster) -> None:
    prompt = "def warm_up(store):\n" * 20
    missing = kv(warm, "find", prompt)
    assert missing["held"] == {"kvstore": 0} and missing["num_blocks"] > 5
    done = warm.baton("kv", "warm", "--prompt", prompt)
    assert "1 prompts" in done.stdout and "0 were cached already" in done.stdout
    while kv(warm, "find", prompt)["held"]["kvstore"] < missing["num_blocks"]:
        pass  # blocks are stored in the background; the test's timeout bounds this
    listed = kv(warm, "ls", "--tenant", "default", "--limit", "3")["kvstore"]
    assert len(listed["blocks"]) == 3 and listed["total"] >= missing["num_blocks"]
    key = listed["blocks"][0]["key"]
    assert kv(warm, "find", key) == {"num_blocks": 1, "held": {"kvstore": 1}}
    assert kv(warm, "ls", "--tenant", "nobody")["kvstore"]["total"] == 0
    assert kv(warm, "purge", "--older-than", "1d") == {"purged": {"kvstore": 0}}
    assert kv(warm, "purge", "--model", "demo")["purged"]["kvstore"] >= missing["num_blocks"]
    stats = kv(warm, "stats")["kvstore"]
    assert (stats["num_blocks"], stats["disk_blocks"], stats["violation"]) == (0, 0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["purge"], 2, "purge needs --tenant, --model, --older-than, or --all"),
        (
            ["purge", "--older-than", "soon"],
            2,
            "age is 'soon'; it must be like 90, 15m, 2h or 3d",
        ),
        (["ls", "--model", "nobody"], 1, "no worker serves 'nobody'"),
        (["find", "short"], 2, "it must have at least 16, the size of a block"),
        (["warm"], 2, "warm needs --prompt TEXT or --prompt-file FILE"),
    ],
)
def test_invalid_kv_commands_are_refused(
    warm: LocalCluster, arguments: list[str], code: int, message: str
) -> None:
    done = warm.baton("kv", *arguments, check=False)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
