import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(OpenAI(), mode=mode)
    person = client.create(model="gpt-4o", response_model=Person, messages=[{"role": "user", "content": "John is 25"}])
    print(mode, person)
