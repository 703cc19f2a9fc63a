import random

from pydantic_ai import Agent, RunContext

agent = Agent(
    "openai-chat:gpt-5.2",
    deps_type=str,
    instructions="You're a dice game: roll the die and see if the number matches the guess.",
)


@agent.tool_plain
def roll_dice() -> str:
    """Roll a six-sided die and return the result."""
    return str(random.randint(1, 6))


@agent.tool
def get_player_name(ctx: RunContext[str]) -> str:
    """Get the player's name."""
    return ctx.deps


dice_result = agent.run_sync("My guess is 4", deps="Anne")
print(dice_result.output)
