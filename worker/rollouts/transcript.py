"""Token-exact bookkeeping of conversations.

The sequence is the prompt's ids, then the model's own ids as it sampled them, then the chat
template's glue with the environment's turn, and so on: training uses the tokens that were sampled.
Where the template shows the history otherwise by then (Qwen3 drops earlier thoughts), a fork shows
it rendered anew, so that the model sees what a deployment would show."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Self

import numpy as np

from environments.agents.calls import CallOptions
from environments.base import ChatMessage, Json
from environments.messages import THOUGHTS, thought_of
from environments.tools import text_of
from flash_mcp.protocol.base_models import tool_form, with_tools
from flash_mcp.protocol.errors import FlashError
from worker.rollouts.rendering import (
    RENDER_LIMIT_S,
    ControlTokens,
    TooLongError,
    time_limit,
    whole_of,
)
from worker.rollouts.tool_calls import CallReader, Turn, sample_call, with_valid_strings
from worker.rollouts.turns import Completion, Grammar

MOST_TOOL_SETS = 64
"""Sets of tools whose templates are kept: each task may have its own."""
MOST_STARTS = 32
"""Starts of conversations whose tokens are kept."""
MEMORABLE_TOKENS = 256
FREE_SHARE = 0.99
"""A token was free if the model gave the tokens that the grammar allowed at least this share."""
QUESTION = {"role": "user", "content": "?"}
THINK = "<think>"
EMPTY_THINK = "<think>\n\n</think>\n\n"
_MARK = "\u2063system\u2063"
_SENTINEL = "\u2063answer\u2063"  # invisible separators: no template or task contains them


class ChatTemplate:
    """A tokenizer's chat template as two operations: ids of a prompt, and ids that follow an
    answer.

    `end_ids` are tokens that end a generation, in addition to the tokenizer's own. The constructor
    raises FlashError(template_unsupported) if the template does not show the glue.

    `for_tools` is the template of conversations with tools. One without tools gets ours
    (flash_mcp/protocol/base_models.py).
    """

    def __init__(
        self, tokenizer: Any, *, thinking: bool = False, end_ids: Iterable[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.thinking = thinking
        if not tokenizer.chat_template:
            fix = "use an instruct model, or add chat_template.jinja to the model folder"
            raise _unsupported("the model's tokenizer has no chat template", fix)
        # Tokens that end a turn: the tokenizer's eos and the usual end-of-turn markers that it has
        tokens = [tokenizer.eos_token_id]
        for marker in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>"):
            token = tokenizer.convert_tokens_to_ids(marker)
            if token != tokenizer.unk_token_id:
                tokens.append(token)
        self.end_ids = frozenset(token for token in tokens if token is not None).union(end_ids)
        self._control = ControlTokens(tokenizer, self.end_ids)
        self.tools: list[Json] = []
        self._glue: dict[str, list[int]] = {}
        self._starts: dict[str, list[int]] = {}
        self._reader: CallReader | None = None
        self._question: str | None = None
        self._thought_field: str | None = None
        self._with_tools: dict[str, Self] = {}
        self._check([{"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}])
        prompt = self._render([QUESTION])
        self._opens_thinking = prompt.rstrip().endswith(THINK)
        self.changes_history = self._changes_history()

    def for_tools(self, tools: Sequence[Json]) -> Self:
        """This template for conversations that may call these tools (OpenAI function schemas).

        FlashError(tools_unsupported) if it cannot show them."""
        if not tools:
            return self
        key = json.dumps(tools, sort_keys=True)
        if key not in self._with_tools:
            if len(self._with_tools) >= MOST_TOOL_SETS:
                self._with_tools.pop(next(iter(self._with_tools)))
            self._with_tools[key] = self._made_for(list(tools))
        return self._with_tools[key]

    def _made_for(self, tools: list[Json]) -> Self:
        created = copy.copy(self)
        created.tools = tools
        created._glue = {}
        created._starts = {}
        created._question = None
        call = sample_call(tools[0])
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        try:
            created._check([{"role": "assistant", "content": "", "tool_calls": [call]}, answer])
        except FlashError as error:
            raise _no_tools(f"{error.what}, in a conversation with tools") from error
        return created

    def prompt_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of a conversation's start, the generation prompt included. The rollouts of a group
        begin alike, so the last ones are kept."""
        key = json.dumps(messages, sort_keys=True, default=str)
        ids = self._starts.get(key)
        if ids is None:
            self._check_system(messages)
            ids = self._starts[key] = self._encode(self._render(messages))
            if len(self._starts) > MOST_STARTS:
                self._starts.pop(next(iter(self._starts)))
        return list(ids)

    def glue_ids(self, messages: Sequence[ChatMessage], *, ended: bool) -> list[int]:
        """Ids from the end of an answer to the next generation prompt, with the environment's
        `messages` between.

        `ended`: the answer already ends with an end-of-turn token, so the glue leaves its own out.
        """
        key = json.dumps(messages, sort_keys=True, default=str)
        ids = self._glue.get(key)
        if ids is None:
            conversation = [QUESTION, {"role": "assistant", "content": _SENTINEL}, *messages]
            head, result, tail = self._render(conversation).rpartition(_SENTINEL)
            if not result or _SENTINEL in head:
                what = "the chat template does not show an answer exactly once"
                raise _unsupported(
                    what, "use a model whose template keeps assistant content as it is"
                )
            self._check_system(conversation)
            ids = self._encode(tail)
            # Environments repeat short answers. Long ones would only make the process grow.
            if len(ids) <= MEMORABLE_TOKENS:
                self._glue[key] = ids
            if len(self._glue) > 4096:
                self._glue.pop(next(iter(self._glue)))
        return ids[self._end_of_turn(ids) + 1 :] if ended else ids

    def answer(self, text: str, tool_calls: Sequence[Json] = ()) -> Completion:
        """A gold answer as the model would have sampled it, with log-probability 0."""
        if tool_calls:
            ids = self._encode(self._call_text(text, tool_calls))
            ids = ids[: self._end_of_turn(ids) + 1]
        else:
            glue = self.glue_ids([{"role": "user", "content": ""}], ended=False)
            ids = self._encode(self._control.apart(text)) + glue[: self._end_of_turn(glue) + 1]
        return Completion(ids, [0.0] * len(ids), "stop")

    def gold(self, message: ChatMessage) -> Completion:
        """An answer as the template writes it after its generation prompt, the thought included.

        FlashError(dataset_invalid) if the template does not write it so."""
        if self._question is None:
            self._question = self._render([QUESTION])
        shown = self._render([QUESTION, message], prompts=False)
        written = shown.removeprefix(self._question)
        if written == shown or not self._shows(message, whole_of(written)):
            raise unlike_template(self._question, whole_of(shown))
        glue = self.glue_ids([{"role": "user", "content": ""}], ended=False)
        end = glue[: self._end_of_turn(glue) + 1]
        text = self._control.apart(message["content"])
        if written.startswith(text + self.tokenizer.decode(end)):
            ids = self._encode(text) + end
        else:
            ids = self._encode(written)
            ends = [at for at, token in enumerate(ids) if token in self.end_ids]
            # A template may leave the end to the next turn, which begins with it (GLM).
            ids = ids[: ends[0] + 1] if ends else ids + end
        return Completion(ids, [0.0] * len(ids), "stop")

    def _shows(self, answer: ChatMessage, written: str) -> bool:
        """Whether all that the answer says is written, its thought where the template has a place
        for it."""
        thought, text = thought_of(answer)
        said = [
            thought or "",
            text,
            *(call["function"]["name"] for call in answer.get("tool_calls") or ()),
        ]
        knows_thoughts = (
            self._thought_field or "enable_thinking" not in self.tokenizer.chat_template
        )
        return all(part.strip() in written for part in said) and bool(knows_thoughts or not thought)

    def _for_template(self, message: ChatMessage) -> ChatMessage:
        """The message as the template takes it: a call's arguments as an object, not JSON text, and
        a thought where the template looks for it."""
        if message["role"] == "assistant":
            with suppress(ValueError):  # a model may write what is no thought
                message = self._with_thought(message, *thought_of(message))
        if not message.get("tool_calls"):
            return message
        calls: list[Json] = []
        for call in message["tool_calls"]:
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                with suppress(ValueError):  # text that is no JSON is shown as it is
                    arguments = json.loads(arguments)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        return {**message, "tool_calls": calls}

    def _with_thought(self, message: ChatMessage, thought: str | None, text: str) -> ChatMessage:
        if thought is None:
            return message
        bare = {name: value for name, value in message.items() if name not in THOUGHTS}
        if self._thought_field is None:
            # The field of an answer that the template shows as its thought; "" if it shows none
            self._thought_field = ""
            for name in THOUGHTS:
                answer = {"role": "assistant", "content": _SENTINEL, name: _MARK}
                with suppress(FlashError):
                    if self._apply([QUESTION, answer], prompts=False).count(_MARK) == 1:
                        self._thought_field = name
                        break
        if self._thought_field:
            return {**bare, "content": text} | ({self._thought_field: thought} if thought else {})
        if bare == message:
            return message
        return {**bare, "content": f"{THINK}\n{thought}\n</think>\n\n{text}"}

    def _changes_history(self) -> bool:
        """Whether an answer, with a thought or without, is shown otherwise once it is history."""
        for thought in ({}, {THOUGHTS[0]: "Sum."}):
            answer = {"role": "assistant", "content": "4", **thought}
            with suppress(FlashError):  # no such answer can be given
                start = self._render([QUESTION]) + self.text(self.gold(answer).token_ids)
                if not self._render([QUESTION, answer, QUESTION]).startswith(start):
                    return True
        return False

    def _call_text(self, text: str, tool_calls: Sequence[Json]) -> str:
        """A turn with calls as the template shows it, from the generation prompt on."""
        turn = {"role": "assistant", "content": text, "tool_calls": list(tool_calls)}
        prompt = self._render([QUESTION])
        shown = self._render([QUESTION, turn], prompts=False)
        # History may leave out an empty think block of the prompt, or have one of its own (Qwen3).
        for header in (prompt, prompt.removesuffix(EMPTY_THINK)):
            if shown.startswith(header):
                return shown.removeprefix(header).removeprefix(EMPTY_THINK)
        what = "the chat template does not show a tool call after its generation prompt"
        raise _unsupported(what, "use a model whose template shows tool calls in their turn")

    def control_token(self, message: ChatMessage) -> str | None:
        """A text in the message that the tokenizer would take for a control token, such as the end
        of a turn; None without any."""
        return self._control.found(text_of(message))

    def read(self, token_ids: Sequence[int], calls_before: int = 0) -> Turn:
        """What the model wrote in one turn; its calls are numbered on from `calls_before`.

        FlashError(tools_unsupported) if the calls of this template cannot be read."""
        text = self.text(token_ids)
        if not self.tools:
            return Turn(text)
        return self._calls.read(self._written(token_ids), text, calls_before)

    def limits_of(self, options: CallOptions) -> tuple[Grammar | None, tuple[str, ...]]:
        """What a request asks of its answer: a grammar, and strings that end it.

        FlashError(template_unsupported) if this template's calls cannot be held to it."""
        stop = options.stop
        schema = options.json_schema
        calls_at_will = bool(self.tools) and options.tool_choice == "auto"
        must_call = options.tool_choice == "required"
        form = None
        if calls_at_will and not options.parallel_tool_calls and self._calls.ends:
            stop = (*stop, self._calls.ends)
        elif calls_at_will and not options.parallel_tool_calls:
            form = self._tag_of(options)
        if must_call or (calls_at_will and schema is not None):
            form = self._tag_of(replace(options, tool_choice="required"))
        if form is not None and schema is not None and not must_call:
            answer = {"type": "json_schema", "json_schema": schema}
            form = {"type": "or", "elements": [form, answer]}
        if form is not None:
            tag = {"type": "structural_tag", "format": with_valid_strings(form)}
            return Grammar(structural_tag=json.dumps(tag)), stop
        if schema is not None:
            return Grammar(json_schema=json.dumps(with_valid_strings(schema))), stop
        return None, stop

    def _tag_of(self, options: CallOptions) -> Json:
        form = self._calls.tag(
            options.tool_choice, options.tool_name, parallel=options.parallel_tool_calls
        )
        if form is None:
            what = "the model's format of tool calls cannot be enforced"
            raise _unsupported(what, "leave tool_choice and parallel_tool_calls out")
        return form

    @property
    def _calls(self) -> CallReader:
        """A reader that reads back what the template writes."""
        if self._reader is not None:
            return self._reader
        form = tool_form(with_tools(self.tokenizer.chat_template))
        if form is None:
            raise _no_tools("the chat template's format of tool calls is not known")
        reader = CallReader(self.tokenizer, form, self.tools)
        call = sample_call(self.tools[0])
        gold = self.answer("", [call])
        if reader.read(self._written(gold.token_ids), "").tool_calls != [call]:
            parser = f"vLLM's parser {form.parser}"
            raise _no_tools(f"{parser} does not read the chat template's tool calls")
        self._reader = reader
        return reader

    def _written(self, token_ids: Sequence[int]) -> str:
        """The text of a turn with special tokens, which some formats of calls have."""
        return self.tokenizer.decode(
            [token_id for token_id in token_ids if token_id not in self.end_ids]
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """What the model wrote, without the special tokens that end a turn."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def thought(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """Tokens of thinking in an answer, and whether it ends within them."""
        thought, end, _ = self._written(token_ids).partition("</think>")
        if self._opens_thinking:
            thought = THINK + thought
        _, start, thought = thought.partition(THINK)
        return len(self._encode(thought)), bool(start) and not end

    def _end_of_turn(self, glue: list[int]) -> int:
        for at, token in enumerate(glue):
            if token in self.end_ids:
                return at
        what = "the chat template does not end a turn with a token that ends generation"
        raise _unsupported(what, "use a model whose template marks the end of a turn")

    def _render(self, messages: Sequence[ChatMessage], *, prompts: bool = True) -> str:
        """The conversation as text, with the next generation prompt if `prompts`."""
        shown = self._control.apart(list(map(self._for_template, messages)))
        return self._apply(shown, prompts=prompts)

    def _apply(self, messages: Sequence[ChatMessage], *, prompts: bool) -> str:
        options: Json = {}
        if self.tools:
            template = with_tools(self.tokenizer.chat_template)
            options = {"tools": self._control.apart(self.tools), "chat_template": template}
        try:
            with time_limit(RENDER_LIMIT_S):
                return self.tokenizer.apply_chat_template(
                    list(messages),
                    tokenize=False,
                    add_generation_prompt=prompts,
                    enable_thinking=self.thinking,
                    **options,
                )
        except TooLongError as error:
            what = f"the chat template took longer than {RENDER_LIMIT_S:g} s for one conversation"
            raise _unsupported(what, "use a model whose template has no such loops") from error
        except Exception as error:  # jinja2 raises what the template's author wrote
            what = "the chat template refuses these messages"
            roles = [message.get("role") for message in messages]
            fix = "use the roles that the model's template knows"
            raise _unsupported(what, fix, roles=roles, wrote=str(error)) from error

    def _check_system(self, messages: Sequence[ChatMessage]) -> None:
        """FlashError(template_unsupported) if the template leaves a system message out."""
        said = [message["content"] for message in messages if message["role"] == "system"]
        if not any(said):
            return
        marked = [
            {**message, "content": _MARK} if message["role"] == "system" else message
            for message in messages
        ]
        if self._render(marked).count(_MARK) < len(said):
            what = "the chat template does not show system messages"
            fix = "begin the first message of the user with that text"
            raise _unsupported(what, fix, message=f"{said[0]:.80}")

    def compare(
        self, ids: Sequence[int], messages: Sequence[ChatMessage], *, prompts: bool
    ) -> FlashError | None:
        """Why the ids do not read as the rendering of the messages does; None if they do."""
        ours, whole = self.tokenizer.decode(ids), self._render(messages, prompts=prompts)
        if ours == whole:
            return None
        whole = self.tokenizer.decode(self._encode(whole))
        if prompts:
            is_same = ours == whole
        else:  # a template may add an end of the text, or leave out the last end of a turn
            ends = re.compile(rf"(?:{self._control.pattern}|\s)+$")
            is_same = ends.sub("", ours) == ends.sub("", whole)
        return None if is_same else unlike_template(ours, whole)

    def _encode(self, text: str) -> list[int]:
        return self._control.encode(text)

    def _check(self, turns: list[ChatMessage]) -> None:
        """An answer and a reply put together from pieces must read as the template renders them."""
        start = [{"role": "user", "content": "2 + 2?"}]
        answer, reply = turns
        whole = self._render([*start, *turns])
        calls = answer.get("tool_calls") or ()
        if calls and calls[0]["function"]["name"] not in self._render(start):
            what = "the chat template shows no tools to the model"
            raise _unsupported(what, "use a model whose template knows tools, or is ChatML")
        pieces = self.prompt_ids(start) + self.answer(answer["content"], calls).token_ids
        pieces += self.glue_ids([reply], ended=True)
        self.glue_ids([reply], ended=False)
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
    model's own tokens have mask 1; environment tokens, glue and tokens that a grammar chose have
    mask 0 and log-probability 0.
    """

    template: ChatTemplate
    messages: list[ChatMessage]
    tools: InitVar[Sequence[Json]] = ()
    prompt_ids: list[int] = field(init=False)
    completion_ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    truncated: bool = False
    forks: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Of an agent's calls (worker/rollouts/calls.py): (start, after) says that `ids` from `start`
    on do not follow the token before, but the first `after` tokens."""
    branches: list[Json] = field(default_factory=list[Json])
    """Conversations beside `messages`, as records.Rollout has them."""
    calls: list[Json] = field(default_factory=list[Json])
    """An agent's calls, as records.Rollout has them."""
    policies: Counter[int] = field(default_factory=Counter[int])
    """{number of the policy: tokens that it sampled}"""
    experts: Any = None
    """A NumPy array (tokens, layers, k) of the experts that each token passed in the engine when it
    was first computed there, -1 where that is not known. Shorter than `ids` if what follows is not
    known, None if nothing is. It stays in the process that made the rollout."""
    _ended: bool = False
    _calls: int = 0
    _places: list[int] = field(default_factory=list[int])
    """Of the tokens that the model sees, those in `ids`."""

    def __post_init__(self, tools: Sequence[Json]) -> None:
        self.template = self.template.for_tools(tools)
        self.messages = [dict(message) for message in self.messages]
        self.prompt_ids = self.template.prompt_ids(self.messages)
        self._places = list(range(len(self.prompt_ids)))

    def packed(self) -> Json:
        """The transcript as JSON, without experts; in place of its template, the tools that this
        shows."""
        return {**vars(self), "template": self.template.tools, "experts": None}

    @classmethod
    def unpacked(cls, packed: Json, template: ChatTemplate) -> Self:
        created = object.__new__(cls)
        vars(created).update(packed, template=template.for_tools(packed["template"]))
        created.forks = [(start, after) for start, after in created.forks]
        created.policies = Counter({int(number): n for number, n in created.policies.items()})
        return created

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def context(self) -> list[int]:
        """The tokens that the model sees next: those of `ids` but earlier ones that the template
        shows otherwise by now."""
        ids = self.ids
        return [ids[place] for place in self._places]

    @property
    def model_tokens(self) -> int:
        return sum(self.mask)

    @property
    def answers(self) -> list[list[int]]:
        """The tokens that are trained, apart where others or a fork are between them: those of each
        turn."""
        forks = {start - len(self.prompt_ids) for start, _ in self.forks}
        spans: list[list[int]] = []
        is_open = False
        for at, (token, is_trained) in enumerate(zip(self.completion_ids, self.mask, strict=True)):
            if is_trained and (not is_open or at in forks):
                spans.append([])
            is_open = bool(is_trained)
            if is_trained:
                spans[-1].append(token)
        return spans

    @property
    def thinking(self) -> tuple[int, bool]:
        """Tokens of thinking, and whether the last answer ends within them."""
        thoughts = [self.template.thought(answer) for answer in self.answers]
        return sum(tokens for tokens, _ in thoughts), bool(thoughts) and thoughts[-1][1]

    @property
    def all_messages(self) -> list[ChatMessage]:
        """The messages, and those of the branches."""
        return sum((branch["messages"] for branch in self.branches), self.messages)

    @property
    def tree(self) -> Json:
        """The tokens as records.Rollout has them."""
        return {"ids": self.ids, "forks": self.forks}

    def add_answer(
        self, completion: Completion, *, reads_calls: bool = True, trains: bool = True
    ) -> Turn:
        """Append what the model sampled, and read it. Without `reads_calls` it is text; without
        `trains` it is context.
        """
        # What does not train may be of another model.
        own = completion if trains else replace(completion, policies={}, experts=None)
        self._append(own, trains=trains)
        if reads_calls:
            turn = self.template.read(completion.token_ids, self._calls)
        else:
            turn = Turn(self.template.text(completion.token_ids))
        self._calls += len(turn.tool_calls)
        self.messages.append(turn.message())
        return turn

    def add_gold(self, message: ChatMessage) -> None:
        """Append a gold answer as if the model had sampled it; one of weight 0 is context."""
        self._append(self.template.gold(message), trains=message.get("weight") != 0)
        self.messages.append(dict(message))

    def _append(self, completion: Completion, *, trains: bool = True) -> None:
        mask, logprobs = trained(completion)
        if not trains:
            mask = [0] * len(mask)
            logprobs = [0.0] * len(mask)
        self._extend(completion.token_ids, mask, logprobs)
        self.experts = with_experts(self.experts, len(self), self._places, completion.experts)
        self.policies.update(completion.policies)
        self.truncated |= completion.finish_reason == "length"
        last = completion.token_ids[-1:]
        self._ended = bool(last) and last[0] in self.template.end_ids

    def add_environment(self, messages: Sequence[ChatMessage]) -> None:
        """Append the environment's turn and the next generation prompt. Where the template shows
        the history otherwise from here on, without earlier thoughts, a fork shows it so."""
        ids = self.template.glue_ids(messages, ended=self._ended)
        self.messages += [dict(message) for message in messages]
        if self.template.changes_history:
            seen = [*self.context, *ids]
            shown = self.template.prompt_ids(self.messages)
            if self.template.tokenizer.decode(seen) != self.template.tokenizer.decode(shown):
                pairs = enumerate(zip(seen, shown, strict=False))
                same = next((at for at, (one, other) in pairs if one != other), len(seen))
                same = min(same, len(self._places), len(shown) - 1)
                del self._places[same:]
                self.forks.append((len(self), self._places[-1] + 1))
                ids = shown[same:]
        self._extend(ids, [0] * len(ids), [0.0] * len(ids))

    def _extend(self, ids: list[int], mask: list[int], logprobs: list[float]) -> None:
        self._places += range(len(self), len(self) + len(ids))
        self.completion_ids += ids
        self.mask += mask
        self.logprobs += logprobs

    def unlike_template(self, *, prompts: bool) -> FlashError | None:
        """Why these are not the tokens of the template's own rendering of all messages, with the
        next generation prompt if `prompts`; None if they are."""
        return self.template.compare(self.context, self.messages, prompts=prompts)

    def copy(self) -> Self:
        """A transcript that goes on from here by itself."""
        created = copy.copy(self)
        created.messages = [*self.messages]
        created.completion_ids = [*self.completion_ids]
        created.mask = [*self.mask]
        created.logprobs = [*self.logprobs]
        created.policies = self.policies.copy()
        created.forks = [*self.forks]
        created._places = [*self._places]
        return created

    def drop_unanswered(self) -> None:
        """Remove the tokens after the model's last one: they predict nothing, and may be many."""
        end = len(self.mask) - self.mask[::-1].index(1) if 1 in self.mask else 0
        del self.completion_ids[end:], self.mask[end:], self.logprobs[end:]
        self.forks = [fork for fork in self.forks if fork[0] < len(self)]
        self._places = [place for place in self._places if place < len(self)]
        self.experts = None if self.experts is None else self.experts[: len(self)]


def with_experts(earlier: Any, tokens: int, places: Sequence[int], added: Any) -> Any:
    """The experts of so many tokens: the `earlier` ones and, where none is known, those that are
    `added`, of the tokens at `places`."""
    if added is None:
        return earlier
    filled = np.full((tokens, *added.shape[1:]), -1, added.dtype)
    if earlier is not None:
        filled[: len(earlier)] = earlier
    at = np.array(places[: len(added)])
    is_new = filled[at, 0, 0] < 0
    filled[at[is_new]] = added[: len(at)][is_new]
    return filled


def trained(completion: Completion) -> tuple[list[int], list[float]]:
    """Which tokens of an answer are trained (mask 1), and with which log-probability.

    Under a grammar the model samples from q(t) = p(t) / Z over the tokens that are allowed, where Z
    is the probability that p gives to all of these. Training computes p. A token is trained where
    the model was free, Z >= FREE_SHARE; its log-probability is then log q + log Z = log p, exactly
    as training computes it. Where the grammar decided, the gradient of log q is not that of log p
    (of a forced token it is 0), so the token is context: docs/agents.md has the sources."""
    size = len(completion.token_ids)
    if not completion.has_grammar:
        return [1] * size, completion.logprobs
    if completion.allowed is None:
        return [0] * size, [0.0] * size
    mask: list[int] = []
    logprobs: list[float] = []
    for logprob, share in zip(completion.logprobs, completion.allowed, strict=True):
        is_free = share >= math.log(FREE_SHARE)
        mask.append(int(is_free))
        logprobs.append(logprob + share if is_free else 0.0)
    return mask, logprobs


def _unsupported(what: str, fix: str, **values: Any) -> FlashError:
    return FlashError("template_unsupported", what, fix=fix, **values)


def unlike_template(ours: str, whole: str) -> FlashError:
    """That tokens are not those of the template, with the texts from where they differ."""
    pairs = enumerate(zip(ours, whole, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(ours), len(whole)))
    start = max(0, at - 60)
    what = (
        f"the model would be shown {ours[start : at + 140]!r}, but the chat template writes the "
        f"row as {whole[start : at + 140]!r}"
    )
    fix = "set `thinking` as the row has it (true if it holds thoughts), or change the row"
    return FlashError("dataset_invalid", what, fix=fix)


def _no_tools(what: str) -> FlashError:
    fix = "use a model whose template knows tools, or a ChatML one, which gets ours"
    return FlashError("tools_unsupported", what, fix=fix)


def _without_think(text: str) -> str:
    return text.replace(EMPTY_THINK, "").replace("<think>\n", "")
