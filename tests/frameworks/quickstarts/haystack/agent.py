from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}"


agent = Agent(chat_generator=OpenAIChatGenerator(model="gpt-4o-mini"), tools=[get_weather], system_prompt="Help.")
print(agent.run(messages=[ChatMessage.from_user("Weather in Paris?")])["messages"][-1].text)
