"""Tests that the tool that draws the import graph reports cycles, and imports from a higher
layer."""

from tools.import_graph import describe, find_faults, load_layers, room_of

LAYERS = [["top"], ["left", "right"], ["baton"]]


def test_layers_are_those_of_import_linter() -> None:
    layers = load_layers()
    assert layers[0] == ["command_line"] and layers[-1] == ["baton"]
    programs = {"router", "conductor", "prefill_worker", "decode_worker", "attached_worker"}
    assert programs | {"kvstore"} in map(set, layers)


def test_a_module_belongs_to_its_package() -> None:
    assert room_of("router.http.server", {"baton.rpc"}) == "router"
    assert room_of("baton.rpc.framed.client", {"baton.rpc"}) == "baton.rpc"
    assert room_of("baton.errors", {"baton.rpc"}) == "baton"


def test_imports_that_lead_down_are_no_fault() -> None:
    graph = {"top": {"left", "baton.a"}, "left": {"baton.a"}, "baton.a": {"baton"}, "baton": set()}
    assert find_faults(graph, LAYERS) == []


def test_an_import_that_leads_up_or_sideways_is_a_fault() -> None:
    graph = {"left": {"right"}, "right": set(), "baton.a": {"left"}, "top": set()}
    assert find_faults(graph, LAYERS) == [
        "baton.a imports left, which is not in a lower layer",
        "left imports right, which is not in a lower layer",
    ]


def test_an_import_cycle_is_a_fault() -> None:
    graph = {"baton.a": {"baton.b"}, "baton.b": {"baton.a"}}
    (fault,) = find_faults(graph, LAYERS)
    assert fault.startswith("packages import each other cyclically: ")


def test_packages_are_listed_from_top_to_bottom() -> None:
    graph = {"baton": set(), "baton.a": {"baton.b"}, "baton.b": {"baton"}, "top": {"baton.a"}}
    text = describe(graph, LAYERS).splitlines()
    assert [line.split()[0] for line in text] == ["top", "baton.a", "baton.b", "baton"]
    assert text[-1].endswith("(none)")
