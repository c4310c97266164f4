"""Small chat templates that follow the rules of model families: what the families' own templates
refuse, leave out and read. They were written for the tests and have none of the families' prose."""

from types import MappingProxyType

_CHATML_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

_JSON_CALL = (
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments |"
    " tojson }}"
    "}</tool_call>"
)

_ITEMS_CALL = (
    "<tool_call><function={{ c.function.name }}>"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>"
    "{{ v if v is string else v | tojson }}</parameter>{% endfor %}</function></tool_call>"
)

_ALTERNATION = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
)

_LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)

HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}" + _JSON_CALL + "{% endfor %}<|im_end|>\n{% endfor %}"
) + _CHATML_END

QWEN3 = (
    _LAST_QUESTION
    + "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% set content = m.content %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif m.role == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}"
    "{% if thought and loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ content }}{% for c in m.tool_calls or [] %}" + _JSON_CALL + "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
) + _CHATML_END

QWEN35 = (
    _LAST_QUESTION + "{% if ns.last < 0 %}{{ raise_exception('No user query found') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}"
    "{% elif m.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('Unexpected message role.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content is string and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}" + _ITEMS_CALL + "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
) + _CHATML_END

QWEN3_VL = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role in ('user', 'assistant', 'tool') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    + _JSON_CALL
    + "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
) + _CHATML_END

GEMMA2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%"
    " endif %}"
    "{% for m in messages %}" + _ALTERNATION + "<start_of_turn>{{ m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

GEMMA3 = (
    "{% if messages[0].role == 'system' %}{% set prefix = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set prefix = '' %}{% set rest = messages %}{%"
    " endif %}"
    "{% for m in rest %}" + _ALTERNATION + "<start_of_turn>{{ m.role }}\n"
    "{{ prefix if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

COMMAND_R = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}<|SYSTEM|>"
    "{{ messages[0].content }}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}" + _ALTERNATION + "{% if m.role == 'user' %}<|USER|>{% else %}<|CHATBOT|>"
    "{% endif %}{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}<|CHATBOT|>{%"
    " endif %}"
)

COMMAND_R7B = (
    "<|SYSTEM|># Defaults, unless a developer says otherwise.\n"
    "{% if messages[0].role == 'system' %}# Developer Preamble\n{{ messages[0].content }}\n{%"
    " endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}<|SYSTEM|>{{ m.content }}"
    "{% elif m.role == 'user' %}<|USER|>{{ m.content }}{% elif m.role == 'assistant' %}<|CHATBOT|>"
    "{% if m.tool_calls %}<|THINKING|>{{ m.reasoning_content }}<|ACTION|>"
    "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}{% else %}<|RESPONSE|>{{ m.content }}{% endif %}"
    "{% elif m.role == 'tool' %}<|RESULT|>{{ m.content | tojson }}{% endif %}{% endfor %}"
    "<|CHATBOT|>"
)

MISTRAL = (
    "{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% set talk = namespace(turns=[]) %}{% for m in rest %}"
    "{% if m.role != 'tool' and not m.tool_calls %}{% set talk.turns = talk.turns + [m] %}{%"
    " endif %}"
    "{% endfor %}{% for m in talk.turns %}" + _ALTERNATION + "{% endfor %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%"
    " endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{% endfor %}]</s>'
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%"
    " endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
    "{% endfor %}"
)

_DEEPSEEK_TURNS = (
    "{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<Assistant>"
    "{% if m.content is none or not calls_without_content %}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + '<sep>' + c.function.arguments + '</call>' }}{% endfor %}"
    "{% endif %}{% if m.content is not none %}{{ m.content.split('</think>')[-1] }}{% endif %}<end>"
    "{% elif m.role == 'tool' %}<output>{{ m.content }}</output>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant>{% endif %}"
)

R1_DISTILL = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}"
    "{% set calls_without_content = true %}"
) + _DEEPSEEK_TURNS

DEEPSEEK_V3 = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = ns.system + ('\n\n' if ns.system else '') + m.content %}{% endif %}"
    "{% endfor %}{{ ns.system }}"
) + _DEEPSEEK_TURNS

GPT_OSS = (
    "<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>"
    "{% if messages[0].role in ('developer', 'system') %}<|start|>developer<|message|>"
    "{{ messages[0].content }}<|end|>{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% set last = namespace(name=none) %}"
    "{% for m in rest %}{% if m.role == 'assistant' %}{% if 'tool_calls' in m %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and"
    " thinking') }}"
    "{% elif m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.content or m.thinking }}<|end|>{% endif %}"
    "{% set c = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ c.name }}<|message|>"
    "{{ c.arguments | tojson }}<|call|>{% set last.name = c.name %}"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call') }}{%"
    " endif %}"
    "<|start|>functions.{{ last.name }}<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

KIMI_K2 = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
    "{% if m.role == 'assistant' and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<|call|>{{ c.id }}<|argument|>"
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)

