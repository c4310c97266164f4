"""Defines the chat template of the scripted model. It formats tools, calls and reasoning as Qwen3's
does, and ends the prompt with a special token that tells the model which of its answers to give.

The answer to a tool's result or to a second question depends on the whole conversation: the
question, the call with the result's id, the result, and the first answer. If one of them is lost,
the answer names it (``missing-…``). The loss of instructions can't be noticed in this way, since a
request may have none. So the model answers differently (``brief-…``) if the instructions are
"Answer briefly.", and the tests expect those answers. Codex and Claude Code always send
instructions.

A request all of whose tools are unknown to the model is refused: a forced call of such a tool would
be random."""

ANSWER_OF_TOOL = "call-{name}"
ANSWER_WITHOUT = "missing-{part}"

CHAT_TEMPLATE = r"""
{%- set question = 'What is the weather in Paris?' -%}
{%- set second_question = 'And in Rome?' -%}
{%- set weather = {'question': question, 'argument': 'Paris', 'result': '21'} -%}
{%- set command = {'question': 'Say hello with echo.', 'argument': 'hello', 'result': 'hello'} -%}
{%- set tool_loops = {
  'get_weather': dict(weather, answer='weather', instructions=''),
  'exec_command': dict(command, answer='command-done', instructions='Codex CLI'),
  'Bash': dict(command, answer='command-done', instructions='Claude agent'),
} -%}
{%- set offered = (tools or []) | map(attribute='function.name') | list -%}
{%- set seen = namespace(system='', user='', assistant='', calls=[], call='', last={}) -%}
{%- if tools -%}
  {{- '<|im_start|>system\n# Tools\n\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
  {{- '\n</tools>\n\nCalls: <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>' -}}
  {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.reasoning_content -%}
    {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}
  {%- endif -%}
  {{- message.content -}}
  {%- for call in message.tool_calls or [] -%}
    {{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
  {%- if message.role == 'system' -%}
    {%- set seen.system = seen.system + message.content -%}
  {%- elif message.role == 'assistant' -%}
    {%- set seen.assistant = seen.assistant + message.content -%}
    {%- set seen.calls = seen.calls + (message.tool_calls or []) -%}
  {%- elif message.role == 'user' -%}
    {%- set seen.user = seen.user + message.content -%}
  {%- endif -%}
  {%- if message.role in ('user', 'tool') -%}{%- set seen.last = message -%}{%- endif -%}
{%- endfor -%}
{%- for name in (
  'final_result', 'Report', 'PartialReport', 'Bash', 'exec_command', 'get_weather'
) -%}
  {%- if name in offered -%}{%- set seen.call = name -%}{%- endif -%}
{%- endfor -%}
{%- if offered and not seen.call -%}
  {{- raise_exception('The scripted model knows none of these tools: ' + offered | join(', ')) -}}
{%- endif -%}
{%- set brief = 'brief-' if 'Answer briefly.' in seen.system else '' -%}
{%- if not seen.last.content -%}
  {%- set answer = 'missing-' + ('result' if seen.last.role == 'tool' else 'question') -%}
{%- elif seen.last.role == 'tool' -%}
  {%- set calls = seen.calls | selectattr('id', 'equalto', seen.last.tool_call_id) | list -%}
  {%- set call = calls[0].function if calls else {} -%}
  {%- set expected = tool_loops.get(call.name) -%}
  {%- if not expected or expected.argument not in call.arguments | tojson -%}
    {%- set answer = 'missing-call' -%}
  {%- elif expected.question not in seen.user -%}
    {%- set answer = 'missing-question' -%}
  {%- elif expected.result not in seen.last.content -%}
    {%- set answer = 'missing-result' -%}
  {%- elif expected.instructions not in seen.system -%}
    {%- set answer = 'missing-instructions' -%}
  {%- elif 'final_result' in offered -%}
    {%- set answer = 'call-final_result' -%}
  {%- else -%}
    {%- set answer = brief + expected.answer -%}
  {%- endif -%}
{%- elif second_question in seen.last.content -%}
  {%- if question not in seen.user -%}
    {%- set answer = 'missing-question' -%}
  {%- elif 'scripted model' not in seen.assistant -%}
    {%- set answer = 'missing-answer' -%}
  {%- else -%}
    {%- set answer = brief + 'second' -%}
  {%- endif -%}
{%- elif 'Write a greeting.' in seen.last.content -%}
  {%- set answer = 'edit' -%}
{%- elif seen.call -%}
  {%- set answer = 'call-' + seen.call -%}
{%- elif enable_thinking -%}
  {%- set answer = 'reasoned' -%}
{%- else -%}
  {%- set answer = brief + 'text' -%}
{%- endif -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n<|answer:' + answer + '|>' -}}
{%- endif -%}
"""

_STRICT_RULES = r"""
{%- for message in messages -%}
  {%- if message.role not in ('system', 'user', 'assistant', 'tool') -%}
    {{- raise_exception('Unexpected message role.') -}}
  {%- elif message.role == 'system' and not loop.first -%}
    {{- raise_exception('System message must be at the beginning.') -}}
  {%- elif message.role == 'user' and loop.previtem and loop.previtem.role == 'user' -%}
    {{- raise_exception('Conversation roles must alternate.') -}}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {%- if call.function.arguments is string -%}
      {{- raise_exception('Arguments must be an object.') -}}
    {%- endif -%}
  {%- endfor -%}
{%- endfor -%}
"""

STRICT_CHAT_TEMPLATE = _STRICT_RULES + CHAT_TEMPLATE
"""The same template, which refuses what strict families refuse: a second system message, other
roles, a user after a user, and arguments as text."""
