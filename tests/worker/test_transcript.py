from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from flash_mcp.protocol.errors import FlashError
from tests.tiny import CHATML, make_tokenizer
from worker.model_files import ModelFiles
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.rollouts.turns import Completion
from worker.training.packing import paths_of

# adds an empty think block to the prompt and drops it from history, as Qwen3's own template does
QWEN3 = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>\u2063"), min_size=1, max_size=12)


def tokenizer(template: str | None = CHATML) -> Any:
    made = make_tokenizer()
    made.chat_template = template
    return made


def answer(template: ChatTemplate, text: str, *, ended: bool = True) -> Completion:
    ids = template.tokenizer.encode(text + ("<|im_end|>" if ended else ""), add_special_tokens=False)
    return Completion(ids, [-0.5] * len(ids), "stop" if ended else "length")


@settings(max_examples=40)
@given(st.lists(st.tuples(TEXT, st.booleans(), TEXT), min_size=1, max_size=4), TEXT)
def test_a_conversation_built_from_pieces_reads_as_the_template_renders_it(turns: list[Any], question: str) -> None:
    template = ChatTemplate(tokenizer())
    transcript = Transcript(template, [{"role": "user", "content": question}])
    for text, ended, reply in turns:
        assert transcript.add_answer(answer(template, text, ended=ended)).content == text
        transcript.add_environment([{"role": "user", "content": reply}])
    whole = template.tokenizer.apply_chat_template(transcript.messages, tokenize=False, add_generation_prompt=True)
    assert template.tokenizer.decode(transcript.ids) == whole


def test_only_the_models_own_tokens_are_trained_and_keep_their_log_probabilities() -> None:
    template = ChatTemplate(tokenizer())
    transcript = Transcript(template, [{"role": "user", "content": "?"}])
    transcript.add_answer(answer(template, "one"))
    transcript.add_environment([{"role": "user", "content": "go on"}])
    transcript.add_answer(answer(template, "two", ended=False))
    trained = [token for token, mine in zip(transcript.completion_ids, transcript.mask, strict=True) if mine]
    assert template.tokenizer.decode(trained) == "one<|im_end|>two"
    assert [value != 0.0 for value in transcript.logprobs] == [bool(mine) for mine in transcript.mask]
    assert transcript.truncated and transcript.model_tokens == len(trained)


def test_a_template_that_drops_the_empty_think_block_from_history_stays_aligned() -> None:
    template = ChatTemplate(tokenizer(QWEN3))
    transcript = Transcript(template, [{"role": "user", "content": "?"}])
    transcript.add_answer(answer(template, "one"))
    transcript.add_environment([{"role": "user", "content": "more"}])
    text = template.tokenizer.decode(transcript.ids)
    assert text.count("<think>") == 2 and text.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_8"])
def test_each_turn_sees_the_history_that_a_deployment_shows(name: str, thinking: bool) -> None:
    """Without earlier thoughts and empty blocks; each token is trained once, as it was sampled."""
    template = ChatTemplate(tokenizer((TEMPLATES / f"{name}.jinja").read_text()), thinking=thinking)
    transcript = Transcript(template, [{"role": "user", "content": "?"}])
    said, served = "", [{"role": "user", "content": "?"}]
    for turn in range(3):
        assert template.tokenizer.decode(transcript.context) == template.tokenizer.apply_chat_template(
            served, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        opened = "" if template._opens_thinking else "<think>\n"
        text = f"{opened}Hm {turn}.\n</think>\n\n{turn}" if thinking else f"{turn}"
        transcript.add_answer(answer(template, text))
        said += f"{text}<|im_end|>"
        served.append({"role": "assistant", "content": f"{turn}"} | {"reasoning_content": f"Hm {turn}." * thinking})
        if turn < 2:
            transcript.add_environment([{"role": "user", "content": "more"}])
            served.append({"role": "user", "content": "more"})
    ids = transcript.ids
    assert [ids[place] for place in next(paths_of(len(ids), transcript.forks))] == transcript.context
    trained = [token for token, mine in zip(transcript.completion_ids, transcript.mask, strict=True) if mine]
    assert template.tokenizer.decode(trained) == said and bool(transcript.forks) == (name != "qwen3_8")


def test_long_replies_are_not_kept_for_good() -> None:
    template = ChatTemplate(tokenizer(CHATML))
    before = len(template._glue)
    long, short = ([{"role": "user", "content": "word " * count}] for count in (5000, 5))
    for _ in range(2):
        assert len(template.glue_ids(long, ended=False)) > 5000 and template.glue_ids(short, ended=False)
    assert len(template._glue) == before + 1


def test_a_template_whose_answers_begin_in_an_open_think_block_is_followed() -> None:
    """As that of Qwen3-4B-Thinking-2507."""
    opened = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert opened != CHATML
    template = ChatTemplate(tokenizer(opened), thinking=True)
    transcript = Transcript(template, [{"role": "user", "content": "?"}])
    transcript.add_answer(answer(template, "so </think> one"))
    transcript.add_environment([{"role": "user", "content": "more"}])
    text = template.tokenizer.decode(transcript.ids)
    assert text.count("<think>\n") == 2 and "<think>\nso </think> one<|im_end|>" in text


@pytest.mark.parametrize(
    "template",
    [
        None, "{% for message in messages %}{{ message['content'] }}{% endfor %}",
        "{% for message in messages %}{{ message['role'] }}<|im_end|>{% endfor %}",
        CHATML.replace("message['content']", "message['content'] | upper"), "{{ raise_exception('no') }}",
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_followed_is_refused_before_the_first_step(template: str | None) -> None:
    with pytest.raises(FlashError, match="template_unsupported"):
        ChatTemplate(tokenizer(template))


def test_a_turn_may_end_with_a_token_that_only_the_generation_config_names(tmp_path: Path) -> None:
    template = CHATML.replace("<|im_end|>", "^")
    with pytest.raises(FlashError, match="does not end a turn with a token that ends generation"):
        ChatTemplate(tokenizer(template))
    marker = tokenizer().convert_tokens_to_ids("^")
    LlamaConfig().save_pretrained(tmp_path)
    assert ModelFiles(tmp_path).end_ids == []
    GenerationConfig(eos_token_id=[1, marker]).save_pretrained(tmp_path)
    taken = ChatTemplate(tokenizer(template), end_ids=ModelFiles(tmp_path).end_ids)
    assert taken.answer("yes").token_ids[-1] == marker


def test_the_tiny_models_saved_template_is_supported(tiny_model: Path) -> None:
    assert ChatTemplate(AutoTokenizer.from_pretrained(tiny_model)).end_ids
