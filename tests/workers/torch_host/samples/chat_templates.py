"""Chat templates of many kinds, each in the manner of a family of models, and conversations to try them with."""

from __future__ import annotations

from typing import Any

CHATML_WITH_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nSignatures are within <tools></tools>:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(asks_next=true, last_question=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set place = (messages|length - 1) - loop.index0 %}
    {%- if ns.asks_next and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.asks_next = false %}
        {%- set ns.last_question = place %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last_question %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set said = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set said = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" + said + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model makes one call at a time.") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if tools is not none %}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

ALTERNATING = """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set turns = namespace(index=0) %}
{%- for message in rest %}
    {%- if message.role in ("user", "assistant") and message.tool_calls is not defined %}
        {%- if (message["role"] == "user") != (turns.index % 2 == 0) %}
            {{- raise_exception("Roles must alternate: user, assistant, user, assistant, and so on.") }}
        {%- endif %}
        {%- set turns.index = turns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] " ~ tools|tojson ~ "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function|tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id|length != 9 %}
                {{- raise_exception("Calls have ids of nine letters.") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with an optional system first.") }}
    {%- endif %}
{%- endfor %}
"""

TRIMMING = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is iterable and message['content'] is not string -%}
        {%- for item in message['content'] -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- else -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""

MACROS = """{%- macro typed(schema, depth=0) -%}
  {%- if schema.type == "array" -%}{{ typed(schema['items'] or {}, depth + 1) }}[]
  {%- elif schema.enum -%}{{ schema.enum | map('tojson') | join(' | ') }}
  {%- elif schema.properties -%}
    {
    {%- for name, inner in schema.properties | dictsort -%}
      {{ "  " * depth ~ name }}{{ "" if name in (schema.required or []) else "?" }}: {{ typed(inner, depth + 1) }}
      {%- if not loop.last %}, {% endif -%}
    {%- endfor -%}
    }
  {%- else -%}{{ schema.type | default("any") }}{%- endif -%}
{%- endmacro -%}
{%- macro framed(role) -%}<{{ role }}>{{ caller() }}</{{ role }}>{%- endmacro -%}
{% for tool in tools or [] %}
type {{ tool.function.name }} = {{ typed(tool.function.parameters) }};
{% endfor %}
{% for message in messages %}
  {% call framed(message.role) %}{{ message.content | upper | replace("A", "4") }}{% endcall %}

{% endfor %}
{% set counted %}{{ messages | selectattr("role", "equalto", "user") | list | length }} questions{% endset %}
{{ counted }} {{ cycler("odd", "even").next() }} {{ joiner(", ")() }}{{ dict(a=1, b=[2]) | tojson }}
{{ dict.fromkeys(["x", "y"], 0) }} {{ namespace(a=1).a }} {{ messages | map(attribute="role") | unique | join("/") }}
"""

LOOPS = """{% for message in messages %}
{% if message.role == "system" %}{% continue %}{% endif %}
{{ loop.index }}{{ "^" if loop.first }}{{ "$" if loop.last }} {{ loop.cycle("a", "b") }} {{ loop.revindex0 }}
{% for letter in message.content %}
    {% if letter == "!" %}{% break %}{% endif %}
{{ letter }}{% else %}empty{% endfor %}

{% endfor %}
{% for a, b in {"k": 1, "l": 2}.items() recursive %}{{ a }}{{ b }}{% endfor %}
"""

GENERATIONS = """{% for message in messages %}
    {%- set ended = "|" %}
{% if message.role == "assistant" %}
<assistant>{% generation %}{{ message.content }}{% set ended = "!" %}{{ ended }}
{% endgeneration %}{{ ended }}
{% else %}
<{{ message.role }}>{{ message.content }}
{% endif %}{% endfor %}
{%- generation -%}  tail  {%- endgeneration -%}
"""

JSON = """{% for message in messages %}
{{ message | tojson }}
{{ message | tojson(indent=2) }}
{{ message | tojson(separators=(",", ":"), sort_keys=true) }}
{{ message.content | tojson(ensure_ascii=true) }}
{% endfor %}
{{ tools | tojson(indent=2) if tools else "none" }}
{{ [1, 2.5, true, none, "<a href='x'>&\\"é🙂"] | tojson }}
"""

REASONING = """{%- for message in messages -%}
{{ message.role }}:{{ message.reasoning_content }}/{{ message.thinking }}/{{ message.reasoning }}={{ message.content }};
{%- endfor -%}{{ messages | tojson }}"""

WHITE_SPACE = """
   {% if true %}
      kept
   {% endif %}
  {# a remark #}
\ttabs {% raw %}{{ raw }}{% endraw %}
   {%+ if true %}plus{% endif +%}

end

"""

NAMES = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ documents is none }}|{{ tools is none }}|"
    "{{ add_generation_prompt }}|{{ enable_thinking is defined }}|{{ shape | tojson }}|{{ missing }}|"
    "{{ range(3) | list }}|{{ lipsum is defined }}|{{ self is defined }}|{{ 7 // 2 }}{{ 7 / 2 }}{{ 2 ** 10 }}|"
    "{{ '%05.2f' | format(3.14159) }}|{{ 'a\\tb' | e }}|{{ messages | length }}"
)

