from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput


class CityLocation(BaseModel):
    city: str
    country: str


by_tool = Agent("openai-chat:gpt-5.2", output_type=CityLocation)
native = Agent("openai-chat:gpt-5.2", output_type=NativeOutput(CityLocation))
for agent in (by_tool, native):
    result = agent.run_sync("Where were the olympics held in 2012?")
    assert isinstance(result.output, CityLocation)
    print(result.output, result.usage)
