# SPDX-License-Identifier: Apache-2.0
"""Chat templates: Jinja sources that turn messages into the exact text a model was trained on.

The environment is the one Hugging Face's ``apply_chat_template`` uses (sandboxed and immutable, trimmed
blocks, loop controls, ``raise_exception``, ``strftime_now``, ``tojson``, the ``generation`` tag), so a
template found in ``tokenizer_config.json`` or in a GGUF file renders to the same characters here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ms_longctx.errors import MsLongctxError

#: One chat message: ``role``, ``content`` and whatever else the template reads.
Message = Mapping[str, Any]

#: For models that bring no template: contents separated by blank lines, every answer closed by the end token.
PLAIN_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '\\n\\n' }}"
    "{% endfor %}"
)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja source.
        special_tokens: texts the template may name, such as ``bos_token`` and ``eos_token``.

    Raises:
        MsLongctxError: the source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise MsLongctxError(
                f"the chat template is not valid Jinja: {error}; correct it or give another"
            ) from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any) -> str:
        """Return the text of ``messages``; ``variables`` (``tools``, ``documents``...) reach the template.

        Raises:
            MsLongctxError: the template refused the messages (``raise_exception``) or failed on them.
        """
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **values)
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            roles = [message.get("role") for message in messages]
            raise MsLongctxError(f"the chat template refused messages with roles {roles}: {error}") from error


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the model writes; the text stays as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own ``tojson`` escapes HTML characters; templates for models want plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
