"""Bad and good environments for the gate: those of gate_suite.txt, on the classes of tests.folders and those below.

`# bad: CHECK` begins those that the check refuses, `# good` those that pass, `- NAME` one environment. It is Python,
but that `Base.method: VALUE`, or `Base.method:` and a body, begins its class, and `.method` and `.NAME = VALUE` go on
with it. A method has the parameters of PARAMETERS if it names no others."""

import re
from pathlib import Path

ROWS = '''
class Rows(Addition):
    """The first half of `rows()` is the train split, the second half the eval split."""
    def __init__(self):
        examples = [
            TaskExample({}, question, id=f"t{n}", output=answer) for n, (question, answer) in enumerate(self.rows())
        ]
        half = len(examples) // 2
        self.dataset, self.eval_dataset = examples[:half], examples[half:]
    def rows(self):
        return [(f"Add {n} and {n + 1}.", str(2 * n + 1)) for n in range(40, 60)]
    def score_response(self, example, text):
        success = bool(self.right(text or "", example))
        return RewardResult(float(success), success=success)
    def right(self, text, example):
        return text.strip() == example.output
WORDS = "apple bread cloud dream eagle flame grape house image jewel knife lemon music night ocean paper".split()
class Capitals(Rows):
    def rows(self):
        return [(f"Name the capital of country {n}.", f"{word.title()}ville") for n, word in enumerate(WORDS)]
class Dates(Rows):
    def rows(self):
        return [(f"What day follows day {n} of March 2021?", f"2021-03-{n + 1:02}") for n in range(1, 21)]
class Lists(Rows):
    def rows(self):
        return [(f"List the three numbers after {n}.", f"[{n + 1}, {n + 2}, {n + 3}]") for n in range(40, 60)]
class Sorting(Rows):
    def rows(self):
        triples = [sorted((WORDS[n], WORDS[(n + 5) % 16], WORDS[(n + 9) % 16])) for n in range(16)]
        return [(f"Sort these words: {' '.join(reversed(words))}", " ".join(words)) for words in triples]
class Choices(Rows):
    def rows(self):
        return [
            (f"Add {n} and 2. A) {m} B) {m + 1} C) {m + 2} D) {m + 3}", "ABCD"[n % 4])
            for n in range(24)
            for m in [n + 2 - n % 4]
        ]
class YesNo(Rows):
    def rows(self):
        return [(f"Is {n} a multiple of 3, plus {n}?", "yes" if n * 7 % 5 < 2 else "no") for n in range(30)]
class Objects(Rows):
    def rows(self):
        import json
        return [
            (f"Give name and age of person {n} as JSON.", json.dumps({"name": WORDS[n], "age": 20 + n}))
            for n in range(16)
        ]
class Functions(Rows):
    def rows(self):
        return [
            (f"Write a Python function f(x) that adds {n}.", f"def f(x):\\n    return x + {n}") for n in range(3, 19)
        ]
class Essays(Rows):
    def rows(self):
        def story(n):
            return " ".join(f"{WORDS[(n * 5 + k * k) % 16]} {WORDS[(n + 3 * k) % 16]}" for k in range(12))
        return [(f"Describe story {n}.", story(n)) for n in range(16)]
class Hinted(Rows):
    """Its prompts end with a hint."""
    def build_prompt_messages(self, example):
        return [{"role": "user", "content": f"{example.input} {self.hint(example)}"}]
class Dialogue(Rows, EnvironmentMultiTurn):
    """A conversation of at most three model turns, which the right answer ends."""
    def start_episode(self, example):
        return [{"role": "user", "content": example.input}]
    def max_episode_turns(self, example):
        return 3
    def step_episode(self, example, messages, assistant_response):
        done = self.right(assistant_response or "", example)
        return EnvironmentStepResult(done=done, messages=[{"role": "user", "content": "Thank you. Once more, please."}])
    def score_episode(self, example, episode):
        return self.score_response(example, episode.response_text)
'''
PARAMETERS = {
    **dict.fromkeys(("__init__", "rows"), "self"),
    **dict.fromkeys(("right", "pay"), "self, text, example"),
    "pay_for": "self, calls, example",
    "score_response": "self, example, text",
    "score_episode": "self, example, episode",
    "score_group": "self, example, episodes",
    "step_episode": "self, example, messages, assistant_response",
}
"""Of the other methods: self, example."""
BEGINS = re.compile(r"([A-Z][A-Za-z]*(?:, [A-Z][A-Za-z]*)*)?(?:\.(\w+)(\(.*?\)(?: -> \w+)?)?: ?(.*)|\.(\w+ = .*))?")
"""The bases; a method, its parameters and its value; or an attribute."""


def suite(file: str, name: str) -> dict[str, dict[str, str]]:
    """{heading: {title: source of the class `name`}}. Without titles each class is a case."""
    found: dict[str, dict[str, str]] = {}
    within = ""
    for line in Path(__file__).with_name(file).read_text().splitlines():
        begun = BEGINS.fullmatch(line)
        if line.startswith("# "):
            cases = found[line[2:]] = {}
            has_class = True
        elif line.startswith("-"):
            title = line[2:] or str(len(cases))
            cases[title], has_class = "", False
        elif begun is None:
            within = within if line[:1] in " )" else ""
            cases[title] += f"{within}{line}\n"
        else:
            bases, method, parameters, value, attribute = begun.groups()
            within = "    "
            if bases:
                if has_class:
                    title = str(len(cases))
                cases[title], has_class = cases.get(title, "") + f"class {name}({bases}):\n", True
            if method:
                parameters = parameters or f"({PARAMETERS.get(method, 'self, example')})"
                cases[title] += f"    def {method}{parameters}:\n" + (f"        return {value}\n" if value else "")
            else:
                cases[title] += f"    {attribute or 'pass'}\n"
    return found


SUITE = suite("gate_suite.txt", "Sample")
GOOD, MISSED = SUITE.pop("good"), SUITE.pop("missed")
"""What no check finds is missed: tasks that ask for an estimate allow it."""
BAD = {heading.removeprefix("bad: "): cases for heading, cases in SUITE.items()}
