"""Draw the pictures of README.md and ARCHITECTURE.md as SVG files.

    python -m tools.pictures [--folder docs/pictures] [--check]

Each picture is a list of boxes and arrows below. ``--check`` writes nothing and exits with 1 if a
file differs from what would be drawn; ``test_pictures.py`` runs the same comparison.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path("docs/pictures")

INK, PAPER, FRAME, MUTED = "#1f2933", "#ffffff", "#9aa5b1", "#52606d"
CONTROL, COMPUTE, MEMORY, OUTSIDE = "#fff3d6", "#dcebff", "#e2f5e5", "#f1f3f5"
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines of text below it. Sizes are in pixels."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    fill: str = OUTSIDE
    copies: int = 1
    """How many rectangles to draw behind each other. Several stand for a pool of processes."""


@dataclass(frozen=True)
class Arrow:
    """A path through ``points`` with an arrowhead at its end, and a label at ``label_at``."""

    points: tuple[tuple[int, int], ...]
    label: str = ""
    label_at: tuple[int, int] = (0, 0)
    dashed: bool = False
    both_ways: bool = False


@dataclass(frozen=True)
class Picture:
    name: str
    width: int
    height: int
    description: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


CLUSTER = Picture(
    "cluster",
    860,
    420,
    "A client sends a request to a router. The router asks a conductor for a placement, submits "
    "the prompt to a prefill worker and the answer to a decode worker. The decode worker reads the "
    "KV blocks from the prefill worker. Both use the KV store of their host. All register in "
    "Redis.",
    (
        Box(20, 150, 110, 70, "client", ("OpenAI's API",), OUTSIDE),
        Box(200, 140, 150, 90, "router", ("HTTP, tenants,", "tokens, failover"), CONTROL, 2),
        Box(200, 20, 150, 70, "conductor", ("placement, plan",), CONTROL, 2),
        Box(480, 60, 170, 90, "prefill worker", ("chunked prefill,", "first token"), COMPUTE, 3),
        Box(480, 240, 170, 90, "decode worker", ("continuous batch,", "next tokens"), COMPUTE, 3),
        Box(720, 150, 120, 90, "KV store", ("DRAM and SSD,", "one per host"), MEMORY, 2),
        Box(200, 310, 150, 70, "Redis", ("who is here,", "where blocks lie"), MEMORY),
    ),
    (
        Arrow(((130, 185), (196, 185)), both_ways=True),
        Arrow(((275, 140), (275, 94)), "Place", (284, 122), both_ways=True),
        Arrow(((350, 165), (420, 165), (420, 105), (476, 105)), "prompt", (366, 156)),
        Arrow(((350, 200), (420, 200), (420, 285), (476, 285)), "tokens", (366, 219), False, True),
        Arrow(((565, 150), (565, 236)), "KV transfer", (573, 200)),
        Arrow(((650, 105), (690, 105), (690, 180), (716, 180)), "prefixes", (664, 96), False, True),
        Arrow(((650, 285), (690, 285), (690, 210), (716, 210)), "", (0, 0), True),
        Arrow(((275, 230), (275, 306)), "", (0, 0), True, True),
        Arrow(((476, 315), (354, 345)), "", (0, 0), True, True),
    ),
)

PICTURES = (CLUSTER,)


def draw(picture: Picture) -> str:
    """Return the SVG text of a picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width} {picture.height}" '
        f'width="{picture.width}" height="{picture.height}" role="img" font-family="{FONT}">',
        f"<title>{escape(picture.name)}</title>",
        f"<desc>{escape(picture.description)}</desc>",
        "<defs>"
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{MUTED}"/></marker>'
        "</defs>",
        f'<rect width="{picture.width}" height="{picture.height}" rx="10" fill="{PAPER}"/>',
        *(line for box in picture.boxes for line in _draw_box(box)),
        *(line for arrow in picture.arrows for line in _draw_arrow(arrow)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _draw_box(box: Box) -> list[str]:
    parts = []
    for copy in reversed(range(box.copies)):
        shift = 6 * copy
        parts.append(
            f'<rect x="{box.x + shift}" y="{box.y - shift}" width="{box.width}" '
            f'height="{box.height}" rx="8" fill="{box.fill}" stroke="{FRAME}"/>'
        )
    middle = box.x + box.width // 2
    top = box.y + (box.height - 20 * len(box.lines)) // 2 + 5
    parts.append(_text(middle, top, box.title, 15, INK, "600"))
    for number, line in enumerate(box.lines):
        parts.append(_text(middle, top + 20 * (number + 1), line, 12, MUTED, "400"))
    return parts


def _draw_arrow(arrow: Arrow) -> list[str]:
    path = " L".join(f"{x} {y}" for x, y in arrow.points)
    dashes = ' stroke-dasharray="5 4"' if arrow.dashed else ""
    start = ' marker-start="url(#head)"' if arrow.both_ways else ""
    parts = [
        f'<path d="M{path}" fill="none" stroke="{MUTED}" stroke-width="1.5"{dashes}'
        f'{start} marker-end="url(#head)"/>'
    ]
    if arrow.label:
        x, y = arrow.label_at
        parts.append(_text(x, y, arrow.label, 12, INK, "500", "start"))
    return parts


def _text(
    x: int, y: int, text: str, size: int, colour: str, weight: str, anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def stale_pictures(folder: Path) -> list[Path]:
    """Return the files in ``folder`` that are missing or differ from what would be drawn."""
    paths = {folder / f"{picture.name}.svg": draw(picture) for picture in PICTURES}
    return [p for p, svg in paths.items() if not p.is_file() or p.read_text() != svg]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--check", action="store_true", help="compare only; exit with 1 if stale")
    options = parser.parse_args(arguments)
    if options.check:
        stale = stale_pictures(options.folder)
        for path in stale:
            print(f"{path} is stale; run python -m tools.pictures", file=sys.stderr)
        return 1 if stale else 0
    options.folder.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        path = options.folder / f"{picture.name}.svg"
        path.write_text(draw(picture))
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
