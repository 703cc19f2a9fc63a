"""Token-exact bookkeeping of conversations.

The sequence is the prompt's ids, then the model's own ids as it sampled them, then the chat
template's glue with the environment's turn, and so on. History is never rendered again: training
uses the tokens that were sampled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flash_mcp.protocol.errors import FlashError
from worker.rollouts.rendering import RENDER_LIMIT_S, TooLongError, time_limit
from worker.rollouts.turns import Completion

ChatMessage = dict[str, Any]
MEMORABLE_TOKENS = 256
_SENTINEL = "\u2063answer\u2063"  # invisible separators: no template or task contains them


class ChatTemplate:
    """A tokenizer's chat template as two operations: ids of a prompt, and ids that follow an
    answer.

    `end_ids` are tokens that end a generation, in addition to the tokenizer's own. The constructor
    raises FlashError(template_unsupported) if the template does not show the glue.
    """

    def __init__(
        self, tokenizer: Any, *, thinking: bool = False, end_ids: Iterable[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.thinking = thinking
        if not tokenizer.chat_template:
            fix = "use an instruct model, or add chat_template.jinja to the model folder"
            raise _unsupported("the model's tokenizer has no chat template", fix)
        self.end_ids = _end_ids(tokenizer).union(end_ids)
        self._glue: dict[str, list[int]] = {}
        self._check()

    def prompt_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of a conversation's start, the generation prompt included."""
        return self._encode(self._render(messages))

    def glue_ids(self, messages: Sequence[ChatMessage], *, ended: bool) -> list[int]:
        """Ids from the end of an answer to the next generation prompt, with the environment's
        `messages` between.

        `ended`: the answer already ends with an end-of-turn token, so the glue leaves its own out.
        """
        key = json.dumps(messages, sort_keys=True, default=str)
        ids = self._glue.get(key)
        if ids is None:
            conversation = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": _SENTINEL},
                *messages,
            ]
            head, found, tail = self._render(conversation).rpartition(_SENTINEL)
            if not found or _SENTINEL in head:
                what = "the chat template does not show an answer exactly once"
                raise _unsupported(
                    what, "use a model whose template keeps assistant content as it is"
                )
            ids = self._encode(tail)
            # Environments repeat short answers. Long ones would only make the process grow.
            if len(ids) <= MEMORABLE_TOKENS:
                self._glue[key] = ids
            if len(self._glue) > 4096:
                self._glue.pop(next(iter(self._glue)))
        return ids[self._end_of_turn(ids) + 1 :] if ended else ids

    def answer(self, text: str) -> Completion:
        """A gold answer as the model would have sampled it, with log-probability 0."""
        glue = self.glue_ids([{"role": "user", "content": ""}], ended=False)
        ids = self._encode(text) + glue[: self._end_of_turn(glue) + 1]
        return Completion(ids, [0.0] * len(ids), "stop")

    def text(self, token_ids: Sequence[int]) -> str:
        """What the model wrote, without the special tokens that end a turn."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _end_of_turn(self, glue: list[int]) -> int:
        for at, token in enumerate(glue):
            if token in self.end_ids:
                return at
        what = "the chat template does not end a turn with a token that ends generation"
        raise _unsupported(what, "use a model whose template marks the end of a turn")

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        try:
            with time_limit(RENDER_LIMIT_S):
                return self.tokenizer.apply_chat_template(
                    list(messages),
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=self.thinking,
                )
        except TooLongError as error:
            what = f"the chat template took longer than {RENDER_LIMIT_S:g} s for one conversation"
            raise _unsupported(what, "use a model whose template has no such loops") from error
        except Exception as error:  # jinja2 raises what the template's author wrote
            what = "the chat template refuses these messages"
            roles = [message.get("role") for message in messages]
            fix = "use the roles that the model's template knows"
            raise _unsupported(what, fix, roles=roles, wrote=str(error)) from error

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _check(self) -> None:
        """Two turns put together from pieces must read as the template renders them whole."""
        start = [{"role": "user", "content": "2 + 2?"}]
        reply = [{"role": "user", "content": "Are you sure?"}]
        pieces = self.prompt_ids(start) + self._encode("4") + self.glue_ids(reply, ended=False)
        whole = self._render([*start, {"role": "assistant", "content": "4"}, *reply])
        self.glue_ids(reply, ended=True)
        got = self.tokenizer.decode(pieces)
        expected = self.tokenizer.decode(self._encode(whole))
        # Templates that drop an empty or opened think block from history (Qwen3) may differ in it:
        # the model saw it.
        if got != expected and _without_think(got) != _without_think(expected):
            what = "the chat template changes what was said when a turn is added"
            raise _unsupported(what, "use a model whose template leaves earlier turns as they are")


@dataclass
class Transcript:
    """One conversation as tokens.

    `ids` is prompt_ids + completion_ids. `mask` and `logprobs` are as long as the completion: the
    model's own tokens have mask 1; environment tokens and glue have mask 0 and log-probability 0.
    """

    template: ChatTemplate
    messages: list[ChatMessage]
    prompt_ids: list[int] = field(init=False)
    completion_ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    truncated: bool = False
    _ended: bool = False

    def __post_init__(self) -> None:
        self.messages = [dict(message) for message in self.messages]
        self.prompt_ids = self.template.prompt_ids(self.messages)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def model_tokens(self) -> int:
        return sum(self.mask)

    def add_answer(self, completion: Completion) -> str:
        """Append what the model sampled; its text."""
        self.completion_ids += completion.token_ids
        self.mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.truncated |= completion.finish_reason == "length"
        last = completion.token_ids[-1:]
        self._ended = bool(last) and last[0] in self.template.end_ids
        text = self.template.text(completion.token_ids)
        self.messages.append({"role": "assistant", "content": text})
        return text

    def add_environment(self, messages: Sequence[ChatMessage]) -> None:
        """Append the environment's turn and the next generation prompt."""
        ids = self.template.glue_ids(messages, ended=self._ended)
        self.completion_ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.messages += [dict(message) for message in messages]

    def drop_unanswered(self) -> None:
        """Remove the tokens after the model's last one: they predict nothing, and a reply may be
        very long.
        """
        end = len(self.mask) - self.mask[::-1].index(1) if 1 in self.mask else 0
        del self.completion_ids[end:], self.mask[end:], self.logprobs[end:]


def _unsupported(what: str, fix: str, **values: Any) -> FlashError:
    return FlashError("template_unsupported", what, fix=fix, **values)


def _end_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that end a turn: the tokenizer's eos and the usual end-of-turn markers that it has."""
    tokens = [tokenizer.eos_token_id]
    for marker in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>"):
        token = tokenizer.convert_tokens_to_ids(marker)
        if token != tokenizer.unk_token_id:
            tokens.append(token)
    return frozenset(token for token in tokens if token is not None)


def _without_think(text: str) -> str:
    return text.replace("<think>\n\n</think>\n\n", "").replace("<think>\n", "")
