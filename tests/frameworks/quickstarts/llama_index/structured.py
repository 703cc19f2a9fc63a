from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai import OpenAI
from pydantic import BaseModel


class Restaurant(BaseModel):
    name: str
    city: str


llm = OpenAI(model="gpt-4o-mini")
restaurant = llm.structured_predict(Restaurant, PromptTemplate("Generate a restaurant in {city}"), city="Miami")
assert isinstance(restaurant, Restaurant)
print(restaurant)
