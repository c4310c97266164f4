"""Generate the table of listening sockets in docs/network.md from ``baton.network.listeners``.

python -m tools.socket_table
"""

from pathlib import Path

from baton.network.listeners import listener_table

PAGE = Path(__file__).parents[1] / "docs/network.md"
BEGIN, END = "<!-- sockets: begin -->\n", "<!-- sockets: end -->"


def filled(page: str) -> str:
    """Return docs/network.md with its table regenerated."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{listener_table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
