"""Checks of flags' values. Each raises Invalid, which names the flag."""

import math

from baton.errors import Invalid


def check_positive(flag: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise Invalid(f"{flag} is {value:g}; it must be finite and above 0")


def check_at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise Invalid(f"{flag} is {value}; it must be at least {least}")


def check_at_most(flag: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise Invalid(f"{flag} is {value}; it must be from 1 to {most:,}")
