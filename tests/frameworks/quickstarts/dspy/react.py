import dspy

dspy.configure(lm=dspy.LM("openai/gpt-4o-mini", cache=False))


def evaluate_math(expression: str) -> float:
    return float(sum(map(int, expression.split("+"))))


react = dspy.ReAct("question -> answer: float", tools=[evaluate_math], max_iters=3)
pred = react(question="What is 5 + 7?")
print(pred.answer)
