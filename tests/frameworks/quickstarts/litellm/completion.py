from litellm import completion

messages = [{"content": "Hello, how are you?", "role": "user"}]
response = completion(model="openai/gpt-4o", messages=messages, n=2, stop=["END"], seed=7)
assert len(response.choices) == 2
print(response.choices[0].message.content)
for part in completion(model="openai/gpt-4o", messages=messages, stream=True):
    print(part.choices[0].delta.content or "", end="")
