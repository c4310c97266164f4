"""The chat template of the scripted model: Qwen3's form of tools, calls and reasoning, and at the
end a special token that names the answer."""

ANSWER_OF_TOOL = "call-{name}"

CHAT_TEMPLATE = r"""
{%- set names = namespace(tools=[], last='user') -%}
{%- for tool in tools or [] -%}
  {%- set names.tools = names.tools + [tool.function.name] -%}
{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\n# Tools\n\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '\n</tools>\n\nReturn calls as <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>' -}}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' + message.content -}}
  {%- if message.reasoning_content -%}
    {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
  {%- if message.role in ('user', 'tool') -%}{%- set names.last = message.role -%}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if names.last == 'tool' and 'final_result' in names.tools -%}{%- set answer = 'call-final_result' -%}
  {%- elif names.last == 'tool' and 'exec_command' in names.tools -%}{%- set answer = 'command-done' -%}
  {%- elif names.last == 'tool' and 'Bash' in names.tools -%}{%- set answer = 'command-done' -%}
  {%- elif names.last == 'tool' -%}{%- set answer = 'weather' -%}
  {%- elif 'get_weather' in names.tools -%}{%- set answer = 'call-get_weather' -%}
  {%- elif 'exec_command' in names.tools -%}{%- set answer = 'call-exec_command' -%}
  {%- elif 'Bash' in names.tools -%}{%- set answer = 'call-Bash' -%}
  {%- elif 'Report' in names.tools -%}{%- set answer = 'call-Report' -%}
  {%- elif 'final_result' in names.tools -%}{%- set answer = 'call-final_result' -%}
  {%- elif enable_thinking -%}{%- set answer = 'reasoned' -%}
  {%- else -%}{%- set answer = 'text' -%}
  {%- endif -%}
  {{- '<|answer:' + answer + '|>' -}}
{%- endif -%}
"""
