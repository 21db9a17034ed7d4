"""Chat templates in the styles of models, with what makes it hard to append to a chat, and how their models reply."""
# ruff: noqa: E501 # long lines, as templates have

from dataclasses import dataclass
from functools import cache

from dora.prompts.template import Messages, compiled_template, rendered

HERMES_CALL = "<tool_call>\n{call}\n</tool_call>"
CHATML_TOOLS = """{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n</tools>\nAnswer within <tool_call></tool_call>.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
"""
TOOL_TURN = """{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"""
CALLS = """{%- for call in message.tool_calls %}{%- if (loop.first and message.content) or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}{%- else %}{{- call.function.arguments | tojson }}{%- endif %}{{- '}\n</tool_call>' }}{%- endfor %}"""
GENERATION = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"


@dataclass(frozen=True)
class Style:
    """A template; the texts that its model writes. ``end``: of a reply; ``call``: of one tool call."""

    template: str
    end: str
    call: str = ""  # empty: it knows no tools
    think: str = ""
    other_ends: tuple[str, ...] = ()
    is_thinking: bool = False  # the template opens the reasoning itself
    keeps: bool = False  # a history is rendered as it was sampled

    def render(self, messages: Messages, tools: Messages | None, answer: bool, options: object = None) -> str:
        return rendered(_compiled(self.template), messages, SPECIAL, tools=tools, answer=answer, options=options)  # type: ignore[arg-type]


