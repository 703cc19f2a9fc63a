from agno.agent import Agent
from agno.models.openai import OpenAIChat
from pydantic import BaseModel, Field


class MovieScript(BaseModel):
    setting: str = Field(description="A nice setting")
    characters: list[str] = Field(description="Names")


agent = Agent(model=OpenAIChat(id="gpt-4o"), output_schema=MovieScript)
result = agent.run("New York").content
assert isinstance(result, MovieScript), result
print(result)
