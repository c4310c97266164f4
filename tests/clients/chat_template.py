"""Defines the chat template of the scripted model. It formats tools, calls and reasoning as Qwen3's
does, and ends the prompt with a special token that tells the model which of its answers to give."""

ANSWER_OF_TOOL = "call-{name}"

CHAT_TEMPLATE = r"""
{%- set offered = (tools or []) | map(attribute='function.name') | list -%}
{%- set seen = namespace(call='', last='user') -%}
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
  {%- if message.role in ('user', 'tool') -%}{%- set seen.last = message.role -%}{%- endif -%}
{%- endfor -%}
{%- for name in ('final_result', 'Report', 'Bash', 'exec_command', 'get_weather') -%}
  {%- if name in offered -%}{%- set seen.call = name -%}{%- endif -%}
{%- endfor -%}
{%- if seen.last == 'tool' and 'final_result' in offered -%}
  {%- set answer = 'call-final_result' -%}
{%- elif seen.last == 'tool' and ('exec_command' in offered or 'Bash' in offered) -%}
  {%- set answer = 'command-done' -%}
{%- elif seen.last == 'tool' -%}
  {%- set answer = 'weather' -%}
{%- elif seen.call -%}
  {%- set answer = 'call-' + seen.call -%}
{%- elif enable_thinking -%}
  {%- set answer = 'reasoned' -%}
{%- else -%}
  {%- set answer = 'text' -%}
{%- endif -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n<|answer:' + answer + '|>' -}}
{%- endif -%}
"""
