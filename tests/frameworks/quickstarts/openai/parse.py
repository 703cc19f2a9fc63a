from openai import OpenAI
from pydantic import BaseModel


class CalendarEvent(BaseModel):
    name: str
    date: str


client = OpenAI()
messages = [{"role": "user", "content": "Alice and Bob are going to a science fair on Friday."}]
chat = client.chat.completions.parse(model="gpt-4o", messages=messages, response_format=CalendarEvent, logprobs=True)
response = client.responses.parse(model="gpt-4o", input=messages, text_format=CalendarEvent)
print(chat.choices[0].message.parsed, response.output_parsed)
