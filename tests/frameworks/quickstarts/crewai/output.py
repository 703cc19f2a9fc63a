from crewai import Agent, Crew, Task
from pydantic import BaseModel


class Blog(BaseModel):
    title: str
    content: str


agent = Agent(role="Writer", goal="Write", backstory="You write.")
task = Task(
    description="Write a blog title and content.",
    expected_output="A title and a content.",
    agent=agent,
    output_pydantic=Blog,
)
result = Crew(agents=[agent], tasks=[task]).kickoff()
assert isinstance(result.pydantic, Blog), result
print(result.pydantic)
