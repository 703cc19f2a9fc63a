import asyncio

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types


def get_weather(city: str) -> dict:
    """Retrieves the current weather report for a specified city."""
    return {"status": "success", "report": f"Sunny in {city}"}


root_agent = Agent(
    name="weather_agent",
    model=LiteLlm(model="openai/gpt-4o"),
    description="Answers about the weather.",
    instruction="You are a helpful agent.",
    tools=[get_weather],
)


async def main() -> None:
    service = InMemorySessionService()
    session = await service.create_session(app_name="app", user_id="u", session_id="s")
    runner = Runner(agent=root_agent, app_name="app", session_service=service)
    content = types.Content(role="user", parts=[types.Part(text="What is the weather in Paris?")])
    last = None
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=content):
        if event.is_final_response():
            last = event.content.parts[0].text
    assert last
    print(last)


asyncio.run(main())
