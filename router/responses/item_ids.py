"""Ids of a response's items. They contain the response's id, so that an item can be found by its
own id alone."""

RESPONSE_PREFIX = "resp_"

ITEM_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}


def make_item_id(kind: str, response_id: str, position: str) -> str:
    """Make the id of an item; ``position`` is unique within the response."""
    return (
        f"{ITEM_PREFIXES.get(kind, 'item_')}{response_id.removeprefix(RESPONSE_PREFIX)}_{position}"
    )


def response_id_of(item_id: str) -> str:
    """Return the id of the response that an item belongs to. The result has no meaning for an id
    that :func:`make_item_id` did not make."""
    return RESPONSE_PREFIX + item_id.partition("_")[2].rpartition("_")[0]
