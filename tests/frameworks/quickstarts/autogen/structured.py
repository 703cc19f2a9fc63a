import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel


class Answer(BaseModel):
    thoughts: str
    number: int


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4o-mini")
    agent = AssistantAgent("a", model_client=client, output_content_type=Answer)
    result = await agent.run(task="How many?")
    assert isinstance(result.messages[-1].content, Answer)
    print(result.messages[-1].content)


asyncio.run(main())
