from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Adds a and b."""
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies a and b."""
    return a * b


llm = ChatOpenAI(model="gpt-4o-mini")
anyone = llm.bind_tools([add, multiply]).invoke("What is 3 * 12?")
forced = llm.bind_tools([add, multiply], tool_choice="multiply").invoke("What is 3 * 12?")
assert anyone.tool_calls and forced.tool_calls[0]["name"] == "multiply"
print(anyone.tool_calls, forced.tool_calls)
