from anthropic import Anthropic
from pydantic import BaseModel


class ContactInfo(BaseModel):
    name: str
    email: str
    demo_requested: bool


client = Anthropic()
response = client.messages.parse(
    model="claude-sonnet-4-5",
    max_tokens=1024,
    messages=[{"role": "user", "content": "John Smith (john@example.com) wants a demo."}],
    output_format=ContactInfo,
)
assert isinstance(response.parsed_output, ContactInfo)
print(response.parsed_output)
