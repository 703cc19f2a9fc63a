from anthropic import Anthropic

client = Anthropic()
message = client.messages.create(
    max_tokens=1024,
    messages=[{"role": "user", "content": "Hello, Claude"}],
    model="claude-opus-4-6",
    stop_sequences=["Human:"],
)
print(message.content[0].text)
with client.messages.stream(
    max_tokens=1024, messages=[{"role": "user", "content": "Hello"}], model="claude-opus-4-6"
) as stream:
    print("".join(stream.text_stream))
