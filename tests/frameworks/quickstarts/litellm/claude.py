import asyncio

from litellm import acompletion, completion

messages = [{"role": "user", "content": "Hello, how are you?"}]
print(completion(model="anthropic/claude-sonnet-4-5", messages=messages).choices[0].message.content)


async def main():
    response = await acompletion(model="anthropic/claude-sonnet-4-5", messages=messages, stream=True, max_tokens=50)
    async for chunk in response:
        print(chunk.choices[0].delta.content or "", end="")


asyncio.run(main())
