"""The table of listening sockets in docs/network.md, made from ``baton.listening``.

python -m tools.socket_table
"""

from pathlib import Path

from baton.listening import markdown

PAGE = Path(__file__).parents[1] / "docs/network.md"
BEGIN, END = "<!-- sockets: begin -->\n", "<!-- sockets: end -->"


def filled(page: str) -> str:
    """The page with its table written anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{markdown()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
