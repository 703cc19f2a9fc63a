from crewai import Agent, Crew, Task

researcher = Agent(role="Researcher", goal="Find facts about {topic}", backstory="You look things up.")
task = Task(description="Say one fact about {topic}.", expected_output="One sentence.", agent=researcher)
result = Crew(agents=[researcher], tasks=[task]).kickoff(inputs={"topic": "AI agents"})
print(result.raw)
