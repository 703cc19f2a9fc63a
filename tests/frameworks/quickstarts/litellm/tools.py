import json

from litellm import completion

tools = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
        },
    }
]
messages = [{"role": "user", "content": "What's the weather like in San Francisco?"}]
first = completion(model="gpt-4o", messages=messages, tools=tools, tool_choice="auto")
message = first.choices[0].message
call = message.tool_calls[0]
messages.append(message)
location = json.loads(call.function.arguments)["location"]
messages.append({"tool_call_id": call.id, "role": "tool", "content": f"10 degrees in {location}"})
print(completion(model="gpt-4o", messages=messages, tools=tools).choices[0].message.content)
