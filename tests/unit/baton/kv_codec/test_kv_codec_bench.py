"""Tests ``baton bench kv-codec`` with a tiny model."""

import json
from pathlib import Path

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.registry import open_codecs
from command_line.bench_kv_codec.codec_speed import measure_speeds
from command_line.bench_kv_codec.run import _random_blocks
from tests.baton_command import Ask, ask

__all__ = ["ask"]

FORMAT = BlockFormat("bfloat16", 1, 16, 2, 64)
DEMO = str(Path(__file__).parents[4] / "baton" / "models" / "demo")
README = str(Path(__file__).parents[4] / "README.md")
SHORT = ("--prompts", "1", "--prompt-tokens", "40", "--continuation-tokens", "8")


def test_speeds_are_of_a_copy_the_codecs_and_a_general_compressor() -> None:
    speeds = measure_speeds(open_codecs(FORMAT), _random_blocks(FORMAT, 9))
    names = [each.name for each in speeds]
    assert names[:5] == ["copy", "lossless", "fp8", "int4", "int2"]
    assert names[5] in ("zstd -1", "zlib -1")
    assert [round(each.ratio, 1) for each in speeds[:5]] == [1.0, 1.4, 2.0, 3.5, 6.2]
    assert all(each.encode_bytes_per_second > 0 for each in speeds)
    assert all(each.decode_bytes_per_second > 0 for each in speeds)


def test_result_has_qualities_and_the_lossless_codec_changes_nothing(ask: Ask) -> None:
    arguments = ["bench", "kv-codec", "--model", DEMO, "--text", README, *SHORT, "--json", "-"]
    code, out, _ = ask(*arguments)
    assert code == 0
    result = json.loads(out)
    assert result["format"] == "baton-bench-kv-codec-1"
    assert result["layout"] == "float32[6x2x16x4x32]"
    none, *qualities = result["qualities"]
    assert none["name"] == "none"
    assert [each["name"] for each in qualities] == [
        name.value for name in KvCodecName if name != KvCodecName.NONE
    ]
    assert qualities[0]["perplexity"] == none["perplexity"]
    assert qualities[0]["agreement"] == 1
    assert all(each["perplexity"] != none["perplexity"] for each in qualities[1:])