GLM45 = (
    "[gMASK]<sop>" + _LAST_QUESTION + "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n"
    "{% if m.reasoning_content is string and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content.strip() }}</think>{% else %}<think></think>{% endif %}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{%"
    " endfor %}"
    "{% elif m.role in ('user', 'system') %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{%"
    " endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

LLAMA3 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{%"
    " endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\n{{ system }}<|eot_id|>"
    "{% if tools and not rest %}{{ raise_exception('no first user message') }}{% endif %}"
    "{% for m in rest %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

MINIMAX_M2 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = 'You are helpful.' %}"
    "{% set rest = messages %}{% endif %}]~b]system\n{{ system }}[e~[\n"
    "{% set ns = namespace(last=-1, called=false) %}{% for m in rest %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'assistant' %}]~b]ai\n"
    "{% if m.reasoning_content is string and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% set ns.called = m.tool_calls is defined %}{% for c in m.tool_calls or [] %}"
    '<invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>{% endfor %}'
    "</invoke>"
    "{% endfor %}[e~[\n{% elif m.role == 'tool' %}"
    "{% if not ns.called %}{{ raise_exception('no previous call') }}{% endif %}"
    "]~b]tool\n<response>{{ m.content }}</response>[e~[\n"
    "{% elif m.role == 'user' %}]~b]user\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)

LFM2 = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<|tool_response_start|>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
) + _CHATML_END
"""Has no place for calls."""

LFM25 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %})"
    "{% endfor %}]<|tool_call_end|>{% endif %}<|im_end|>\n{% endfor %}"
) + _CHATML_END

MISTRAL_V3 = MISTRAL.replace(
    "[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]",
    "{% set system = messages[0].content %}",
).replace(
    "[INST]{{ m.content }}",
    "[INST]{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}",
)
"""Has the system message in the last message, if that is the user's."""

PHI3 = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

SMOLVLM = (
    "{% for m in messages %}{{ m.role | capitalize }}: {% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)

JSON_ARGUMENTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }} {{ c.function.arguments }}{% endfor %}{% endfor %}"
)
"""Writes arguments as they are, so that an object would be written as Python does."""

GRANITE = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = 'You are Granite.' %}"
    "{% set rest = messages %}{% endif %}<|start_of_role|>system<|end_of_role|>{{ system }}"
    "<|end_of_text|>\n{% for m in rest %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{"
    " m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call|>{{ c.function | tojson }}{% endfor %}"
    "<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

REASONING_FIELD = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning %}[{{ m.reasoning }}]{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}" + _JSON_CALL + "{% endfor %}{% endfor %}"
)
"""Reads reasoning under the name that vLLM and OpenRouter use."""

THOUGHTS_IN_CONTENT = (
    "{% for m in messages %}<{{ m.role }}>{% if '</think>' in m.content %}"
    "[{{ m.content.split('</think>')[0].split('<think>')[-1] | trim }}]{% endif %}"
    "{{ m.content.split('</think>')[-1] | trim }}"
    "{% for c in m.tool_calls or [] %}" + _JSON_CALL + "{% endfor %}{% endfor %}"
)
"""Finds reasoning only in the content."""

FAMILIES = MappingProxyType(
    {
        "Hermes, Qwen2.5": HERMES,
        "Qwen3": QWEN3,
        "Qwen3.5": QWEN35,
        "Qwen3-VL": QWEN3_VL,
        "Gemma 2": GEMMA2,
        "Gemma 3": GEMMA3,
        "Command R": COMMAND_R,
        "Command R7B": COMMAND_R7B,
        "Mistral": MISTRAL,
        "Mistral v0.3": MISTRAL_V3,
        "R1-Distill": R1_DISTILL,
        "DeepSeek V3": DEEPSEEK_V3,
        "gpt-oss": GPT_OSS,
        "Kimi K2": KIMI_K2,
        "GLM 4.5": GLM45,
        "Llama 3": LLAMA3,
        "MiniMax M2": MINIMAX_M2,
        "LFM2": LFM2,
        "LFM2.5": LFM25,
        "Phi-3": PHI3,
        "SmolVLM": SMOLVLM,
        "Granite": GRANITE,
        "JSON arguments": JSON_ARGUMENTS,
        "reasoning field": REASONING_FIELD,
        "thoughts in content": THOUGHTS_IN_CONTENT,
    }
)
