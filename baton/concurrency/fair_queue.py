"""A queue in which owners take turns."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


def _always(_: Any) -> bool:
    return True


class FairQueue(Generic[Item]):
    """Items of several owners, such as tenants. Owners take turns, and the items of one owner are
    taken in the order in which they were added. Plain data: it limits and awaits nothing."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, deque[Item]] = OrderedDict()
        """Contains only owners with items; the owner whose turn is next comes first."""
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def num_items_of(self, owner: str) -> int:
        return len(self._items.get(owner, ()))

    def add(self, owner: str, item: Item) -> None:
        self._items.setdefault(owner, deque()).append(item)
        self._num_items += 1

    def take(
        self,
        may_serve: Callable[[str], bool] = _always,
        is_wanted: Callable[[Item], bool] = _always,
    ) -> tuple[str, Item] | None:
        """Remove the next item of the first owner for which ``may_serve`` is true, and return both;
        None if there is none. The owner's other items then wait for those of all other owners.
        Items for which ``is_wanted`` is false are dropped instead, and cost their owner no turn."""
        while (owner := next(filter(may_serve, self._items), None)) is not None:
            items = self._items.pop(owner)
            while items:
                item = items.popleft()
                self._num_items -= 1
                if is_wanted(item):
                    if items:
                        self._items[owner] = items
                    return owner, item
        return None

    def take_from_largest(self) -> Item:
        """Remove the first item of the owner with the most items, as if it were its turn."""
        taken = self.take(max(self._items, key=self.num_items_of).__eq__)
        assert taken is not None
        return taken[1]

    def remove(self, owner: str, item: Item) -> None:
        """Remove an item, if it is still in the queue."""
        items = self._items.get(owner)
        if items is None or item not in items:
            return
        items.remove(item)
        self._num_items -= 1
        if not items:
            del self._items[owner]
