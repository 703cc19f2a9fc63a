"""Chat templates and tools: which format of tool calls a template has, and one for templates that
know none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolForm:
    """A format of tool calls. `parser` is vLLM's name for it; every call begins with `begins`,
    None if that is not known."""

    parser: str
    begins: str | None


FORMS = (
    ("<|tool_call>", ToolForm("gemma4", "<|tool_call>")),
    ("<start_function_call>", ToolForm("functiongemma", "<start_function_call>")),
    ("<function_calls>", ToolForm("olmo3", "<function_calls>")),
    ("functools[", ToolForm("phi4_mini_json", "functools")),
    ("<｜tool▁calls▁begin｜>", ToolForm("deepseek_v3", "<｜tool▁calls▁begin｜>")),
    ("<|channel|>", ToolForm("openai", "<|channel|>")),
    ("<arg_key>", ToolForm("glm45", "<tool_call>")),
    ("<function=", ToolForm("qwen3_coder", "<tool_call>")),
    ("<tool_call>", ToolForm("hermes", "<tool_call>")),
    ("[TOOL_CALLS]", ToolForm("mistral", "[TOOL_CALLS]")),
    ("<|python_tag|>", ToolForm("llama3_json", None)),
    ('"parameters": dictionary of argument name', ToolForm("llama3_json", None)),
    ("<|tool_call_start|>", ToolForm("lfm2", "<|tool_call_start|>")),
)
"""What a template of each form contains; the first that fits."""

HERMES = """\
{%- set system = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '' -%}
{{ '<|im_start|>system\\n' ~ system ~ 'You can call these functions:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor -%}
{{ '\\n</tools>\\nWrite each call as JSON:\\n<tool_call>\\n' }}
{{- '{"name": function name, "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": ' ~ (call.function.name | tojson) ~ ', "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string
     else call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Tools in the Hermes form, in ChatML."""


def knows_tools(template: str) -> bool:
    return "tools" in template


def with_tools(template: str) -> str:
    """The template, and where it knows no tools and is ChatML, ours for conversations that have
    tools. Without tools it renders as before.
    """
    if knows_tools(template) or "<|im_start|>" not in template:
        return template
    return f"{{%- if tools %}}{HERMES}{{%- else %}}{template}{{%- endif %}}"


def tool_form(template: str) -> ToolForm | None:
    """The format of the template's tool calls; None if it knows no tools, or it is unknown."""
    if not knows_tools(template):
        return None
    return next((form for sign, form in FORMS if sign in template), None)
