import asyncio

from pydantic_ai import Agent

agent = Agent("anthropic:claude-sonnet-4-6", instructions="Be concise.")


async def main():
    async with agent.run_stream("What is the capital of the UK?") as response:
        print(await response.get_output())


asyncio.run(main())
