"""The one notion of the same task, and the template of a prompt."""

import pytest

from environments.same_task import SameTasks, TaskTexts, kind_of, same_tasks, task_of, template_of

PEARS = "Ada buys 3 crates of 12 pears in Oslo. How many pears?"
GERMAN = "Translate the following word into German and answer with one word in tags: "


@pytest.mark.parametrize(
    "text",
    [
        PEARS, "  " + PEARS.upper(), PEARS.replace("?", " ?"), PEARS.rstrip("?"), PEARS.replace("buys", "bought"),
        "Hello! " + PEARS,
    ],
)  # fmt: skip
@pytest.mark.parametrize("system", ["", "Answer with a number.", "You are helpful."])
def test_a_task_is_known_in_other_words_and_under_another_system_message(text: str, system: str) -> None:
    known = SameTasks([TaskTexts(PEARS, "36", "Answer with a number.")])
    assert known.find(TaskTexts(text, None, system)) == [0]


@pytest.mark.parametrize(
    "text", [PEARS.replace("12", "13"), "What is 4 - 3?", "How many pears has Ben in Rome?", PEARS.replace("3", "-3")]
)
def test_another_task_is_not_taken_for_it(text: str) -> None:
    assert SameTasks([TaskTexts(PEARS), TaskTexts("What is 3 - 4?")]).find(TaskTexts(text)) == []


def test_a_long_instruction_does_not_make_tasks_the_same() -> None:
    nouns = ["house", "horse", "mouse", "tree", "river", "cat", "dog", "bird", "road", "lamp"]
    known = SameTasks([TaskTexts(GERMAN + noun) for noun in nouns])
    assert [len(group) for group in known.groups().groups] == [1] * 10
    assert known.find(TaskTexts(GERMAN + "lake")) == []
    assert known.find(TaskTexts("Please t" + GERMAN[1:] + "horse")) == [1]


def test_the_gold_answer_tells_tasks_apart_where_both_are_known() -> None:
    tasks = [
        TaskTexts("Name the colour.", "red"),
        TaskTexts("name the colour", " RED "),
        TaskTexts("Name the colour!", "blue"),
    ]
    assert same_tasks(tasks).groups == [[0, 1], [2]]


def test_what_a_system_message_asks_counts_where_the_turns_are_the_same() -> None:
    def shop(order: str) -> TaskTexts:
        turns = [{"role": "system", "content": f"The customer wants {order}."}, {"role": "user", "content": "Done."}]
        return task_of(turns, "ok")

    orders = [shop(order) for order in ("a red chair", "two lamps", "his money back")]
    assert same_tasks(orders).groups == [[0], [1], [2]] and SameTasks(orders).find(shop("two lamps!")) == [1]
    assert SameTasks(orders).find(shop("a new bed")) == []


def test_tool_calls_and_results_that_the_model_sees_are_compared() -> None:
    def asked(city: str) -> TaskTexts:
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        return task_of(
            [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "rain"},
            ]
        )

    assert same_tasks([asked("Oslo"), asked("Rome"), asked("oslo")]).groups == [[0, 2], [1]]


def test_what_is_alike_to_many_is_the_form_of_all() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    tasks = [TaskTexts(f"the same ten words of text in each of these {one}", "yes") for one in letters]
    assert len(same_tasks(tasks).groups) == 26 and len(same_tasks([*tasks[:5], *tasks[:5]]).groups) == 5


def test_tasks_that_differ_in_what_fills_one_place_are_not_the_same() -> None:
    form = "The {} that I ordered last week has still not arrived at my house, where is it now?"
    other = "I want my money back for it because it stopped working after only two days of use."
    tasks = [
        *(TaskTexts(form.format(noun), "late") for noun in ("lamp", "coffee machine", "house")),
        TaskTexts(other, "refund"),
    ]
    assert [len(group) for group in same_tasks(tasks).groups] == [1] * 4
    assert [len(group) for group in same_tasks([tasks[0], *tasks[2:]]).groups] == [2, 1]


def test_tasks_in_other_words_are_told_from_copies() -> None:
    same = same_tasks(
        [
            TaskTexts("Add 3 to 4, please now."),
            TaskTexts("add 3 to 4 please now"),
            TaskTexts("Hi, add 3 to 4, please now!"),
        ]
    )
    assert (same.groups, same.reworded, same.is_whole) == ([[0, 1, 2]], {2}, True)


def test_all_pairs_of_many_tasks_are_compared() -> None:
    tasks = [TaskTexts(f"Shop {n % 97} sells {n} pears of kind {n % 89} for {n * 7} coins today") for n in range(5000)]
    tasks += [TaskTexts("Hello, " + task.text) for task in tasks[:500]]
    same = same_tasks(tasks)
    assert (len(same.groups), same.is_whole) == (5000, True)


@pytest.mark.parametrize(
    ("prompt", "template"),
    [
        (PEARS, "NAME buys 0 crates of 0 pears in NAME how many pears"),
        (
            "Ben buys 40 crates of 1,200 pears in New York. How many pears?",
            "NAME buys 0 crates of 0 pears in NAME how many pears",
        ),
        ("What is 3 + 4.5?", "what is 0 + 0"),
        ("Please ask Mr. Hall.", "please ask NAME"),
        ("WHERE IS MY ORDER 12?", "where is my order 0"),
        ("How may I help?", "how may i help"),
    ],
)
def test_a_template_is_the_prompt_without_numbers_and_names(prompt: str, template: str) -> None:
    assert template_of(prompt) == template


def test_a_kind_is_the_declared_group_or_the_form_of_what_is_asked_last() -> None:
    def kind(asked: str, shown: str, group: str | None = None) -> str:
        return kind_of([{"role": "user", "content": shown}, {"role": "user", "content": asked}], group)

    assert kind("What is 3 + 4?", "2 + 2 = 4") == kind("What is 9 + 1?", "8 - 1 = 7") != kind("What is 9 - 1?", "")
    assert kind("What is 3 + 4?", "", "sums") == "sums"
