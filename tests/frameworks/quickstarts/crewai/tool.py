from crewai import Agent, Crew, Task
from crewai.tools import tool


@tool("Get weather")
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}"


agent = Agent(
    role="Weather man",
    goal="Know the weather",
    backstory="You ask your tools.",
    tools=[get_weather],
    llm="openai/gpt-4o-mini",
)
task = Task(description="What is the weather in Paris?", expected_output="One sentence.", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff())
