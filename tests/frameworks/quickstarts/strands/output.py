from pydantic import BaseModel
from strands import Agent
from strands.models.openai import OpenAIModel


class PersonInfo(BaseModel):
    name: str
    age: int


agent = Agent(model=OpenAIModel(model_id="gpt-4o"))
result = agent("John is 30", structured_output_model=PersonInfo)
print(result.structured_output)
