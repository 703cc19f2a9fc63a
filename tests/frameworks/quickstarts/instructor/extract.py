import instructor
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


client = instructor.from_provider("openai/gpt-4o-mini")
person = client.chat.completions.create(response_model=Person, messages=[{"role": "user", "content": "John is 25"}])
assert isinstance(person, Person)
print(person)
