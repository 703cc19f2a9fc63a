from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def get_weather(location: str) -> str:
    """Get the weather in the next days at given location.

    Args:
        location: the location
    """
    return "The weather is UNGODLY with torrential rains and temperatures below -10°C"


agent = ToolCallingAgent(tools=[get_weather], model=OpenAIModel(model_id="gpt-4o"))
print(agent.run("What's the weather like in Paris?"))
