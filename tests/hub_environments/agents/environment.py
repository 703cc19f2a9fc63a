"""A team that adds two products: a planner splits the question, two workers calculate at once, and
a merger adds what they say. Once as a program with threads, once as a graph of LangGraph.

planner   What is 12 * 7 plus 30 * 4?   12 * 7; 30 * 4
worker    12 * 7                        calc(12 * 7)
worker    30 * 4                        calc(30 * 4)
merger    84 and 120                    calc(84 + 120)
"""

import operator
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from openai import OpenAI
from typing_extensions import TypedDict

from environments import EnvironmentAgent, RewardResult, TaskExample

ROLES = {
    "planner": ("Name the two products.", [("What is 3 * 14 plus 26 * 2?", "3 * 14; 26 * 2")]),
    "worker": ("Call the calculator.", [("3 * 14", "calc(3 * 14)"), ("26 * 2", "calc(26 * 2)")]),
    "merger": ("Add with the calculator.", [("42 and 52", "calc(42 + 52)")]),
}
"""What each is told, and examples: a small model imitates turns."""
OPERATORS = {"+": operator.add, "*": operator.mul}
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")


def prompt(role, text):
    about, examples = ROLES[role]
    messages = [{"role": "system", "content": about}]
    for question, answer in examples:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": text}]


def parts_of(plan):
    """The two products that a plan names; none if it names others than two."""
    parts = [part.strip() for part in plan.split(";")]
    return parts if len(parts) == 2 and all(parts) else []


def calculated(text):
    """What the calculator says of a call that is all of the text."""
    call = re.fullmatch(r"calc\((\d{1,6}) ([+*]) (\d{1,6})\)", text.strip())
    return str(OPERATORS[call[2]](int(call[1]), int(call[3]))) if call else "error"


def with_threads(question, base_url, api_key):
    """(the parts, their results, the answer)"""
    create = CLIENT.with_options(base_url=base_url, api_key=api_key).chat.completions.create

    def ask(role, text):
        return create(model=role, messages=prompt(role, text)).choices[0].message.content or ""

    parts = parts_of(ask("planner", question))
    if not parts:
        return [], [], ""
    with ThreadPoolExecutor(len(parts)) as pool:
        results = list(pool.map(lambda part: calculated(ask("worker", part)), parts))
    return parts, results, calculated(ask("merger", " and ".join(results)))


class State(TypedDict):
    question: str
    parts: list
    results: Annotated[list, operator.add]
    answer: str


def _ask(config, role, text):
    return config["configurable"]["models"][role].invoke(prompt(role, text)).content


def _plan(state, config):
    return {"parts": parts_of(_ask(config, "planner", state["question"]))}


def _work(state, config):
    return {"results": [(state["number"], calculated(_ask(config, "worker", state["part"])))]}


def _merge(state, config):
    results = [result for _, result in sorted(state["results"])]
    return {"answer": calculated(_ask(config, "merger", " and ".join(results)))}


def _workers(state):
    return [Send("worker", {"number": n, "part": part}) for n, part in enumerate(state["parts"])] or END


def _graph():
    graph = StateGraph(State)
    graph.add_node("planner", _plan)
    graph.add_node("worker", _work)
    graph.add_node("merger", _merge)
    graph.add_edge(START, "planner")
    graph.add_conditional_edges("planner", _workers, ["worker", END])
    graph.add_edge("worker", "merger")
    graph.add_edge("merger", END)
    return graph.compile()


GRAPH = _graph()


def with_langgraph(question, base_url, api_key):
    models = {role: ChatOpenAI(model=role, base_url=base_url, api_key=api_key) for role in ROLES}
    ended = GRAPH.invoke({"question": question, "results": []}, {"configurable": {"models": models}})
    results = [result for _, result in sorted(ended["results"])]
    return ended["parts"], results, ended.get("answer", "")


PROGRAMS = {"roles and threads": with_threads, "LangGraph": with_langgraph}


class Team(EnvironmentAgent):
    """A quarter of the reward is for the plan, a quarter for the workers, half for the answer."""

    max_calls = 4

    def __init__(self, name):
        self._program = PROGRAMS[name]
        tasks = _tasks()
        self.dataset = tasks[:400]
        self.eval_dataset = tasks[400:]

    def run(self, example, base_url, api_key, model):
        parts, results, answer = self._program(example.input, base_url, api_key)
        products = example.record["products"]
        plan = parts == products
        worked = sum(map(operator.eq, results, example.record["results"])) / 2 if plan else 0.0
        right = answer == example.output
        return RewardResult(0.25 * plan + 0.25 * worked + 0.5 * right, success=right)

    def gold_turn(self, example, messages, number):
        text = messages[-1]["content"]
        if number == 0:
            return {"role": "assistant", "content": "; ".join(example.record["products"])}
        return {"role": "assistant", "content": f"calc({text.replace(' and ', ' + ')})"}


def _tasks():
    rng = random.Random(31)
    tasks = {}
    while len(tasks) < 500:
        pairs = [(rng.randint(2, 49), rng.randint(2, 49)) for _ in range(2)]
        products = [f"{left} * {right}" for left, right in pairs]
        results = [str(left * right) for left, right in pairs]
        question = f"What is {products[0]} plus {products[1]}?"
        record = {"products": products, "results": results}
        tasks[question] = TaskExample(record, question, output=str(sum(map(int, results))), id=question)
    return list(tasks.values())


def load_environment(name):
    return Team(name)
