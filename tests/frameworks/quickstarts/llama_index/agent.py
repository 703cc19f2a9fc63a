import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAI


def multiply(a: float, b: float) -> float:
    """Useful for multiplying two numbers."""
    return a * b


agent = FunctionAgent(tools=[multiply], llm=OpenAI(model="gpt-4o-mini"), system_prompt="You can multiply two numbers.")


async def main():
    print(str(await agent.run("What is 1234 * 4567?")))


asyncio.run(main())
