"""Compares the staging area with a list of ranges, for random sequences of calls."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.kv_codec import ENCODED_ALIGNMENT_BYTES as UNIT
from baton.worker.staging_area import StagingArea, StagingRange

BEGIN, NUM_UNITS = 3, 16
READERS_END = BEGIN + 12


class StagingAreaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.area = StagingArea(BEGIN * UNIT, NUM_UNITS * UNIT)
        self.taken: list[StagingRange] = []

    def free_places(self, num_units: int, end: int) -> list[int]:
        """Return the units at which a range of ``num_units`` could begin."""
        used = {
            unit
            for each in self.taken
            for unit in range(each.offset_bytes // UNIT, each.end_bytes // UNIT)
        }
        return [
            first
            for first in range(BEGIN, end - num_units + 1)
            if not used & set(range(first, first + num_units))
        ]

    @rule(num_units=st.integers(1, 13), less=st.integers(0, UNIT - 1), for_reader=st.booleans())
    def allocate(self, num_units: int, less: int, for_reader: bool) -> None:
        places = self.free_places(num_units, READERS_END if for_reader else BEGIN + NUM_UNITS)
        taken = self.area.try_allocate(num_units * UNIT - less, for_reader=for_reader)
        if not places:
            assert taken is None
            return
        first = places[0] if for_reader else places[-1]
        assert taken == StagingRange(first * UNIT, num_units * UNIT)
        self.taken.append(taken)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.taken) - 1))
        self.area.release(self.taken.pop(index))

    @invariant()
    def the_area_is_whole(self) -> None:
        self.area.check_integrity()
        assert self.area.used_bytes == sum(each.size_bytes for each in self.taken)


TestStagingArea = StagingAreaMachine.TestCase