TODAY = "{{ strftime_now('%d %B %Y') }} {{ messages[0].content }}"

# These fail, each in another way.
MISTAKES = (
    "{{ raise_exception('roles must alternate') }}",
    "{{ messages[9].x.y }}",
    "{% if %}",
    "{% generation %}never ended",
    "{{ 1 / 0 }}",
    "{{ missing | tojson }}",
    "{{ range(100001) | list }}",
    "{{ messages.append(1) }}",
    "{% do messages.clear() %}",
    "{{ messages[0].update({'x': 1}) }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__ }}{{ ().__class__.__bases__[0] }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages | attr('__class__') | attr('__mro__') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{% include 'x' %}",
    "{{ 'x' | no_such_filter }}",
    "{{ messages[0].content + 5 }}",
)

# These fail too, with words that name what they ran into, or how deep that was.
DEEPER_MISTAKES = (
    "{{ dict.mro() }}",
    "{{ namespace().__init__.__globals__ }}",
    "{{ namespace(__class__=5) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
)

FAMILIES = {
    "chatml with tools": CHATML_WITH_TOOLS,
    "headers": HEADERS,
    "alternating": ALTERNATING,
    "trimming": TRIMMING,
    "macros": MACROS,
    "loops": LOOPS,
    "generations": GENERATIONS,
    "json": JSON,
    "reasoning": REASONING,
    "white space": WHITE_SPACE,
    "names": NAMES,
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": 'Looks <closely> & "well"',
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"type": "array", "items": {"type": "string"}},
                    "how": {"enum": ["near", "für"]},
                    "deep": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
                },
                "required": ["where"],
            },
        },
    },
    {"type": "function", "function": {"name": "wait", "parameters": {}}},
]

_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"where": ["<é>"], "n": 1}}}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "short": [{"role": "user", "content": "hi"}],
    "long": [
        {"role": "system", "content": "  Be brief. \n"},
        {"role": "user", "content": " Grüße <b>&amp;</b> 🙂! and more "},
        {"role": "assistant", "content": "<think>hm</think>\n\nfine  "},
        {"role": "user", "content": ""},
    ],
    "calls": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "saw {it}", "tool_call_id": "abcdefghi"},
        {"role": "tool", "content": "twice", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "again"},
    ],
    "two calls": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL, {**_CALL, "id": "short"}]},
    ],
    "out of order": [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}],
    "thinking": [
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "so", "reasoning": "because"},
        {"role": "assistant", "content": "so", "thinking": "old", "reasoning_content": "new"},
        {"role": "assistant", "content": "so", "thinking": "only"},
        {"role": "assistant", "content": "so", "reasoning_content": None, "extra": {"deep": [1, {"x": None}]}},
    ],
}

SWITCHES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "shape": {"a": [1, 2.5, None, True]}, "bos_token": "[B]", "date_string": "long ago"},
]
