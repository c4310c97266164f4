"""The formats of tool calls, a row for each: how they are read, how they are written, and how they
are recognised. A new family is a row."""

from dataclasses import dataclass, replace

import regex

from router.serving.parsers.answer_tape import END, SPACE
from router.serving.parsers.call_syntax import (
    NAME,
    CallSyntax,
    Choice,
    Elements,
    JsonList,
    JsonObject,
    NamedJson,
)
from router.serving.parsers.gemma_calls import QUOTE, GemmaCall
from router.serving.parsers.marks import Mark, Segment, dropped
from router.serving.parsers.pythonic import PythonCalls
from router.serving.parsers.writing import (
    GemmaArguments,
    JsonArguments,
    KeyedArguments,
    Writing,
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The form in which a family writes tool calls.

    ``syntax`` reads calls behind a mark that opens ``Segment.CALL``; ``unannounced`` reads calls
    that begin an answer without a mark, where ``unannounced_begins`` is the pattern of their first
    character. After calls, the segment ``after_calls`` follows. ``writing`` is the way back: what
    is written by its grammar, ``syntax`` reads. ``trigger`` is the string of the first mark before
    calls, and ``special`` are all strings that may be special tokens.

    A model has the format if its chat template contains the first sign of one of ``signs``, and
    template or vocabulary the others."""

    name: str
    syntax: CallSyntax
    writing: Writing
    marks: tuple[Mark, ...] = ()
    trigger: str = ""
    special: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()
    unannounced: CallSyntax | None = None
    unannounced_begins: str = ""
    after_calls: Segment = Segment.TEXT


def _call(pattern: str, *, is_shown: bool = False, within: Segment = Segment.TEXT) -> Mark:
    return Mark(pattern, within, Segment.CALL, is_shown)


def _section(opening: str, call: str, closing: str) -> tuple[Mark, ...]:
    """The marks of calls that stand in a section of their own."""
    return (
        Mark(opening, Segment.TEXT, Segment.GAP),
        _call(call, within=Segment.GAP),
        _call(call),
        Mark(closing, Segment.GAP, Segment.TEXT),
        dropped(closing),
    )


def _invocations(prefix: str, opening: str, closing: str, space: str = "") -> tuple[Mark, ...]:
    """The marks of ``<invoke>`` elements in a section."""
    return _section(opening, rf"(?=<{prefix}{space}invoke\s)", closing)


def _invoke(prefix: str, space: str = "", is_text: str = "") -> Elements:
    """``<invoke name="f">`` with a ``<parameter name="x">`` for each argument."""
    opened, closed = f"<{prefix}{space}", f"</{prefix}{space}"
    argument = rf'{opened}parameter\s+name="(?P<key>[^"<>]{{1,256}}+)"{is_text}\s*>'
    end = f"{closed}invoke>"
    return Elements(
        head=rf'{SPACE}{opened}invoke\s+name="{NAME}"\s*(?P<empty>/)?>',
        argument=argument,
        value_end=f"{closed}parameter>(?={SPACE}(?:{opened}parameter\\s|{end}))",
        end=end,
    )


_QWEN_XML = Elements(
    head=rf"{SPACE}<function={NAME}>",
    argument=r"<parameter=(?P<key>[^<>\s]{1,256}+)>",
    value_begins=r"\n|(?=[^\n])",
    value_end=rf"\n?</parameter>(?={SPACE}(?:<parameter=[^<>\s]{{1,256}}+>|</function>))"
    rf"|\n?(?=</function>{SPACE}</tool_call>)",
    end="</function>",
    tail="</tool_call>",
    new_argument=r"\n(?=<parameter=(?P<forgotten>[^<>\s]{1,256}+)>)",
)
_GLM = Elements(
    head=rf"{SPACE}(?P<name>[\w.\-/:]{{1,256}}+)(?=\s|<arg_key>|</tool_call>)",
    argument=rf"<arg_key>(?P<key>[^<>]{{1,256}}+)</arg_key>{SPACE}<arg_value>",
    value_end=rf"</arg_value>(?={SPACE}(?:<arg_key>|</tool_call>))"
    rf"|(?=</tool_call>{SPACE}(?:<tool_call>|{END}))",
    end="</tool_call>",
)
_TAGGED_JSON = (r"\{", JsonObject(excess="}", tail="</tool_call>"))
_TAGGED = Choice((_TAGGED_JSON, ("<function=", _QWEN_XML)))
_TAGGED_GLM = Choice((_TAGGED_JSON, (r"[\w.\-/:]", _GLM)))
"""The first characters in ``<tool_call>`` tags show the syntax."""

_TOOL_CALL_TAG = _call("<tool_call>", is_shown=True)
_MISTRAL = Choice(
    (
        (r"\[", JsonList(JsonObject(between=","))),
        (
            r"[\w.\-/:]",
            NamedJson(head=rf"{NAME}(?:\[CALL_ID\]\w*+)?(?:\[ARGS\])?{SPACE}(?=\{{)", tail=""),
        ),
    )
)
_DSML = "｜DSML｜"
_DSML_IS_TEXT = r'\s+string="(?P<is_text>true|false)"'


def _json_calls(
    head: str = '{"name": "{name}", "arguments": ',
    *,
    opening: str = "",
    between: str = "",
    closing: str = "",
    tail: str = "}",
) -> Writing:
    return Writing(head, JsonArguments(), tail, between, opening, closing)


def _dsml(name: str, section: str, space: str, sign: str) -> ToolFormat:
    return ToolFormat(
        name,
        _invoke(_DSML, space, _DSML_IS_TEXT),
        Writing(
            f'<{_DSML}{space}invoke name="{{name}}">\n',
            KeyedArguments(
                f'<{_DSML}{space}parameter name="{{key}}" string="{{is_text}}">',
                f"</{_DSML}{space}parameter>\n",
            ),
            f"</{_DSML}{space}invoke>\n",
            opening=f"<{_DSML}{space}{section}>\n",
            closing=f"</{_DSML}{space}{section}>",
        ),
        _invocations(_DSML, f"<{_DSML}{space}{section}>", f"</{_DSML}{space}{section}>", space),
        trigger=_DSML,
        special=(_DSML,),
        signs=((sign,),),
        after_calls=Segment.GAP,
    )


_DEEPSEEK_SPECIAL = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)  # fmt: skip
_KIMI_SPECIAL = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>",
)  # fmt: skip
XTML_SPECIAL = ("<|open|>", "<|close|>", "<|sep|>")
_KIMI_K3_END = r"<\|close\|>call<\|sep\|>"
HARMONY_SPECIAL = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
HARMONY_SIGNS = (("<|channel|>", "<|message|>"),)
_TAG_SPECIAL = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
                "</arg_value>")  # fmt: skip
_MISTRAL_SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def _deepseek(name: str, syntax: CallSyntax, writing: Writing, *signs: str) -> ToolFormat:
    opening, call, *_, closing = _DEEPSEEK_SPECIAL
    return ToolFormat(
        name,
        syntax,
        replace(writing, opening=opening, closing=closing),
        _section(opening, call, closing),
        opening,
        _DEEPSEEK_SPECIAL,
        (signs,),
        after_calls=Segment.GAP,
    )


def _json_list(name: str, opening: str, closing: str, *, is_shown: bool = False) -> ToolFormat:
    return ToolFormat(
        name,
        JsonList(JsonObject(between=","), regex.escape(closing)),
        _json_calls(opening=f"{opening}[", between=", ", closing=f"]{closing}"),
        (_call(regex.escape(opening), is_shown=is_shown),),
        opening,
        (opening, closing),
        ((opening,),),
    )


def _python_calls(opening: str, closing: str) -> Writing:
    arguments = KeyedArguments("{key}=", between=", ", text_is_raw=False)
    return Writing("{name}(", arguments, ")", ", ", opening, closing)


def _glm(name: str, line: str, *signs: str) -> ToolFormat:
    return ToolFormat(
        name,
        _TAGGED_GLM,
        Writing(
            f"<tool_call>{{name}}{line}",
            KeyedArguments(f"<arg_key>{{key}}</arg_key>{line}<arg_value>", f"</arg_value>{line}"),
            "</tool_call>",
            between=line,
        ),
        (_TOOL_CALL_TAG,),
        "<tool_call>",
        _TAG_SPECIAL,
        (signs,),
    )


_LLAMA3 = ToolFormat(
    "llama3",
    JsonObject(between=";"),
    _json_calls('{"name": "{name}", "parameters": ', between="; "),
    (_call(r"<\|python_tag\|>"),),
    "<|python_tag|>",
    ("<|python_tag|>",),
    (("<|python_tag|>",), ('"parameters"', "<|start_header_id|>")),
    JsonObject(between=";", is_announced=False),
    r"\{",
)

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "harmony",
        JsonObject(),
        _json_calls(
            " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>", tail=""
        ),
        special=HARMONY_SPECIAL,
        signs=HARMONY_SIGNS,
    ),
    ToolFormat(
        "kimi_k3",
        Elements(
            head=rf'tool="{NAME}"[^<]{{0,64}}+<\|sep\|>',
            argument=r'<\|open\|>argument\s+key="(?P<key>[^"<>]{1,256}+)"\s+'
            r'type="(?P<type>\w+)"\s*<\|sep\|>',
            value_end=rf"<\|close\|>argument<\|sep\|>(?=<\|open\|>argument\s|{_KIMI_K3_END})",
            end=_KIMI_K3_END,
            is_escaped=True,
        ),
        Writing(
            '<|open|>call tool="{name}" index="{number}"<|sep|>',
            KeyedArguments(
                '<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>"
            ),
            "<|close|>call<|sep|>",
            opening="<|open|>tools<|sep|>",
            closing="<|close|>tools<|sep|>",
        ),
        (_call(r"<\|open\|>call\s+", within=Segment.GAP),),
        "<|open|>",
        XTML_SPECIAL,
        (XTML_SPECIAL,),
        after_calls=Segment.GAP,
    ),
    ToolFormat(
        "kimi_k2",
        NamedJson(
            head=rf"{SPACE}(?:functions\.)?(?P<name>[\w.\-/]{{1,256}}+)(?::\d+)?{SPACE}"
            r"<\|tool_call_argument_begin\|>",
            tail=rf"{SPACE}<\|tool_call_end\|>",
        ),
        Writing(
            "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
            JsonArguments(),
            "<|tool_call_end|>",
            opening="<|tool_calls_section_begin|>",
            closing="<|tool_calls_section_end|>",
        ),
        _section(
            r"<\|tool_calls_section_begin\|>",
            r"<\|tool_call_begin\|>",
            r"<\|tool_calls_section_end\|>",
        ),
        "<|tool_calls_section_begin|>",
        _KIMI_SPECIAL,
        (("<|tool_calls_section_begin|>",),),
        after_calls=Segment.GAP,
    ),
    _dsml("deepseek_v41", "calls", " ", "｜DSML｜ calls"),
    _dsml("deepseek_v4", "tool_calls", "", "｜DSML｜tool_calls"),
    _dsml("deepseek_v32", "function_calls", "", "｜DSML｜"),
    _deepseek(
        "deepseek_v3",
        NamedJson(
            head=rf"function<｜tool▁sep｜>{NAME}{SPACE}```json{SPACE}",
            tail=rf"{SPACE}```{SPACE}<｜tool▁call▁end｜>",
        ),
        Writing(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            JsonArguments(),
            "\n```<｜tool▁call▁end｜>",
            between="\n",
        ),
        "<｜tool▁sep｜>",
        "```json",
    ),
    _deepseek(
        "deepseek_v31",
        NamedJson(head=rf"{NAME}<｜tool▁sep｜>", tail=rf"{SPACE}<｜tool▁call▁end｜>"),
        Writing(
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", JsonArguments(), "<｜tool▁call▁end｜>"
        ),
        "<｜tool▁sep｜>",
    ),
    ToolFormat(
        "minimax_m2",
        _invoke(""),
        Writing(
            '<invoke name="{name}">\n',
            KeyedArguments('<parameter name="{key}">', "</parameter>\n"),
            "</invoke>\n",
            opening="<minimax:tool_call>\n",
            closing="</minimax:tool_call>",
        ),
        _invocations("", "<minimax:tool_call>", "</minimax:tool_call>"),
        "<minimax:tool_call>",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        (("<minimax:tool_call>",),),
        after_calls=Segment.GAP,
    ),
    ToolFormat(
        "seed_oss",
        _QWEN_XML,
        Writing(
            "<seed:tool_call>\n<function={name}>\n",
            KeyedArguments("<parameter={key}>", "</parameter>\n"),
            "</function>\n</seed:tool_call>",
            between="\n",
        ),
        (_call("<seed:tool_call>"), dropped("</seed:tool_call>")),
        "<seed:tool_call>",
        ("<seed:tool_call>", "</seed:tool_call>"),
        (("<seed:tool_call>",),),
    ),
    ToolFormat(
        "gemma4",
        GemmaCall(),
        Writing("<|tool_call>call:{name}", GemmaArguments(QUOTE), "<tool_call|>"),
        (_call(r"<\|tool_call>"),),
        "<|tool_call>",
        ("<|tool_call>", "<tool_call|>", QUOTE),
        (("<|tool_call>", "<tool_call|>"),),
    ),
    ToolFormat(
        "command",
        JsonList(JsonObject(name_key="tool_name", between=","), r"<\|END_ACTION\|>"),
        _json_calls(
            '{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": ',
            opening="<|START_ACTION|>[",
            between=", ",
            closing="]<|END_ACTION|>",
        ),
        (_call(r"<\|START_ACTION\|>"), dropped(r"<\|END_ACTION\|>")),
        "<|START_ACTION|>",
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        (("<|START_ACTION|>",),),
    ),
    _json_list("phi4_mini", "<|tool_call|>", "<|/tool_call|>"),
    ToolFormat(
        "lfm2",
        PythonCalls(),
        _python_calls("<|tool_call_start|>[", "]<|tool_call_end|>"),
        (_call(r"<\|tool_call_start\|>"), dropped(r"<\|tool_call_end\|>")),
        "<|tool_call_start|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        (("<|tool_call_start|>",),),
    ),
    _json_list("nemotron", "<TOOLCALL>", "</TOOLCALL>", is_shown=True),
    _json_list("hunyuan", "<tool_calls>", "</tool_calls>", is_shown=True),
    _glm("glm45", "\n", "<arg_key>", "</arg_key>\n<arg_value>"),
    _glm("glm47", "", "<arg_key>"),
    ToolFormat(
        "qwen3_xml",
        _TAGGED,
        Writing(
            "<tool_call>\n<function={name}>\n",
            KeyedArguments("<parameter={key}>\n", "\n</parameter>\n"),
            "</function>\n</tool_call>",
            between="\n",
        ),
        (_TOOL_CALL_TAG, _call(rf"(?=<function={NAME}>)", is_shown=True)),
        "<tool_call>",
        _TAG_SPECIAL,
        (("<function=", "<tool_call>"),),
    ),
    ToolFormat(
        "hermes",
        _TAGGED,
        _json_calls(
            '<tool_call>\n{"name": "{name}", "arguments": ', tail="}\n</tool_call>", between="\n"
        ),
        (_TOOL_CALL_TAG,),
        "<tool_call>",
        _TAG_SPECIAL,
        (("<tool_call>",),),
    ),
    ToolFormat(
        "mistral",
        _MISTRAL,
        _json_calls("[TOOL_CALLS]{name}[ARGS]", tail=""),
        (_call(r"\[TOOL_CALLS\]"),),
        "[TOOL_CALLS]",
        _MISTRAL_SPECIAL,
        (("[TOOL_CALLS]", "[ARGS]"),),
    ),
    ToolFormat(
        "mistral_v3",
        _MISTRAL,
        _json_calls(opening="[TOOL_CALLS] [", between=", ", closing="]"),
        (_call(r"\[TOOL_CALLS\]"),),
        "[TOOL_CALLS]",
        _MISTRAL_SPECIAL,
        (("[TOOL_CALLS]",),),
    ),
    ToolFormat(
        "pythonic",
        PythonCalls(),
        _python_calls("[", "]"),
        (_call(r"<\|python_start\|>"), dropped(r"<\|python_end\|>")),
        "<|python_start|>",
        ("<|python_start|>", "<|python_end|>"),
        (("func_name1(",), ("<|python_start|>",)),
        PythonCalls(),
        r"\[",
    ),
    _LLAMA3,
)
"""In the order in which they are looked for: a format whose signs contain another one's comes
first."""

PLAIN_JSON = replace(_LLAMA3, name="json", writing=_json_calls(between="; "), signs=())
"""The format of calls of a model whose own format is not known."""
