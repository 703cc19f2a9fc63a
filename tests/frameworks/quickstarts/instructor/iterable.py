import instructor
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


client = instructor.from_provider("openai/gpt-4o-mini")
people = client.create(response_model=list[Person], messages=[{"role": "user", "content": "John is 25, Ann 26"}])
print(list(people))
partial = client.create_partial(response_model=Person, messages=[{"role": "user", "content": "John is 25"}])
for part in partial:
    print(part)
