"""Parses and formats Kubernetes quantities: ``500m`` is 0.5, ``1Gi`` is 1,073,741,824."""

import re

UNITS = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip
QUANTITY = re.compile(r"([0-9.]+)([A-Za-z]*)")


def quantity(text: str | int | float) -> float:
    """Parse a quantity."""
    found = QUANTITY.fullmatch(str(text))
    if found is None or found[2] not in UNITS:
        raise ValueError(f"{text!r} is not a quantity; it must be a number with a unit like Mi")
    return float(found[1]) * UNITS[found[2]]


def quantity_text(value: float) -> str:
    """Format a quantity with the largest binary unit of which it is a multiple, or in thousandths
    if it is not a whole number."""
    if value != int(value):
        return f"{round(value * 1000)}m"
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if value and value % UNITS[unit] == 0:
            return f"{int(value / UNITS[unit])}{unit}"
    return str(int(value))
