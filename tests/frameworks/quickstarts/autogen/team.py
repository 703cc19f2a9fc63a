import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4o")
    a = AssistantAgent("primary", description="writes", model_client=client)
    b = AssistantAgent("critic", description="criticises", model_client=client)
    team = RoundRobinGroupChat([a, b], termination_condition=MaxMessageTermination(4))
    result = await team.run(task="Write a short poem about the fall season.")
    assert len(result.messages) == 4


asyncio.run(main())
