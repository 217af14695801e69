"""Chat templates cut down to what they do in a way of their own with calls and reasoning."""

# Ids of calls have nine characters, and whether there are calls is asked by `is defined`.
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{% if tools and loop.first %}\
[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}[/INST]\
{% elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] [\
{% for call in message.tool_calls %}{% if call.id is not defined or call.id | length != 9 %}\
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}\
{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% endfor %}]{{ eos_token }}\
{% elif message.role == 'assistant' %} {{ message.content | trim }}{{ eos_token }}\
{% elif message.role == 'tool' %}{% if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}\
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}\
[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]\
{% endif %}{% endfor %}"""

# Reasoning is `thinking` and stands only before a call, where there may be no content beside it.
GPT_OSS = """{% if tools %}<|start|>developer<|message|># Tools {{ tools | tojson }}<|end|>{% endif %}\
{% set last = namespace(name=none) %}{% for message in messages %}{% if message.role == 'assistant' %}\
{% if '<|channel|>' in message.content %}{{ raise_exception('You have passed a message containing <|channel|> tags in \
the content field.') }}{% endif %}{% if 'tool_calls' in message %}{% set call = message.tool_calls[0].function %}\
{% if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}\
{% elif message.content or message.thinking %}\
<|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}<|end|>{% endif %}\
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}\
<|call|>{% set last.name = call.name %}{% else %}\
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}{% elif message.role == 'tool' %}\
{% if last.name is none %}{{ raise_exception('Message has tool role, but there was no call') }}{% endif %}\
<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>\
{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
HARMONY = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]

# Calls are bare JSON.
LLAMA = """{% for message in messages %}{% if loop.first and tools %}{{ tools | tojson }}{% endif %}\
<|im_start|>{% if 'tool_calls' in message %}{% set call = message.tool_calls[0].function %}assistant

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{% else %}{{ message.role }}

{{ message.content | trim }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""

# As Qwen 3 does it: thinking is shown only in the turns after the user's last, results of tools are the user's.
QWEN3 = """{% if tools %}<|im_start|>system
# Tools
{{ tools | tojson }}<|im_end|>
{% endif %}{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}\
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.reasoning_content and loop.index0 > ns.last %}<think>
{{ message.reasoning_content.strip() }}
</think>

{% endif %}{{ message.content }}{% for tool_call in message.tool_calls or [] %}\
{% if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As Qwen 2.5 writes calls, and many others.
HERMES = """{% if tools %}<|im_start|>system
# Tools
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
