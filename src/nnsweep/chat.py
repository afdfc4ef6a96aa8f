"""Chat prompts: a list of messages becomes the text that the model's own template makes of it.

What a message became is found by rendering once more with a mark in its place, so that a word of
the content that also stands in the template is never mistaken for it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from nnsweep.errors import UserError
from nnsweep.sweep_positions import GENERATION

ASSISTANT = "assistant"
KEYS = ("role", "content")
MARK = "\ue000content\ue000"
"""Stands for a content; of the private use area, so that no template trims or knows it."""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template with the values of its variables."""

    tokenizer: Any
    variables: Mapping[str, Any]

    def render(self, messages: Messages, generation: bool = True) -> "Rendered | str":
        """The text of messages, or the template's own words against them."""
        mine = messages[-1]["role"] == ASSISTANT
        how: dict[str, Any] = {
            "continue_final_message": mine,
            "add_generation_prompt": generation and not mine,
        }
        how |= {"tokenize": False, "strftime_now": _no_clock}
        try:
            return Rendered(self.tokenizer.apply_chat_template(messages, **how, **self.variables))
        except (TemplateError, TypeError, ValueError) as error:
            return f"the chat template refuses the messages: {' '.join(str(error).split())[:200]}"


@dataclass(frozen=True)
class Rendered:
    """The text of a chat, which is no reason against it."""

    text: str


@dataclass(frozen=True)
class Chat:
    """Messages and the prompt they became."""

    messages: Messages
    text: str
    template: Template

    @property
    def continues(self) -> bool:
        """Whether the model goes on with the last message instead of beginning a new one."""
        return self.messages[-1]["role"] == ASSISTANT


def template_of(tokenizer: Any, chat: bool | Mapping[str, Any]) -> Template:
    """The tokenizer's template, with what the sweep's `prompts.chat` says of its variables.

    Raises:
        UserError: there is no template, or it does not read a variable.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "prompts.chat: the model's tokenizer has no chat template. Use a model that was tuned "
            "for chat, or plain prompts with chat: false."
        )
    variables = chat if isinstance(chat, Mapping) else {}
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise UserError(f"prompts.chat: the chat template does not read '{name}'. Remove it.")
    return Template(tokenizer, variables)


def _no_clock(_: str) -> str:
    """Stands for the clock in a template; with it a sweep would be another one every day."""
    raise UserError(
        "prompts.chat: the chat template writes today's date. Fix it, as in "
        'chat: {date_string: "26 Jul 2024"}.'
    )


def chat_of(template: Template, cell: str) -> Chat | str:
    """Render one cell of the prompt file, or say why it cannot be."""
    messages = read_messages(cell)
    if isinstance(messages, str):
        return messages
    found = template.render(messages)
    return found if isinstance(found, str) else Chat(messages, found.text, template)


def read_messages(cell: str) -> Messages | str:
    """The messages of one cell, or what is wrong with them."""
    try:
        value = json.loads(cell)
    except json.JSONDecodeError as error:
        return f"{_short(cell)} is no JSON list of messages ({error.msg}, character {error.pos})"
    if not isinstance(value, list):
        return f"{_short(cell)} is no list of {{role, content}} messages"
    if not value:
        return "the list of messages is empty; give at least one {role, content}"
    problems = (_problem(number, message) for number, message in enumerate(value, 1))
    problem = next((each for each in problems if each), None) or _bad_end(value)
    return problem or value


def _problem(number: int, message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"message {number} is {_short(message)}; give {{role, content}}"
    for key in message:
        if key not in KEYS:
            return f"message {number} has the unknown key '{key}'. Allowed: {', '.join(KEYS)}"
    for key in KEYS:
        if not isinstance(message.get(key), str):
            return f"message {number}: {key} is {_short(message.get(key))}; give text"
    return None


def _bad_end(messages: Messages) -> str | None:
    """Why the assistant's last message cannot be continued."""
    last = messages[-1]
    if last["role"] != ASSISTANT:
        return None
    if not last["content"].strip():
        return f"message {len(messages)}, which is to be continued, is empty; leave it out"
    if last["content"] != last["content"].rstrip():
        return (
            f"message {len(messages)}, which is to be continued, ends in white space: "
            f"{last['content']!r}; put the space into the answer"
        )
    return None


def span_of(chat: Chat, role: str, occurrence: int | None) -> tuple[int, int] | str:
    """Characters [start, end) of a role's message in the prompt, or why there are none.

    Args:
        chat: The rendered messages.
        role: A role, or `generation` for what the template appended.
        occurrence: 1 is the first message of the role, -1 its last; None refuses several.
    """
    if role == GENERATION:
        return _generation(chat)
    numbers = [i for i, message in enumerate(chat.messages) if message["role"] == role]
    roles = [message["role"] for message in chat.messages]
    if not numbers:
        return f"no message of role {role}; roles: {', '.join(roles)}"
    if occurrence is None and len(numbers) > 1:
        return f"{len(numbers)} messages of role {role} ({', '.join(roles)}); give an occurrence"
    place = nth(len(numbers), occurrence)
    if place is None:
        return f"only {len(numbers)} messages of role {role}; roles: {', '.join(roles)}"
    return _content(chat, numbers[place])


def nth(count: int, occurrence: int | None) -> int | None:
    """Index of the n-th of `count` things, counted from 1 or from -1; None where there is none."""
    wanted = occurrence or 1
    place = wanted - 1 if wanted > 0 else count + wanted
    return place if 0 <= place < count else None


def _content(chat: Chat, number: int) -> tuple[int, int] | str:
    """Where one content is: what a mark in its place has before it and after it."""
    content = chat.messages[number]["content"]
    if not content.strip():
        return f"message {number + 1} of role {chat.messages[number]['role']} is empty"
    marked = [dict(message) for message in chat.messages]
    marked[number]["content"] = MARK
    found = chat.template.render(marked)
    if isinstance(found, str):
        return found
    before, _, after = found.text.partition(MARK)
    start, end = len(before), len(chat.text) - len(after)
    if before + chat.text[start:end] + after != chat.text or (
        chat.text[start:end].strip() != content.strip()
    ):
        return f"the chat template does not write message {number + 1} once and as it is"
    return start, end


def _generation(chat: Chat) -> tuple[int, int] | str:
    if chat.continues:
        return "no generation prompt, since the last message is the assistant's own"
    bare = chat.template.render(chat.messages, generation=False)
    if isinstance(bare, str):
        return bare
    if not chat.text.startswith(bare.text) or chat.text == bare.text:
        return "the chat template appends no generation prompt"
    return len(bare.text), len(chat.text)


def answer_join(chat: Chat) -> str:
    """White space that the template itself writes between a prompt and the assistant's words.

    An answer that continues the assistant's own message follows a space, as in a plain prompt.
    """
    if chat.continues:
        return " "
    whole = chat.template.render([*chat.messages, {"role": ASSISTANT, "content": MARK}])
    before = "" if isinstance(whole, str) else whole.text.partition(MARK)[0]
    joint = before[len(chat.text) :]
    return joint if before.startswith(chat.text) and joint.isspace() else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
