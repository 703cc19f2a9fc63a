import asyncio
from typing import Annotated

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient


def get_weather(location: Annotated[str, "The location"]) -> str:
    """Get the weather."""
    return f"Sunny in {location}"


async def main():
    agent = Agent(client=OpenAIChatClient(model="gpt-4o"), instructions="You help.", tools=[get_weather])
    print(await agent.run("What is the weather in Paris?"))


asyncio.run(main())
