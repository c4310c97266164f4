"""Tests the reason that a container's process leaves for Kubernetes to show."""

from pathlib import Path

from baton.serve.termination_message import MAX_BYTES, write_termination_message


def test_termination_message_is_written_only_if_the_file_exists(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    write_termination_message("nobody wants to know", path)
    assert not path.exists()  # not in a container
    path.touch()
    write_termination_message("model is 'x': no such directory", path)
    assert path.read_text() == "model is 'x': no such directory"
    write_termination_message("ä" * MAX_BYTES, path)
    assert path.stat().st_size == MAX_BYTES
