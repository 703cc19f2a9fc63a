import operator
from typing import Annotated

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

llm = ChatOpenAI(model="gpt-4o-mini")


class State(TypedDict):
    subjects: list[str]
    jokes: Annotated[list, operator.add]
    best: str


def joke(state):
    return {"jokes": [llm.invoke(f"A joke about {state['subject']}").content]}


def choose(state: State):
    return {"best": llm.invoke("Which is the best?\n" + "\n".join(state["jokes"])).content}


graph = StateGraph(State)
graph.add_node("joke", joke)
graph.add_node("choose", choose)
graph.add_conditional_edges(START, lambda state: [Send("joke", {"subject": s}) for s in state["subjects"]], ["joke"])
graph.add_edge("joke", "choose")
graph.add_edge("choose", END)
result = graph.compile().invoke({"subjects": ["lions", "elephants", "penguins"]})
assert len(result["jokes"]) == 3
print(result["best"])
