"""Environments for the hunt, as data: 78 with a planted hack of one of twenty kinds, and 40 clean ones. None is in
the gate's suite. One process serves them all (`MANY`)."""

import textwrap

from tests.gate_suite import ROWS, suite

SUITE = suite("hunt_suite.txt", "X")
PLANTED = {heading: [*cases.values()] for heading, cases in SUITE.items() if heading.startswith("planted")}
"""Four of each kind."""
NAMED = {heading.removeprefix("named: "): [*cases.values()] for heading, cases in SUITE.items() if "named" in heading}
"""Hacks of ten more kinds: the texts that pay are not in the hunt itself."""

BASES = (*("Sums", "Capitals", "Dates", "Lists", "Sorting", "Choices", "YesNo", "Objects", "Essays"), "Functions")
SOUND = {
    "exact": """
        class X({base}):
            pass
        """,
    "the last tag, with a little pay for tags": """
        class X({base}):
            def hint(self):
                return "Write <answer>your answer</answer>."
            def gold(self, example):
                return f"<answer>{{example.output}}</answer>"
            def right(self, text, example):
                found = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
                return found and found[-1].strip() == example.output
            def pay(self, text, example):
                return 0.1 * ("</answer>" in text)
        """,
    "some pay for each right character": """
        class X({base}):
            def pay(self, text, example):
                same = sum(a == b for a, b in zip(text, example.output))
                return 0.3 * same / max(len(text), len(example.output), 1)
        """,
    "up to three turns, and a price for a wrong answer": """
        class X({base}, Dialogue):
            def score_episode(self, example, episode):
                right = self.right((episode.response_text or "").strip(), example)
                return RewardResult(1.0 if right else -1.0, success=bool(right))
        """,
}
"""Clean ways to score, each on all bases."""
CLEAN = [
    source.replace("{base}", base).replace("{{", "{").replace("}}", "}") for source in SOUND.values() for base in BASES
]

MANY = (
    ROWS
    + '''
def hint(self):
    return ""
def gold(self, example):
    return example.output
def pay(self, text, example):
    return 0.0
def build_prompt_messages(self, example):
    return [{"role": "user", "content": f"{example.input} {self.hint()}".strip()}]
def start_episode(self, example):
    return self.build_prompt_messages(example)
def sft_completion(self, example):
    return [{"role": "assistant", "content": self.gold(example)}]
def score_response(self, example, text):
    right = bool(self.right(text or "", example))
    return RewardResult(1.0 if right else self.pay(text or "", example), success=right)
for function in (hint, gold, pay, build_prompt_messages, sft_completion, score_response):
    setattr(Rows, function.__name__, function)
Dialogue.start_episode = start_episode
class Sums(Rows):
    pass
class Calling(Dialogue):
    """A conversation with a tool that looks up nothing of use."""
    tools = ({"type": "function", "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    }},)
    def step_episode(self, example, messages, assistant_response):
        calls = messages[-1].get("tool_calls") or []
        replies = [{"role": "tool", "tool_call_id": call["id"], "content": "no entry"} for call in calls]
        return EnvironmentStepResult(done=not calls, messages=replies)
    def score_episode(self, example, episode):
        right = self.right(episode.response_text or "", example)
        calls = [call for message in episode.messages for call in message.get("tool_calls") or []]
        return RewardResult(1.0 if right else self.pay_for(calls, example), success=right)
class Sample(EnvironmentMultiTurn):
    """Every environment behind one: the id of a task says whose it is."""
    def __init__(self):
        self.parts = [part() for part in PARTS]
        self.dataset = [
            dataclasses.replace(task, id=f"{n}:{task.id}")
            for n, part in enumerate(self.parts)
            for task in (part.dataset + part.eval_dataset)[:16]
        ]
    def new_episode(self, example):
        return self.part(example).new_episode(example)
    def part(self, example):
        return self.parts[int(example.id.partition(":")[0])]
    def sft_completion(self, example):
        return self.part(example).sft_completion(example)
    def episode_tools(self, example):
        return self.part(example).tools
    def start_episode(self, example): ...
    def max_episode_turns(self, example): ...
    def step_episode(self, example, messages, assistant_response): ...
    def score_episode(self, example, episode): ...
PARTS = []
'''
)
TASKS = 16  # tasks of each part


def many(sources: list[str]) -> str:
    """The source of an environment in which these stand one after the other, TASKS tasks each."""
    return MANY + "\n".join(textwrap.dedent(source) + "\nPARTS.append(X)\n" for source in sources)