_compiled = cache(compiled_template)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ADDED = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *(
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "<start_of_turn>",
        "<end_of_turn>",
    ),
    *("<|User|>", "<|Assistant|>", "<|tool_calls_begin|>", "<|tool_call_begin|>", "<|tool_sep|>", "<|tool_call_end|>"),
    *(
        "<|tool_calls_end|>",
        "<|tool_outputs_begin|>",
        "<|tool_outputs_end|>",
        "<|end_of_sentence|>",
        "[gMASK]",
        "<sop>",
    ),
    *(
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|end|>",
        "<|start|>",
        "<|channel|>",
        "<|message|>",
    ),
    *("<|return|>", "<|call|>"),
)
STYLES = {
    "chatml": Style(
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
        other_ends=("<|endoftext|>",),
        keeps=True,
    ),
    "qwen2.5": Style(
        CHATML_TOOLS
        + "{%- for message in messages %}{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        + "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}{%- if message.content %}{{- message.content }}{%- endif %}"
        + CALLS
        + "{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}"
        + TOOL_TURN
        + "{%- endif %}{%- endfor %}"
        + GENERATION,
        "<|im_end|>",
        HERMES_CALL,
        other_ends=("<|endoftext|>",),
        keeps=True,
    ),
    "qwen3": Style(  # drops the reasoning before the last question
        CHATML_TOOLS
        + "{%- set ns = namespace(last=messages|length - 1, found=false) %}{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
        + "{%- if not ns.found and message.role == 'user' %}{%- set ns.last = index %}{%- set ns.found = true %}{%- endif %}{%- endfor %}"
        + "{%- for message in messages %}{%- if message.role == 'user' %}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}"
        + "{%- elif message.role == 'assistant' %}{%- set content = message.content or '' %}{%- set reasoning = message.reasoning_content or '' %}"
        + "{%- if not reasoning and '</think>' in content %}{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        + "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
        + "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
        + CALLS
        + "{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}"
        + TOOL_TURN
        + "{%- endif %}{%- endfor %}"
        + GENERATION,
        "<|im_end|>",
        HERMES_CALL,
        "<think>\n{}\n</think>\n\n",
        ("<|endoftext|>",),
    ),
    "qwen3-coder": Style(  # arguments as XML: true becomes True, a number a text
        CHATML_TOOLS
        + "{%- for message in messages %}{%- if message.role == 'user' %}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}"
        + "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' + (message.content or '')|trim }}"
        + "{%- for call in message.tool_calls %}{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}{%- for name, value in call.function.arguments|items %}"
        + "{{- '<parameter=' + name + '>\n' }}{{- value if value is string else (value | string) }}{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}"
        + "{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}"
        + TOOL_TURN
        + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}",
        "<|im_end|>",
        "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        "{}\n</think>\n\n",
        is_thinking=True,
    ),
    "llama3": Style(  # one call, as JSON with parameters
        "{{- bos_token }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\n\nTools: ' }}{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}"
        "{%- for message in messages %}{%- if message.tool_calls is defined and message.tool_calls %}{%- if not message.tool_calls|length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}"
        "{%- set call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}"
        "{%- elif message.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}"
        "{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}",
        "<|eot_id|>",
        '{{"name": "{name}", "parameters": {arguments}}}',
        other_ends=("<|eom_id|>",),
    ),
    "mistral": Style(  # the tools move to the last question; ids of nine letters; roles alternate
        "{{- bos_token }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{%- set ns = namespace(index=0) %}"
        "{%- for message in messages %}{%- if message.role in ('user', 'assistant') and not message.tool_calls %}{%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}"
        "{%- for message in messages %}{%- if message.role == 'user' %}{%- if tools and message == users[-1] %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}{{- '[INST]' + message.content + '[/INST]' }}"
        "{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}"
        "{{- ', \"id\": \"' + call.id + '\"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}{%- endfor %}"
        "{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}"
        "{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]{\"content\": ' + message.content | tojson + '}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}",
        "</s>",
        '[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]',
    ),
    "gemma": Style(  # no system role; contents without spaces around them
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for message in rest %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
        "<end_of_turn>",
        other_ends=("</s>",),
    ),
    "deepseek-r1": Style(  # calls only without content, arguments as they are; the reasoning of history is cut away
        "{{ bos_token }}{%- set ns = namespace(is_tool=false) %}{%- for message in messages %}{%- if message['role'] == 'system' %}{{ message['content'] }}{%- elif message['role'] == 'user' %}{%- set ns.is_tool = false %}{{'<|User|>' + message['content'] }}"
        "{%- elif message['role'] == 'assistant' and message['content'] is none %}{%- set ns.is_tool = false %}{{ '<|Assistant|><|tool_calls_begin|>' }}{%- for tool in message['tool_calls'] %}"
        "{{ '<|tool_call_begin|>' + tool['type'] + '<|tool_sep|>' + tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```<|tool_call_end|>' }}{%- endfor %}{{ '<|tool_calls_end|><|end_of_sentence|>' }}"
        "{%- elif message['role'] == 'assistant' %}{%- set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{%- if ns.is_tool %}{{'<|tool_outputs_end|>' + content + '<|end_of_sentence|>'}}{%- set ns.is_tool = false %}{%- else %}{{'<|Assistant|>' + content + '<|end_of_sentence|>'}}{%- endif %}"
        "{%- elif message['role'] == 'tool' %}{%- set ns.is_tool = true %}{{'<|tool_outputs_begin|>' + message['content'] }}{%- endif %}{%- endfor -%}"
        "{% if ns.is_tool %}{{'<|tool_outputs_end|>'}}{% endif %}{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|><think>\n'}}{% endif %}",
        "<|end_of_sentence|>",
        HERMES_CALL,  # its own is not parsed; the text of a call is the policy's
        "{}\n</think>\n\n",
        is_thinking=True,
    ),
    "glm": Style(  # an answer has no end of its own: the next role's mark ends it
        "[gMASK]<sop>{%- for message in messages %}{%- if message.role == 'user' %}{{- '<|user|>\n' + message.content }}{%- elif message.role == 'system' %}{{- '<|system|>\n' + message.content }}"
        "{%- elif message.role == 'assistant' %}{{- '<|assistant|>' }}{%- if message.content %}{{- '\n' + message.content | trim }}{%- endif %}"
        "{%- for call in message.tool_calls %}{{- '\n<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}"
        "{%- elif message.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}{{- '\n<tool_response>' + message.content + '</tool_response>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}",
        "<|user|>",
        HERMES_CALL,
        "\n<think>{}</think>\n",
        ("<|observation|>", "<|endoftext|>"),
    ),
    "zephyr": Style(
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        "</s>",
        keeps=True,
    ),
    "alpaca": Style(  # no special token but the end: merges may reach over each boundary
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}{% else %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
        "</s>",
        keeps=True,
    ),
    "harmony": Style(  # history has another end than an answer, and no analysis
        "{%- for message in messages %}{%- if message.role == 'assistant' %}{%- if message.tool_calls %}{{- '<|start|>assistant to=functions.' + message.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' + (message.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
        "{%- elif loop.last and not add_generation_prompt %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}"
        "{%- elif message.role == 'tool' %}{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}",
        "<|return|>",
        HERMES_CALL,
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>",
        ("<|call|>",),
    ),
    "plain": Style("{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}", "</s>"),
}
