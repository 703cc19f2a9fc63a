import instructor
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


client = instructor.from_provider("anthropic/claude-sonnet-4-5")
print(client.create(response_model=Person, max_tokens=300, messages=[{"role": "user", "content": "John is 25"}]))
