import asyncio

from agents import Agent, ModelSettings, Runner, function_tool


@function_tool
def get_weather(city: str) -> str:
    """Returns weather info for the specified city."""
    return f"The weather in {city} is sunny"


agent = Agent(
    name="Weather Agent",
    instructions="Retrieve weather details.",
    tools=[get_weather],
    tool_use_behavior="stop_on_first_tool",
    model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False),
)
result = asyncio.run(Runner.run(agent, "What's the weather in Tokyo?"))
assert "sunny" in result.final_output
print(result.final_output)
