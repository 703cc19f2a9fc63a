from agno.agent import Agent
from agno.models.openai import OpenAIResponses


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}"


agent = Agent(model=OpenAIResponses(id="gpt-5-mini"), tools=[get_weather])
print(agent.run("Weather in Paris?").content)
