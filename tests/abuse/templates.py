"""Chats, and chat templates in the styles that models have them in."""
# ruff: noqa: E501 # long lines, as templates have

from typing import Any

CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "What is 2+2?\n é 日本 <s> </s>"}],
    [
        {"role": "system", "content": "  Be brief & <kind>.  "},
        {"role": "user", "content": "one\ttwo"},
        {"role": "assistant", "content": "<think>\nlong\n</think>\n\nthree"},
        {"role": "user", "content": ' four "five" it\'s'},
    ],
)

TEMPLATES = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "mistral": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
""",
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'system' %}{% continue %}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    "qwen-think": """{%- if tools %}
    {{- '# Tools' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string and not message.content.startswith('<tool') %}
        {%- set ns.last = index %}{% break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
    "deepseek": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, system_prompt='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}"
    "{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{'<｜User｜>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not "
    "none %}{{'<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜>'}}{% endif %}",
    "generation": "{% for message in messages %}{% if message.role == 'assistant' %}A:{% generation %}\n"
    "{{ message.content }}{{ eos_token }}{% endgeneration %}\n{% else %}{{ message.role }}: {{ message.content }}\n"
    "{% endif %}{%- endfor %}{%- if add_generation_prompt %}A:{%- generation -%} {%- endgeneration -%}{% endif %}",
    "tojson": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ messages[0] | tojson(sort_keys=true, "
    "separators=(',', ':')) }}|{{ messages[0].content | tojson(ensure_ascii=true) }}|{{ [1, 2.5, none, true] | tojson }}",
    "loops": "  {% for m in messages if m.role != 'system' %}\n    {% if loop.first %}\n  first {% else %}\n  {% endif %}\n"
    "  {% for word in m.content.split() %}{% if word|length > 6 %}{% break %}{% endif %}{{ word|upper }},{% endfor %}\n"
    "  {# a comment #}\n  {% endfor %}\n",
    "macros": "{% macro line(m, i) -%}{{ '%03d' % i }} {{ m.role|capitalize }} {{ m.content|replace('o', '0') }}"
    "{%- endmacro %}{% for m in messages %}{{ line(m, loop.index) }}\n{% endfor %}",
    "undefined": "[{{ nothing }}][{{ documents }}][{{ tools }}]{% if tools is none %}none{% endif %}"
    "{% if documents %}docs{% endif %}[{{ messages[0].name }}]{{ pad_token }}{{ sep_token }}",
}
