from agno.agent import Agent
from agno.models.anthropic import Claude


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}"


agent = Agent(model=Claude(id="claude-sonnet-4-5"), tools=[get_weather])
print(agent.run("Weather in Paris?").content)
