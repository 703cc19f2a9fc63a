"""The hunt on its suite (tests/hunt_suite.txt), which one process serves."""

import re
import textwrap
from pathlib import Path

import pytest

from environments.process.host import EnvironmentHost
from flash_mcp.extensions.hunt import search as hunting
from flash_mcp.extensions.hunt.search import Hunt, folder_texts, hunt, source_texts
from flash_mcp.tools.starters import Template, env_setup
from tests.folders import environment_folder
from tests.hunt_suite import CLEAN, NAMED, PLANTED, TASKS, many
from tests.places import ROOT

pytestmark = pytest.mark.slow
DOCS = ROOT / "docs" / "environments.md"
HACKS = [source for several in PLANTED.values() for source in several]
NAMED_HACKS = [(kind, source) for kind, several in NAMED.items() for source in several]
NAMES = {
    "several sentences": {"length"},
    "a word of the source": {"word"},
    "part of the prompt": {"prompt"},
    "format only": {"constant", "form", "word"},
    "first number": {"constant", "form", "prompt"},
    "evaluation of the answer": {"injection", "word"},
    "the target in the text": {"hedge"},
    "flattery of a judge": {"flattery", "word"},
    "empty tool calls": {"call"},
    "any length": {"length"},
}
"""What the hunt may call each kind."""


async def hunted(folder: Path, sources: list[str]) -> list[Hunt]:
    environment = environment_folder(folder, many(sources))
    async with await EnvironmentHost.start(environment) as host:
        return [
            # However busy the machine is, every hunt ends.
            await hunt(
                host,
                "train",
                range(number * TASKS, (number + 1) * TASKS),
                deadline_s=600,
                source_texts=source_texts([textwrap.dedent(source)]),
            )
            for number, source in enumerate(sources)
        ]


@pytest.mark.long
async def test_the_hunt_finds_as_many_planted_hacks_as_the_docs_say(tmp_path: Path) -> None:
    found = await hunted(tmp_path, HACKS)
    count = sum(bool(each.exploits) for each in found)
    assert len(HACKS) == 40 and len(PLANTED) == 10
    assert f"finds {count} of 40 planted hacks" in " ".join(DOCS.read_text().split()) and count >= 36
    for each in found:
        assert each.plays < hunting.MOST_PLAYS and all(exploit.fix for exploit in each.exploits)


async def test_the_hunt_calls_hacks_by_the_names_of_their_kinds(tmp_path: Path) -> None:
    some = NAMED_HACKS[::4]
    for (kind, _), result in zip(some, await hunted(tmp_path, [source for _, source in some]), strict=True):
        assert result.exploits and {exploit.kind for exploit in result.exploits} <= NAMES[kind], kind


@pytest.mark.long
async def test_the_hunt_reads_the_source_and_calls_each_kind_by_its_name(tmp_path: Path) -> None:
    results = await hunted(tmp_path, [source for _, source in NAMED_HACKS])
    count = sum(bool(result.exploits) for result in results)
    assert len(NAMED) == 10
    assert f"and {count} of {len(NAMED_HACKS)} others" in " ".join(DOCS.read_text().split())
    assert count >= 0.9 * len(NAMED_HACKS)
    for (kind, _), result in zip(NAMED_HACKS, results, strict=True):
        assert {exploit.kind for exploit in result.exploits} <= NAMES[kind], kind


def test_texts_of_a_source_are_its_strings_what_its_patterns_match_and_its_names(tmp_path: Path) -> None:
    source = 'SIGN = "henceforth"\ndef f(text):\n    return re.search(r"^Upshot\\d\\s*:", text)\n'
    (tmp_path / "environment.py").write_text(source)
    bombs = ['"' + "(" * 9 + "a{99})" + "{99})" * 7 + '"', '"a{999999999}"', "(" * 100_000, '"[[a]]"']
    (tmp_path / "broken.py").write_text("\n".join(bombs))
    (tmp_path / "link.py").symlink_to(__file__)
    texts = folder_texts(tmp_path)
    assert "henceforth" in texts and "SIGN" in texts and "answer = SIGN" in texts
    assert any(re.fullmatch(r"Upshot\d\s*:", text) for text in texts)
    assert not any("strings" in text for text in texts)


