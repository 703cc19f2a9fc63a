"""An agent that answers arithmetic questions with a tool, through any OpenAI-compatible API. It
knows nothing of training.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python agent.py "What is 12 * 7?" MODEL
"""

import json
import operator
import sys
from typing import Any

from openai import OpenAI

INSTRUCTIONS = "Calculate with the tool. Then answer with the number alone."
MOST_CALLS = 3
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUMBER = {"type": "integer"}
PARAMETERS = {"left": NUMBER, "operator": {"enum": list(OPERATORS)}, "right": NUMBER}
SCHEMA = {"type": "object", "properties": PARAMETERS, "required": list(PARAMETERS)}
TOOLS: Any = [{"type": "function", "function": {"name": "calculate", "parameters": SCHEMA}}]


EXAMPLE_CALL = {"name": "calculate", "arguments": '{"left": 3, "operator": "+", "right": 4}'}
EXAMPLE = [
    {"role": "user", "content": "What is 3 + 4?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": EXAMPLE_CALL}],
    },
    {"role": "tool", "tool_call_id": "call00000", "content": "7"},
    {"role": "assistant", "content": "7"},
]
"""A small model imitates turns far better than it follows a description."""


def calculate(arguments: str) -> str:
    """What the tool answers to a call with these arguments, which a model wrote."""
    try:
        given = json.loads(arguments)
        return str(OPERATORS[given["operator"]](int(given["left"]), int(given["right"])))
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        return f"error: {error}"


def solve(question: str, client: OpenAI, model: str) -> str:
    """The model's answer to the question; "" if it only calls the tool."""
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        *EXAMPLE,
        {"role": "user", "content": question},
    ]
    for _ in range(MOST_CALLS):
        answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message: Any = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    sys.stdout.write(solve(sys.argv[1], OpenAI(), sys.argv[2]) + "\n")
