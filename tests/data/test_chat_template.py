# SPDX-License-Identifier: Apache-2.0
"""Chat templates render to the characters transformers renders them to."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ms_longctx.data.chat_template import PLAIN_TEMPLATE, ChatTemplate
from ms_longctx.errors import MsLongctxError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "你好 \n"},
    {"role": "assistant", "content": "{{ not a template }}"},
]
FUNCTION = {"name": "f", "description": "é <b>", "parameters": {"z": 1, "a": [1]}}
TOOLS = [{"type": "function", "function": FUNCTION}]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=2) }}{% endif %}{{ documents is none }}",
    "blocks": "{%- for m in messages %}\n    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
    "    {% generation %}\n[{{ m.content }}]\n    {%- endgeneration %}\n{% endfor %}\n",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + m.content | length %}{% endfor %}"
    "{{ ns.n }}{{ messages[0].get('name', 'none') }}{{ messages[::-1][0].role.upper() }}",
    "plain": PLAIN_TEMPLATE,
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_equals_transformers(name: str, add_generation_prompt: bool) -> None:
    expected, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=TEMPLATES[name], tools=TOOLS,
        add_generation_prompt=add_generation_prompt, **SPECIAL,
    )  # fmt: skip
    mine = ChatTemplate(TEMPLATES[name], SPECIAL).render(MESSAGES, add_generation_prompt, tools=TOOLS)
    assert mine == expected[0]


def test_refusals_are_clear() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", SPECIAL)
    with pytest.raises(MsLongctxError, match="roles must alternate.*|system.*user"):
        template.render(MESSAGES)
    with pytest.raises(MsLongctxError, match="not valid Jinja"):
        ChatTemplate("{% for %}", SPECIAL)


@pytest.mark.parametrize("source", [
    "{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}", "{% set _ = messages.append(1) %}",
])  # fmt: skip
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(MsLongctxError):
        ChatTemplate(source, SPECIAL).render(MESSAGES)
