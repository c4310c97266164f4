"""Tests that the pictures in docs/pictures are what ``python -m tools.pictures`` draws."""

from pathlib import Path
from xml.etree import ElementTree

from tools.pictures import FOLDER, PICTURES, draw, main, stale_pictures

ROOT = Path(__file__).parents[3]


def test_pictures_are_up_to_date() -> None:
    assert stale_pictures(ROOT / FOLDER) == []


def test_each_picture_is_well_formed_and_inside_its_frame() -> None:
    for picture in PICTURES:
        ElementTree.fromstring(draw(picture))
        for box in picture.boxes:
            shift = 6 * (box.copies - 1)
            assert box.y - shift >= 0 and box.x + box.width + shift <= picture.width, box.title
            assert box.y + box.height <= picture.height, box.title


def test_check_reports_a_stale_picture(tmp_path: Path) -> None:
    assert main(["--folder", str(tmp_path)]) == 0
    assert main(["--folder", str(tmp_path), "--check"]) == 0
    (tmp_path / f"{PICTURES[0].name}.svg").write_text("<svg/>")
    assert main(["--folder", str(tmp_path), "--check"]) == 1
