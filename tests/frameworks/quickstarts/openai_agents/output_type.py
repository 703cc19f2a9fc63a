import asyncio

from agents import Agent, Runner
from pydantic import BaseModel


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


agent = Agent(name="Calendar extractor", instructions="Extract calendar events from text", output_type=CalendarEvent)


async def main():
    result = await Runner.run(agent, "Alice and Bob meet on Friday for a science fair.")
    assert isinstance(result.final_output, CalendarEvent)
    print(result.final_output)


asyncio.run(main())
