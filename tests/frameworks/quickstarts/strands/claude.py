from strands import Agent, tool
from strands.models.anthropic import AnthropicModel


@tool
def square(number: int) -> int:
    """The square of a number.

    Args:
        number: the number
    """
    return number * number


model = AnthropicModel(model_id="claude-sonnet-4-5", max_tokens=300)
print(Agent(model=model, tools=[square])("What is 12 squared?"))