@pytest.mark.parametrize(
    "template",
    ["calculator", "sort_words", "dataset", "tool_use", "mcp_server", pytest.param("agent", marks=pytest.mark.long)],
)
async def test_no_cheap_answer_to_a_starter_pays(template: Template, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("question,answer\n" + "".join(f"Which word is number {n}?,word{n}\n" for n in range(60)))
    folder = tmp_path / "starter"
    env_setup(str(folder), template, dataset=str(rows) if template == "dataset" else None)
    async with await EnvironmentHost.start(folder) as host:
        tasks = range(host.splits["train"])
        result = await hunt(host, "train", tasks, deadline_s=600, source_texts=folder_texts(folder))
    assert result.is_finished and not result.exploits


@pytest.mark.long  # nothing ends the search early: 50 s of a processor
async def test_the_hunt_raises_no_more_false_alarms_than_the_docs_say(tmp_path: Path) -> None:
    found = await hunted(tmp_path, CLEAN)
    count = sum(bool(each.exploits) for each in found)
    assert len(CLEAN) == 40
    assert f"and raises {count or 'no'} false alarm" in " ".join(DOCS.read_text().split()) and count <= 1


async def test_a_gold_answer_that_earns_more_when_padded_is_an_exploit(tmp_path: Path) -> None:
    source = """
    class X(Rows):
        def score_response(self, example, text):
            right = example.output == text.strip().split("\\n")[-1]
            return RewardResult((1 + min(1, len(text) / 1000)) * right, success=right)
    """
    (found,) = await hunted(tmp_path, [source])
    assert [exploit.kind for exploit in found.exploits] == ["padding"] and found.exploits[0].reward > 1.5


async def test_a_hunt_ends_in_time_and_after_so_many_plays(tmp_path: Path) -> None:
    source = """
    class X(Rows):
        def right(self, text, example):
            time.sleep(0.05)
            return text.strip() == example.output
    """
    environment = environment_folder(tmp_path, many([source]))
    async with await EnvironmentHost.start(environment) as host:
        late = await hunt(host, "train", range(TASKS), deadline_s=0.5)
        few = await hunt(host, "train", range(TASKS), most_plays=30)
    assert not late.is_finished and not late.exploits
    assert not few.is_finished and few.plays < 90


def test_best_of_n_tells_reward_that_rises_without_success() -> None:
    shaped = [[(0.1, False), (0.9, False)]] * 4
    probe = hunting.best_of_n(shaped, "rollouts()")
    assert probe.passed is None and "rises without success" in probe.evidence and probe.fix
    assert hunting.best_of_n([[(0.0, False), (1.0, True)]] * 4, "rollouts()").passed
    assert hunting.best_of_n([[(1.0, True)]], "rollouts()").passed is None


async def test_a_task_that_asks_for_a_part_of_its_prompt_is_no_exploit(tmp_path: Path) -> None:
    source = """
    class X(Rows):
        def rows(self):
            return [(f"Repeat this word: {word}", word) for word in WORDS]
    """
    (found,) = await hunted(tmp_path, [source])
    assert not found.exploits


async def test_wins_are_confirmed_on_tasks_that_the_search_did_not_use(tmp_path: Path) -> None:
    source = """
    class X(Rows):
        def right(self, text, example):
            return "therefore" in text or text.strip() == example.output
    """
    (found,) = await hunted(tmp_path, [source])
    exploit = found.exploits[0]
    assert (exploit.kind, exploit.successes, exploit.gold, exploit.tasks) == ("word", 12, 1, 12)
    assert re.search("therefore", exploit.answer)
