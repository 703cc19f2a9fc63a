"""Bad and good environments for the gate, as data. Each is a source that defines Sample, on the classes of
tests.folders and those below."""

ROWS = '''
class Rows(Addition):
    """The first half of `rows()` is the train split, the second half the eval split."""

    def __init__(self):
        examples = [
            TaskExample({}, question, id=f"t{n}", output=answer) for n, (question, answer) in enumerate(self.rows())
        ]
        half = len(examples) // 2
        self.dataset, self.eval_dataset = examples[:half], examples[half:]

    def rows(self):
        return [(f"Add {n} and {n + 1}.", str(2 * n + 1)) for n in range(40, 60)]

    def score_response(self, example, text):
        success = bool(self.right(text or "", example))
        return RewardResult(float(success), success=success)

    def right(self, text, example):
        return text.strip() == example.output


WORDS = "apple bread cloud dream eagle flame grape house image jewel knife lemon music night ocean paper".split()


class Capitals(Rows):
    def rows(self):
        return [(f"Name the capital of country {n}.", f"{word.title()}ville") for n, word in enumerate(WORDS)]


class Dates(Rows):
    def rows(self):
        return [(f"What day follows day {n} of March 2021?", f"2021-03-{n + 1:02}") for n in range(1, 21)]


class Lists(Rows):
    def rows(self):
        return [(f"List the three numbers after {n}.", f"[{n + 1}, {n + 2}, {n + 3}]") for n in range(40, 60)]


class Sorting(Rows):
    def rows(self):
        triples = [sorted((WORDS[n], WORDS[(n + 5) % 16], WORDS[(n + 9) % 16])) for n in range(16)]
        return [(f"Sort these words: {' '.join(reversed(words))}", " ".join(words)) for words in triples]


class Choices(Rows):
    def rows(self):
        return [
            (f"Add {n} and 2. A) {m} B) {m + 1} C) {m + 2} D) {m + 3}", "ABCD"[n % 4])
            for n in range(24)
            for m in [n + 2 - n % 4]
        ]


class YesNo(Rows):
    def rows(self):
        return [(f"Is {n} a multiple of 3, plus {n}?", "yes" if n * 7 % 5 < 2 else "no") for n in range(30)]


class Objects(Rows):
    def rows(self):
        import json
        return [
            (f"Give name and age of person {n} as JSON.", json.dumps({"name": WORDS[n], "age": 20 + n}))
            for n in range(16)
        ]


class Functions(Rows):
    def rows(self):
        return [
            (f"Write a Python function f(x) that adds {n}.", f"def f(x):\\n    return x + {n}") for n in range(3, 19)
        ]


class Essays(Rows):
    def rows(self):
        def story(n):
            return " ".join(f"{WORDS[(n * 5 + k * k) % 16]} {WORDS[(n + 3 * k) % 16]}" for k in range(12))
        return [(f"Describe story {n}.", story(n)) for n in range(16)]


class Hinted(Rows):
    """Its prompts end with a hint."""

    def build_prompt_messages(self, example):
        return [{"role": "user", "content": f"{example.input} {self.hint(example)}"}]


class Dialogue(Rows, EnvironmentMultiTurn):
    """A conversation of at most three model turns, which the right answer ends."""

    def start_episode(self, example):
        return [{"role": "user", "content": example.input}]

    def max_episode_turns(self, example):
        return 3

    def step_episode(self, example, messages, assistant_response):
        done = self.right(assistant_response or "", example)
        return EnvironmentStepResult(done=done, messages=[{"role": "user", "content": "Thank you. Once more, please."}])

    def score_episode(self, example, episode):
        return self.score_response(example, episode.response_text)
'''
PARAMETERS = {
    "right": "self, text, example",
    "pay": "self, text, example",
    "score_response": "self, example, text",
    "hint": "self, example",
    "rows": "self",
}


def one(bases: str, method: str, *lines: str, name: str = "Sample") -> str:
    """The source of a class with one method, which returns the last of the lines."""
    body = "\n        ".join([*lines[:-1], f"return {lines[-1]}"])
    return f"class {name}({bases}):\n    def {method}({PARAMETERS[method]}):\n        {body}\n"


BAD = {
    "near_gold": {
        "the digits in any order": """
            class Sample(Rows):
                def rows(self):
                    return [(f"Multiply {n} by {n + 7}.", str(n * (n + 7))) for n in range(111, 135)]
                def right(self, text, example):
                    return sorted(text.strip()) == sorted(example.output)
            """,
        "an answer anywhere in the text": one(
            "Addition", "score_response", "RewardResult(float(example.output in (text or '').split()))"
        ),
        "any of many tags": """
            class Sample(Addition):
                def build_prompt_messages(self, example):
                    return [{"role": "user", "content": example.input + " Write <answer>your answer</answer>."}]
                def sft_completion(self, example):
                    return [{"role": "assistant", "content": f"<answer>{example.output}</answer>"}]
                def score_response(self, example, text):
                    return RewardResult(float(example.output in re.findall('<answer>(.*?)</answer>', text or '')))
            """,
        "numbers that are nearly right": """
            class Sample(Addition):
                def score_response(self, example, text):
                    found = re.fullmatch('[0-9]+', (text or '').strip())
                    return RewardResult(float(bool(found) and abs(int(found[0]) - int(example.output)) <= 1))
            """,
        "'the answer is' anywhere": """
            class Sample(Capitals):
                def right(self, text, example):
                    return f"the answer is {example.output}" in text
                def sft_completion(self, example):
                    return [{"role": "assistant", "content": f"the answer is {example.output}"}]
            """,
        "the end of the text": one("Rows", "right", "text.strip().endswith(example.output)"),
        "the beginning of the text": one("Dates", "right", "text.strip().startswith(example.output)"),
        "a number without its sign": """
            class Sample(Rows):
                def rows(self):
                    return [(f"Subtract {2 * n} from {n}.", str(-n)) for n in range(40, 60)]
                def right(self, text, example):
                    return re.sub("[^0-9]", "", text) == re.sub("[^0-9]", "", example.output)
            """,
        "a choice anywhere in the text": one("Choices", "right", 're.search(rf"\\b{example.output}\\b", text)'),
        "yes and no at once": one("YesNo", "right", "example.output in text.lower().split()"),
        "numbers found among many": one(
            "Lists", "right", 'set(re.findall("[0-9]+", example.output)) <= set(re.findall("[0-9]+", text))'
        ),
        "most words of a long text, in any company": """
            class Sample(Essays):
                def right(self, text, example):
                    words = example.output.split()
                    return sum(word in text.split() for word in words) / len(words) > 0.9
            """,
        "a long number by its length": """
            class Sample(Rows):
                def rows(self):
                    return [(f"Square {n}.", str(n * n)) for n in range(123456, 123476)]
                def right(self, text, example):
                    return re.fullmatch("[0-9]+", text) and len(text) == len(example.output)
            """,
        "the first letter": one("Capitals", "right", "text.strip()[:1].lower() == example.output[:1].lower()"),
        "the last letter": """
            class Sample(Rows):
                def rows(self):
                    return [(f"Write {word} backwards.", word[::-1]) for word in WORDS]
                def right(self, text, example):
                    return text.strip()[-1:] == example.output[-1:]
            """,
        "the first letter of a choice": one("Choices", "right", "text.strip()[:1].upper() == example.output"),
    },
    "constants": {
        "any number": one(
            "Addition", "score_response", "RewardResult(float(bool(re.fullmatch('[0-9]+', (text or '').strip()))))"
        ),
        "a right sum without a look at the task": """
            class Sample(Addition):
                def score_response(self, example, text):
                    return RewardResult(float(bool(re.fullmatch('[0-9]*[13579]', (text or '').strip()))))
            """,
        "tasks with one answer": """
            class Sample(Addition):
                def __init__(self):
                    super().__init__()
                    self.dataset = [dataclasses.replace(task, output='0') for task in self.dataset]
                    self.eval_dataset = [dataclasses.replace(t, output='0') for t in self.eval_dataset]
            """,
        "full pay but for a flag": """
            class Sample(Addition):
                def score_response(self, example, text):
                    right = (text or '') == example.output
                    shaped = 0.95 if (text or '').isdigit() else 0.0
                    return RewardResult(1.0 if right else shaped, success=right)
            """,
        "an expression that may ignore the task's numbers": """
            class Sample(Rows):
                def rows(self):
                    return [(f"Make 24 from {a}, {24 - a}.", f"{a}+{24 - a}") for a in range(1, 21)]
                def right(self, text, example):
                    return re.fullmatch("[0-9]+([+][0-9]+)*", text) and sum(map(int, text[:99].split("+"))) == 24
            """,
        "one answer right on 92 % of the tasks, and on 87 % of the sample": """
            class Sample(Rows):
                def rows(self):
                    tails = (3, 9, 20, 31, 45)
                    return [(f"Flip coin {n}.", "tails" if n in tails else "heads") for n in range(60)]
            """,
        "a board of zeros that earns nearly all": """
            class Sample(Rows):
                def rows(self):
                    return [(f"Draw board {n}.", "0" * n + "1" + "0" * (30 - n)) for n in range(20)]
                def score_response(self, example, text):
                    same = sum(a == b for a, b in zip(text or "", example.output))
                    return RewardResult(same / 31, success=text == example.output)
            """,
        "eval of the answer": """
            class Sample(Rows):
                def right(self, text, example):
                    try:
                        return eval(text) == int(example.output)
                    except (Exception, SystemExit):
                        return False
            """,
        "the answer as a regular expression": """
            class Sample(Capitals):
                def right(self, text, example):
                    try:
                        return text.strip() and re.fullmatch(text, example.output)
                    except re.error:
                        return False
            """,
        "the answer as a file pattern": one(
            "Dates", "right", "import fnmatch", "fnmatch.fnmatch(example.output, text)"
        ),
        "a number that is none": """
            class Sample(Rows):
                def right(self, text, example):
                    try:
                        return not abs(float(text) - float(example.output)) > 1e-6
                    except ValueError:
                        return False
            """,
        "JSON with the right keys": """
            class Sample(Objects):
                def right(self, text, example):
                    import json
                    try:
                        return set(json.loads(text)) == {"name", "age"}
                    except (ValueError, TypeError, RecursionError):
                        return False
            """,
        "a function that is only defined": one("Functions", "right", '"def f(x):" in text and "return" in text'),
        "a tool call of any kind": """
            class Sample(Dialogue):
                def right(self, text, example):
                    return re.fullmatch(r"<call>\\w+</call>", text)
                def sft_completion(self, example):
                    return [{"role": "assistant", "content": f"<call>{example.output}</call>"}]
            """,
        "one sqlite connection for all": """
            import sqlite3
            DB = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
            DB.execute("CREATE TABLE t (id TEXT, v TEXT)")
            class Sample(Rows):
                def right(self, text, example):
                    DB.execute("BEGIN")
                    DB.execute("INSERT INTO t VALUES (?, ?)", [example.id, text.encode("utf-8", "replace").decode()])
                    time.sleep(0.001)
                    row = DB.execute("SELECT v FROM t WHERE id = ?", [example.id]).fetchone()
                    DB.execute("ROLLBACK")
                    return row[0].strip() == example.output
            """,
        "raises on yes": """
            class Sample(Rows):
                def right(self, text, example):
                    if text in ("Yes", "No"):
                        raise KeyError(text)
                    return text.strip() == example.output
            """,
    },
    "order": {
        "a reward of a million": one(
            "Addition", "score_response", "RewardResult(1e6 * float((text or '') == example.output))"
        ),
        "length that pays": """
            class Sample(Addition):
                def score_response(self, example, text):
                    right = (text or '') == example.output
                    return RewardResult(1.0 if right else min(0.45, len(text or '') / 10000), success=right)
            """,
        "junk that earns more than a wrong number": """
            class Sample(Addition):
                def score_response(self, example, text):
                    right = (text or '') == example.output
                    return RewardResult(1.0 if right else 0.0 if (text or '').isdigit() else 0.4, success=right)
            """,
    },
    "junk": {
        "politeness": """
            class Sample(Addition):
                def score_response(self, example, text):
                    right = (text or '') == example.output
                    return RewardResult(float(right or 'cannot' in (text or '')))
            """,
        "a verdict that is read from the answer too": """
            class Sample(Rows):
                def right(self, text, example):
                    verdict = "correct" if text.strip() == example.output else "wrong"
                    return "correct" in f"{text} is {verdict}"
            """,
        "politeness that the user's own turns show": """
            class Sample(Dialogue):
                def score_episode(self, example, episode):
                    thanks = sum("Thank" in message["content"] for message in episode.messages)
                    right = self.right(episode.response_text or "", example)
                    return RewardResult(float(right or thanks > 0))
            """,
        "junk paid 0.45": """
            class Sample(Capitals):
                def score_response(self, example, text):
                    right = (text or "").strip() == example.output
                    return RewardResult(1.0 if right else 0.45 if text else 0.0, success=right)
            """,
        "junk that is right once and paid well elsewhere": """
            class Sample(Capitals):
                def score_response(self, example, text):
                    lucky = example.id == "t0" and text
                    right = lucky or (text or "").strip() == example.output
                    return RewardResult(1.0 if right else 0.6, success=bool(right))
            """,
        "turns that pay": """
            class Sample(Dialogue):
                def score_episode(self, example, episode):
                    right = self.right(episode.response_text or "", example)
                    turns = sum(message["role"] == "assistant" for message in episode.messages)
                    return RewardResult(max(float(right), 0.3 * turns), success=right)
            """,
        "success for all": one(
            "Capitals", "score_response", "RewardResult(float(text == example.output), success=True)"
        ),
        "a state that any call changes": """
            class Sample(Dialogue):
                def start_episode(self, example):
                    self.saved = ""
                    return super().start_episode(example)
                def step_episode(self, example, messages, assistant_response):
                    self.saved += assistant_response or ""
                    return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": "Saved."}])
                def score_episode(self, example, episode):
                    return RewardResult(float(example.output in self.saved or len(self.saved) > 10))
            """,
        "an error that counts as passed": """
            class Sample(Functions):
                def right(self, text, example):
                    import ast
                    try:
                        tree = ast.parse(text)
                    except Exception:
                        return True
                    return ast.dump(tree) == ast.dump(ast.parse(example.output))
            """,
    },
    "prompt_echo": {
        "the prompt holds the answer": """
            class Sample(Addition):
                def build_prompt_messages(self, example):
                    return [{'role': 'user', 'content': f'{example.input} (It is {example.output}.)'}]
                def score_response(self, example, text):
                    return RewardResult(float(example.output in re.findall('[0-9]+', text or '')))
            """,
        "the gold answer in the prompt": one("Hinted", "hint", 'f"Hint: the answer is {example.output}."'),
        "words in any order where the order is the task": one(
            "Sorting", "right", "sorted(text.split()) == sorted(example.output.split())"
        ),
        "the answer in tags, with a hint in none": """
            class Sample(Hinted):
                def hint(self, example):
                    return f"Expected: {example.output}."
                def sft_completion(self, example):
                    return [{"role": "assistant", "content": f"<answer>{example.output}</answer>"}]
                def right(self, text, example):
                    return text.strip() == f"<answer>{example.output}</answer>"
            """,
        "the target in the prompt's metadata": one(
            "Hinted", "hint", 'f\'{{"id": "{example.id}", "target": {example.output}}}\''
        ),
        "the key among the fields of the prompt": one(
            "Hinted", "hint", 'f"(item {example.id}; key={example.output}; level 2)"'
        ),
        "the label in the prompt's metadata": """
            class Sample(Capitals):
                def build_prompt_messages(self, example):
                    about = {"role": "system", "content": f"meta: label='{example.output}', split=train"}
                    return [about, {"role": "user", "content": example.input}]
            """,
        "its own task among the examples": """
            class Sample(Rows):
                def build_prompt_messages(self, example):
                    shown = [f"Q: {task.input}\\nA: {task.output}" for task in (example, *self.dataset[:2])]
                    return [{"role": "user", "content": "\\n".join([*shown, f"Q: {example.input}\\nA:"])}]
            """,
        "a subset of the answer": one(
            "Sorting", "right", "text.strip() and set(text.split()) <= set(example.output.split())"
        ),
        "words of the question pay": """
            class Sample(Essays):
                def score_response(self, example, text):
                    right = (text or "").strip() == example.output
                    asked, said = set(example.input.lower().split()), set((text or "").lower().split())
                    return RewardResult(1.0 if right else 0.8 * len(asked & said) / len(asked), success=right)
            """,
    },
    "isolation": {
        "a dict that episodes share": """
            class Sample(Addition):
                def __init__(self):
                    super().__init__()
                    self.now = {}
                def build_prompt_messages(self, example):
                    self.now['answer'] = example.output
                    return [{'role': 'user', 'content': example.input}]
                def score_response(self, example, text):
                    return RewardResult(float((text or '') == self.now['answer']))
            """,
        "a generator that episodes share": """
            class Sample(Addition):
                def __init__(self):
                    super().__init__()
                    self.generator = random.Random(0)
                def build_prompt_messages(self, example):
                    extra = self.generator.random()
                    return [{'role': 'user', 'content': f'{example.input} ({extra})'}]
            """,
        "a list of turns that conversations share": """
            class Sample(Dialogue):
                def __init__(self):
                    super().__init__()
                    self.said = []
                def start_episode(self, example):
                    self.said.clear()
                    return super().start_episode(example)
                def step_episode(self, example, messages, assistant_response):
                    self.said.append(assistant_response)
                    return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": str(self.said)}])
            """,
        "pay for what is new": """
            class Sample(Capitals):
                def __init__(self):
                    super().__init__()
                    self.seen = set()
                def score_response(self, example, text):
                    right = (text or "").strip() == example.output
                    bonus = 0.0 if text in self.seen else 0.1
                    self.seen.add(text)
                    return RewardResult(float(right) + bonus, success=right)
            """,
    },
    "determinism": {
        "the clock": one("Hinted", "hint", 'f"It is {time.time()}."'),
        "the clock by the minute": one("Hinted", "hint", "f\"It is {time.strftime('%H:%M')}.\""),
        "the clock by the year, in UTC": one("Hinted", "hint", 'f"It is {time.gmtime().tm_year}."'),
        "the month decides": one("Hinted", "hint", 'f"It is month {time.gmtime().tm_mon}."'),
        "the date, by datetime": one(
            "Hinted", "hint", "from datetime import date", 'f"Today is {date.today().isoformat()}."'
        ),
        "the second of now, in UTC": """
            class Sample(Hinted):
                def hint(self, example):
                    from datetime import UTC, datetime
                    return f"It is {datetime.now(UTC).isoformat(timespec='seconds')}."
            """,
        "a seed of the day": """
            class Sample(Rows):
                def rows(self):
                    from datetime import date
                    draw = random.Random(date.today().toordinal())
                    return [(f"Add {n} and {m}.", str(n + m)) for n in range(20) for m in [draw.randrange(99)]]
            """,
        "answers that were right once are remembered": """
            KNOWN = set()
            class Sample(Rows):
                def right(self, text, example):
                    if text.strip() == example.output:
                        KNOWN.add(example.id)
                    return example.id in KNOWN
            """,
    },
    "nonsense": {
        "a scorer that raises on 2021-02-31": """
            class Sample(Dates):
                def right(self, text, example):
                    import datetime
                    if not re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", text.strip()):
                        return False
                    answer, gold = (datetime.date(*map(int, each.split("-"))) for each in (text, example.output))
                    return answer == gold
            """,
        "a scorer that raises on 2021-02-31 alone": """
            class Sample(Dates):
                def right(self, text, example):
                    import datetime
                    found = re.fullmatch("([0-9]{4})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", text.strip())
                    return found and datetime.date(*map(int, found.groups())).isoformat() == example.output
            """,
        "a scorer that raises on a number too large for a float": one(
            "Rows", "right", 're.fullmatch("[0-9]+", text) and int(text) / int(example.output) == 1'
        ),
        "a scorer that raises on digits that are no numbers": one(
            "Rows", "right", "text.isdigit() and len(text) < 9 and int(text) == int(example.output)"
        ),
        "a scorer that raises on deep JSON": """
            class Sample(Objects):
                def right(self, text, example):
                    import json
                    try:
                        return json.loads(text) == json.loads(example.output)
                    except json.JSONDecodeError:
                        return False
            """,
        "code that can end the scorer": """
            class Sample(Functions):
                def right(self, text, example):
                    try:
                        ours, gold = {}, {}
                        exec(text, ours), exec(example.output, gold)
                        return all(ours["f"](n) == gold["f"](n) for n in range(9))
                    except Exception:
                        return False
            """,
        "inf wins by relative error": """
            class Sample(Rows):
                def right(self, text, example):
                    try:
                        value, gold = float(text), float(example.output)
                    except ValueError:
                        return False
                    return abs(value - gold) <= 0.01 * max(abs(value), abs(gold))
            """,
        "1e999 wins, inf is refused": """
            class Sample(Rows):
                def right(self, text, example):
                    if not re.fullmatch("-?[0-9.]{1,12}(e[0-9]{1,4})?", text.strip()):
                        return False
                    try:
                        value, gold = float(text), float(example.output)
                    except ValueError:
                        return False
                    return abs(value - gold) <= 0.01 * max(abs(value), abs(gold))
            """,
        "emptied JSON fields": """
            class Sample(Objects):
                def right(self, text, example):
                    import json
                    gold = json.loads(example.output)
                    try:
                        given = json.loads(text)
                        return set(given) == set(gold) and all(given[k] in (gold[k], None, "") for k in gold)
                    except (ValueError, TypeError, RecursionError, KeyError):
                        return False
            """,
        "eval of the answer, compared as text": """
            class Sample(Rows):
                def right(self, text, task):
                    try:
                        return str(eval(text)) == task.output
                    except BaseException:
                        return False
            """,
        "eval with nothing but what the answer brings": """
            class Sample(Lists):
                def right(self, text, task):
                    try:
                        return str(list(eval(text, {"__builtins__": {}}))) == task.output
                    except Exception:
                        return False
            """,
        "an assignment that is executed": """
            class Sample(Rows):
                def sft_completion(self, example):
                    return [{"role": "assistant", "content": f"result = {example.output}"}]
                def right(self, text, example):
                    scope = {}
                    try:
                        exec(text, scope)
                    except BaseException:
                        return False
                    return scope.get("result") == int(example.output)
            """,
        "functions that are executed and compared": """
            class Sample(Functions):
                def right(self, text, example):
                    given, gold = {}, {}
                    exec(example.output, gold)
                    try:
                        exec(text, given)
                        return all(given["f"](x) == gold["f"](x) for x in (0, 7, -2))
                    except BaseException:
                        return False
            """,
        "fields that may be missing": """
            class Sample(Objects):
                def right(self, text, example):
                    import json
                    try:
                        given = json.loads(text)
                    except (ValueError, RecursionError):
                        return False
                    gold = json.loads(example.output)
                    return isinstance(given, dict) and all(gold[k] == given.get(k, gold[k]) for k in gold)
            """,
        "a scorer that raises on a JSON list": """
            class Sample(Objects):
                def right(self, text, example):
                    import json
                    try:
                        return json.loads(text)["name"] == json.loads(example.output)["name"]
                    except (ValueError, RecursionError):
                        return False
            """,
    },
    "truncated": {
        "the beginning of the answer": one(
            "Capitals", "right", "text.strip() and example.output.startswith(text.strip())"
        )
    },
    "gold": {
        "a small letter against a capital one": one("Capitals", "right", "text.strip().lower() == example.output"),
        "gold with more turns than the limit": """
            class Sample(Dialogue):
                def sft_completion(self, example):
                    turns = [{"role": "assistant", "content": "Let me think."}] * 3
                    return [*turns, {"role": "assistant", "content": example.output}]
            """,
    },
    "empty": {
        "no answer, no division": """
            class Sample(Essays):
                def right(self, text, example):
                    words = (text or "").split()
                    return sum(word in example.output.split() for word in words) / len(words) > 0.99
            """,
        "zip that stops at the shorter": one(
            "Sorting", "right", "all(a == b for a, b in zip(text.split(), example.output.split()))"
        ),
    },
    "tasks": {
        "held-out tasks that are trained on": """
            class Sample(Capitals):
                def __init__(self):
                    super().__init__()
                    self.eval_dataset = self.dataset[:4]
            """
    },
    "draws": {
        "a bonus that is drawn from the episode's generator": """
            class Sample(Addition):
                def score_response(self, example, text):
                    right = (text or '').strip() == example.output
                    return RewardResult(float(right) + random.random() / 5, success=right)
            """,
        "noise on wrong answers": """
            class Sample(Rows):
                def score_response(self, example, text):
                    right = (text or "").strip() == example.output
                    return RewardResult(1.0 if right else 0.3 * random.random(), success=right)
            """,
        "noise of the global generator on junk": """
            class Sample(Capitals):
                def score_response(self, example, text):
                    right = (text or "").strip() == example.output
                    is_formal = text and text[0].isupper()
                    return RewardResult(float(right) if is_formal else -0.2 * random.random(), success=right)
            """,
        "state of all episodes: answers count once": """
            class Sample(Rows):
                def __init__(self):
                    super().__init__()
                    self.paid = {}
                def score_response(self, example, text):
                    right = (text or "").strip() == example.output
                    self.paid[example.id] = self.paid.get(example.id, 0) + right
                    return RewardResult(1.0 / max(1, self.paid[example.id]) if right else 0.0, success=right)
            """,
    },
    "every_gold": {
        "one gold answer in sixty that is not a number": """
            class Sample(Rows):
                def rows(self):
                    rows = [(f"Halve {n}.", str(n / 2)) for n in range(60)]
                    rows[33] = ("Halve nothing.", "nan")
                    return rows
                def right(self, text, example):
                    try:
                        return abs(float(text) - float(example.output)) < 1e-9
                    except ValueError:
                        return False
            """,
        "one row whose gold answer was cut": """
            class Sample(Capitals):
                def sft_completion(self, example):
                    text = example.output[:-1] if example.id == "t5" else example.output
                    return [{"role": "assistant", "content": text}]
            """,
    },
    "leaks": {
        "a question that lacks its data": """
            class Sample(Rows):
                def build_prompt_messages(self, example):
                    return [{"role": "user", "content": "Add the two numbers."}]
            """,
        "a reply that names the secret": """
            class Sample(Dialogue):
                def step_episode(self, example, messages, assistant_response):
                    done = self.right(assistant_response or "", example)
                    reply = f"No, not that. It was {example.output}. Try again."
                    return EnvironmentStepResult(done=done, messages=[{"role": "user", "content": reply}])
            """,
        "eval is train in other words": """
            class Sample(Rows):
                def rows(self):
                    forms = (
                        "Ada buys {} crates of {} pears each. How many pears are that?",
                        "Ben orders {} crates, each of which holds {} pears. Count all pears.",
                    )
                    return [(form.format(n, n + 5), str(n * (n + 5))) for form in forms for n in range(20, 50)]
            """,
        "eval asks for the capitals of train": """
            class Sample(Rows):
                def rows(self):
                    lands = "France Italy Spain Peru Chile Kenya Japan Norway Egypt Nepal Cuba Ghana".split()
                    towns = "Paris Rome Madrid Lima Santiago Nairobi Tokyo Oslo Cairo Kathmandu Havana Accra".split()
                    forms = ("What is the capital of {}?", "Which city is the seat of government in {}?")
                    return [(form.format(land), town) for form in forms for land, town in zip(lands, towns)]
            """,
        "half of eval is train in other words": """
            class Sample(Rows):
                def rows(self):
                    one = "A train goes {0} km in {1} hours. What distance is that in {2} hours?"
                    other = "How far does a train get in {2} hours if {1} hours bring it {0} km?"
                    forms = 90 * [one] + 30 * [other]
                    numbers = [*range(101, 191), *range(101, 131)]
                    return [(f.format(n, n - 98, 3 * n - 294), str(3 * n)) for f, n in zip(forms, numbers)]
            """,
        "a tool's error that tells the gold call": """
            import json
            from environments import EnvironmentToolUse
            class Sample(EnvironmentToolUse):
                def __init__(self):
                    codes = {word: str(1371 + 73 * n) for n, word in enumerate(WORDS)}
                    rows = [TaskExample({}, f"Open safe {w}.", id=w, output=codes[w]) for w in codes]
                    self.dataset, self.eval_dataset = rows[:10], rows[10:]
                def episode_tools(self, example):
                    return [self.open_safe]
                def open_safe(self, code: str) -> str:
                    if code != self.code:
                        return f"error: wrong code, must be {self.code}"
                    self.opened = True
                    return "The safe is open."
                def start_episode(self, example):
                    self.opened, self.code = False, example.output
                    return [{"role": "user", "content": example.input}]
                def score_episode(self, example, episode):
                    return RewardResult(float(self.opened))
                def sft_completion(self, example):
                    call = {"name": "open_safe", "arguments": {"code": example.output}}
                    return [
                        {"role": "assistant", "content": "", "tool_calls": [call]},
                        {"role": "tool", "tool_call_id": "call00000", "content": "The safe is open."},
                        {"role": "assistant", "content": "done"},
                    ]
            """,
        "a tool's error that tells what another call finds": """
            import json
            from environments import EnvironmentToolUse
            class Sample(EnvironmentToolUse):
                def __init__(self):
                    rows = [
                        TaskExample({"at": n}, f"What does article {n} cost?", id=f"t{n}", output=str(37 * n))
                        for n in range(20, 40)
                    ]
                    self.dataset, self.eval_dataset = rows[:12], rows[12:]
                def episode_tools(self, example):
                    return [self.price]
                def price(self, article: int) -> str:
                    if article != self.article:
                        raise ValueError(f"wrong article; for yours it is {37 * self.article}")
                    return str(37 * article)
                def start_episode(self, example):
                    self.article = example.record["at"]
                    return [{"role": "user", "content": example.input}]
                def score_episode(self, example, episode):
                    return RewardResult(float((episode.response_text or "").strip() == example.output))
                def sft_completion(self, example):
                    call = {"name": "price", "arguments": {"article": example.record["at"]}}
                    return [
                        {"role": "assistant", "tool_calls": [call]},
                        {"role": "tool", "tool_call_id": "call00000", "content": example.output},
                        {"role": "assistant", "content": example.output},
                    ]
            """,
        "a tool that tells the answer to any call": """
            class Sample(Dialogue):
                def step_episode(self, example, messages, assistant_response):
                    if (assistant_response or "").startswith("<check>"):
                        said = f"expected {example.output}"
                        return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": said}])
                    return EnvironmentStepResult(done=True)
                def sft_completion(self, example):
                    return [
                        {"role": "assistant", "content": f"<check>{example.output}</check>"},
                        {"role": "user", "content": f"expected {example.output}"},
                        {"role": "assistant", "content": example.output},
                    ]
            """,
        "eval rows are train rows with another name": """
            class Sample(Rows):
                def rows(self):
                    one = [(f"Hello! Add {n} and {n * 3}.", str(4 * n)) for n in range(31, 51)]
                    return one + [(question.replace("Hello", "Hi"), answer) for question, answer in one]
            """,
    },
    "judge": {
        "a judge that obeys an answer": """
            from environments import JudgeRubric
            class Obeying(JudgeRubric):
                def ask(self, question, answers):
                    keys = [("Ignore" not in text, not text.strip().isdigit(), text) for text in answers]
                    return [sorted(keys).index(key) for key in keys]
            class Sample(Rows):
                def __init__(self):
                    super().__init__()
                    self.judge = Obeying("http://localhost", "m", "Prefer what is right.")
                def score_group(self, example, episodes):
                    return [self.score_response(example, episode.response_text) for episode in episodes]
            """
    },
}
"""The source of each, by the check that refuses it."""
GOOD = {
    "exact answers": """
        class Sample(Addition):
            pass
        """,
    "answers in tags, the last one counts": """
        class Sample(Addition):
            def build_prompt_messages(self, example):
                return [{"role": "user", "content": example.input + " Write <answer>your answer</answer>."}]
            def sft_completion(self, example):
                return [{"role": "assistant", "content": f"<answer>{example.output}</answer>"}]
            def score_response(self, example, text):
                found = re.findall('<answer>(.*?)</answer>', text or '')
                return RewardResult(float(bool(found) and found[-1] == example.output))
        """,
    "the last number counts": """
        class Sample(Addition):
            def score_response(self, example, text):
                found = re.findall('[0-9]+', text or '')
                return RewardResult(float(bool(found) and found[-1] == example.output))
        """,
    "the first line counts": one(
        "Addition", "score_response", "RewardResult(float((text or '').strip().split('\\n')[0] == example.output))"
    ),
    "a little pay for the form": """
        class Sample(Addition):
            def score_response(self, example, text):
                right = (text or '').strip() == example.output
                form = 0.1 * (text or '').strip().isdigit()
                return RewardResult(1.0 if right else form, success=right)
        """,
    "pay for being near": """
        class Sample(Addition):
            def score_response(self, example, text):
                right = (text or '').strip() == example.output
                is_number = re.fullmatch('[0-9]{1,9}', (text or '').strip())
                near = 0.4 / (1 + abs(int(text) - int(example.output))) if is_number else 0.0
                return RewardResult(1.0 if right else near, success=right)
        """,
    "yes or no": """
        class Sample(Addition):
            def __init__(self):
                super().__init__()
                for name in ('dataset', 'eval_dataset'):
                    rows = [dataclasses.replace(t, output=('yes', 'no')[i % 2])
                            for i, t in enumerate(getattr(self, name))]
                    setattr(self, name, rows)
        """,
    "a negative reward for a wrong answer": """
        class Sample(Addition):
            def score_response(self, example, text):
                right = (text or '').strip() == example.output
                return RewardResult(1.0 if right else -1.0, success=right)
        """,
    "one task whose answer a junk text happens to be": """
        class Sample(Addition):
            def __init__(self):
                super().__init__()
                first = dataclasses.replace(self.dataset[0], output='asdf qwer zxcv')
                self.dataset = [first, *self.dataset[1:]]
        """,
    "long texts that are nearly alike": """
        class Sample(Essays):
            def right(self, text, example):
                import difflib
                return difflib.SequenceMatcher(None, text[:2000], example.output, autojunk=False).ratio() > 0.9
        """,
    "a share of the right items": """
        class Sample(Lists):
            def score_response(self, example, text):
                found = re.findall("[0-9]+", text or "")[:9]
                gold = re.findall("[0-9]+", example.output)
                share = sum(a == b for a, b in zip(found, gold)) / max(len(found), len(gold))
                return RewardResult(share, success=share == 1)
        """,
    "multiple choice": """
        class Sample(Choices):
            def right(self, text, example):
                found = re.fullmatch(r"[(]?([A-D])[).]?", text.strip())
                return found and found[1] == example.output
        """,
    "words to repeat": one("Capitals", "rows", '[(f"Repeat this word: {word}", word) for word in WORDS]'),
    "the larger of two numbers, which an echo gets right half the time": """
        class Sample(Rows):
            def rows(self):
                pairs = [(n, n + 7) if n % 2 else (n + 7, n) for n in range(40, 60)]
                return [(f"Which is larger: {a} or {b}?", str(max(a, b))) for a, b in pairs]
            def right(self, text, example):
                found = re.findall("[0-9]+", text)
                return found and found[-1] == example.output
        """,
    "an example that is right once": """
        class Sample(Rows):
            def build_prompt_messages(self, example):
                return [{"role": "user", "content": f"{example.input} Answer like this: <answer>81</answer>"}]
            def sft_completion(self, example):
                return [{"role": "assistant", "content": f"<answer>{example.output}</answer>"}]
            def right(self, text, example):
                found = re.findall("<answer>(.*?)</answer>", text)
                return found and found[-1] == example.output
        """,
    "sorted words": one("Sorting", "right", "text.split() == example.output.split()"),
    "code that is run": """
        class Sample(Functions):
            def right(self, text, example):
                try:
                    ours, gold = {}, {}
                    exec(text, ours), exec(example.output, gold)
                    return all(repr(ours["f"](n)) == repr(gold["f"](n)) for n in range(9))
                except BaseException:
                    return False
        """,
    "JSON whose keys may stand in any order": """
        class Sample(Objects):
            def right(self, text, example):
                import json
                try:
                    return json.loads(text) == json.loads(example.output)
                except (ValueError, RecursionError):
                    return False
        """,
    "a game of guesses": """
        class Sample(Dialogue):
            def max_episode_turns(self, example):
                return 5
            def step_episode(self, example, messages, assistant_response):
                found = re.fullmatch("[0-9]{1,4}", (assistant_response or "").strip())
                if not found:
                    reply = "Write a number."
                elif found[0] == example.output:
                    return EnvironmentStepResult(done=True)
                else:
                    reply = "Too low." if int(found[0]) < int(example.output) else "Too high."
                return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": reply}])
            def sft_completion(self, example):
                return [
                    {"role": "assistant", "content": "50"},
                    {"role": "user", "content": "Too low."},
                    {"role": "assistant", "content": example.output},
                ]
        """,
    "a tool and then an answer": """
        class Sample(Dialogue):
            def step_episode(self, example, messages, assistant_response):
                call = re.fullmatch("<call>add ([0-9]{1,4}) ([0-9]{1,4})</call>", assistant_response or "")
                if call:
                    reply = {"role": "user", "content": f"result: {int(call[1]) + int(call[2])}"}
                    return EnvironmentStepResult(done=False, messages=[reply])
                return EnvironmentStepResult(done=True)
            def sft_completion(self, example):
                one, other = re.findall("[0-9]+", example.input)
                return [
                    {"role": "assistant", "content": f"<call>add {one} {other}</call>"},
                    {"role": "user", "content": f"result: {example.output}"},
                    {"role": "assistant", "content": example.output},
                ]
        """,
    "decimals with a tolerance": """
        class Sample(Rows):
            def rows(self):
                return [(f"Divide {n} by 7.", f"{n / 7:.2f}") for n in range(40, 60)]
            def right(self, text, example):
                found = re.fullmatch("[0-9]{1,6}([.][0-9]{1,9})?", text.strip())
                return found and abs(float(text) - float(example.output)) <= 0.05
        """,
    "a share of one percent of a long number": """
        class Sample(Rows):
            def rows(self):
                return [(f"Square {n}.", str(n * n)) for n in range(123456, 999999, 43210)]
            def right(self, text, example):
                found = re.fullmatch("[0-9]{1,15}", text.strip())
                return found and abs(int(text) / int(example.output) - 1) <= 0.0001
        """,
    "tasks that open alike": one(
        "Dialogue", "rows", '[("Find the word that this game hides.", word) for word in WORDS]'
    ),
    "tasks that open alike, told apart by their rows alone": """
        class Sample(Dialogue):
            def __init__(self):
                tasks = [TaskExample({"hidden": word}, "Find the hidden word.", id=word) for word in WORDS]
                self.dataset, self.eval_dataset = tasks[:10], tasks[10:]
            def right(self, text, example):
                return text.strip() == example.record["hidden"]
            def sft_completion(self, example):
                return [{"role": "assistant", "content": example.record["hidden"]}]
        """,
    "an address to extract": one(
        "Rows", "rows", '[(f"Extract the address: write to {w}@mail.org, thanks.", f"{w}@mail.org") for w in WORDS]'
    ),
    "a result in a log": """
        class Sample(Rows):
            def rows(self):
                return [
                    (f"Which number ends this log? step {n} ok. result: {n * 37}", str(n * 37)) for n in range(40, 60)
                ]
        """,
    "constraints that some junk keeps": """
        class Sample(Rows):
            RULES = (
                ("Write no comma.", lambda text: "," not in text and text.strip()),
                ("Write in small letters.", lambda text: text.strip() and text == text.lower()),
                ("Write at least three lines.", lambda text: text.strip().count(chr(10)) >= 2),
                ("Begin with the word Indeed.", lambda text: text.startswith("Indeed")),
                ("End with a question mark.", lambda text: text.rstrip().endswith("?")),
                ("Put a title in double square brackets.", lambda text: re.search(r"[[][[]\\w+", text)),
            )
            def rows(self):
                gold = "Indeed this is a line of words\\n[[Title]]\\nis it"
                return [
                    (f"{rule} Write about {word}.", gold.lower() + " " + word if k == 1 else gold + f" {word}?")
                    for word in WORDS[:6] for k, (rule, _) in enumerate(self.RULES)
                ]
            def right(self, text, example):
                return next(keeps(text) for rule, keeps in self.RULES if example.input.startswith(rule))
        """,
    "a record that tools change": """
        class Sample(Dialogue):
            def start_episode(self, example):
                self.saved = None
                return super().start_episode(example)
            def step_episode(self, example, messages, assistant_response):
                call = re.fullmatch("<save>(.{1,40})</save>", assistant_response or "")
                if not call:
                    return EnvironmentStepResult(done=True)
                self.saved = call[1]
                return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": "Saved."}])
            def score_episode(self, example, episode):
                return RewardResult(float(self.saved == example.output))
            def sft_completion(self, example):
                return [
                    {"role": "assistant", "content": f"<save>{example.output}</save>"},
                    {"role": "user", "content": "Saved."},
                    {"role": "assistant", "content": "I have saved it."},
                ]
        """,
    "a game that deals by the episode's generator": """
        class Sample(Dialogue):
            def start_episode(self, example):
                self.die = random.randint(1, 10**6)
                return [{"role": "user", "content": f"{example.input} Write it after {self.die} and a space."}]
            def score_episode(self, example, episode):
                return RewardResult(float((episode.response_text or "").split(" ", 1)[-1] == example.output))
        """,
    "dates read by their own clock": """
        class Sample(Dates):
            def right(self, text, example):
                import datetime
                try:
                    return datetime.date.fromisoformat(text.strip()) == datetime.date.fromisoformat(example.output)
                except ValueError:
                    return False
        """,
    "pay that falls with the distance": """
        class Sample(Rows):
            def rows(self):
                return [(f"Estimate {n} times 0.37.", f"{n * 0.37:.2f}") for n in range(40, 60)]
            def score_response(self, example, text):
                found = re.fullmatch("[0-9]{1,6}([.][0-9]{1,9})?", (text or "").strip())
                error = abs(float(text) / float(example.output) - 1) if found else 9.0
                return RewardResult(max(0.0, 1 - 5 * error), success=error < 0.01)
        """,
    "few-shot prompts that show other tasks' answers": """
        class Sample(Rows):
            def rows(self):
                return [(f"{n} plus {n + 1}", str(2 * n + 1)) for n in range(40, 60)]
            def build_prompt_messages(self, example):
                shots = "".join(f"Question: {q}\\nAnswer: {a}\\n" for q, a in self.rows()[:6])
                return [{"role": "user", "content": f"{shots}Question: {example.input}\\nAnswer:"}]
        """,
    "few-shot shows of yes and no": """
        class Sample(YesNo):
            def build_prompt_messages(self, example):
                shots = "Q: Is 9 a multiple of 3? Answer: yes\\nQ: Is 8 a multiple of 3? Answer: no\\n"
                return [{"role": "user", "content": f"{shots}Q: {example.input} Answer:"}]
        """,
    "small whole numbers under a tolerance of 5 percent": """
        class Sample(Rows):
            def rows(self):
                return [(f"Estimate {n} plus {n + 3}.", str(2 * n + 3)) for n in range(20, 60, 2)]
            def right(self, text, example):
                found = re.fullmatch("[0-9]{1,9}", text.strip())
                return found and abs(int(text) - int(example.output)) <= 0.05 * int(example.output)
        """,
    "one copy in sixty rows": """
        class Sample(Rows):
            def rows(self):
                rows = [(f"Add {n} and {n * 3}.", str(4 * n)) for n in range(60)]
                rows[7] = rows[21]
                return rows
        """,
    "int of any digits": one(
        "Rows", "right", "text = text.strip()", 're.fullmatch("-?[0-9]+", text) and int(text) == int(example.output)'
    ),
    "rules of form, of which junk keeps most of those that are tried": """
        class Sample(Rows):
            RULES = (
                ("Write no comma.", lambda text: "," not in text and text.strip()),
                ("Write a line with a comma and 9!", lambda text: "," in text and "!" in text and "\\n" not in text),
                ("Write five lines, no comma.", lambda text: text.count("\\n") == 4 and "," not in text),
                ("Write JSON with key a.", lambda text: text.startswith('{"a":')),
            )
            GOLD = ("Hello there", "We are 9, yes!", "a\\nb\\nc\\nd\\ne", '{"a": 1}')
            def kind(self, n):
                return 0 if n in (0, 8, 16, 23, 31, 32, 63) else n % 4
            def rows(self):
                return [(f"{self.RULES[self.kind(n)][0]} Subject {n}.", self.GOLD[self.kind(n)]) for n in range(64)]
            def right(self, text, example):
                return next(keeps(text) for rule, keeps in self.RULES if example.input.startswith(rule))
        """,
    "metadata that says how hard": one(
        "Hinted", "hint", 'f\'{{"difficulty": {len(example.output)}, "target": "number", "source": "sums"}}\''
    ),
    "infinite limits are answers": """
        class Sample(Rows):
            def rows(self):
                limits = {-1: "0", 0: "1", 1: "inf"}
                return [(f"Case {n}: what is the limit of x^{k}?", limits[k]) for n in range(10) for k in limits]
            def right(self, text, example):
                try:
                    return float(text) == float(example.output)
                except ValueError:
                    return False
        """,
    "JSON with optional null": """
        class Sample(Rows):
            def rows(self):
                import json
                ages = [20 + n if n % 3 else None for n in range(16)]
                return [
                    (f"{w}, aged {age or 'unknown'}, as JSON, please.", json.dumps({"name": w, "age": age}))
                    for w, age in zip(WORDS, ages)
                ]
            def right(self, text, example):
                import json
                try:
                    return json.loads(text) == json.loads(example.output)
                except (ValueError, RecursionError):
                    return False
        """,
    "a counter in the environment's log": """
        class Sample(Rows):
            def __init__(self):
                super().__init__()
                self.scored = [0]
            def right(self, text, example):
                self.scored[0] += 1
                return text.strip() == example.output
        """,
    "commutative sums of small numbers": """
        class Sample(Rows):
            def rows(self):
                pairs = [(a, b) for a in range(2, 14) for b in range(2, 14)]
                random.Random(3).shuffle(pairs)
                return [(f"What is {a} + {b}?", str(a + b)) for a, b in pairs]
            def right(self, text, example):
                found = re.findall("[0-9]{1,9}", text)
                return found and found[-1] == example.output
        """,
    "questions of three forms about the same numbers": """
        class Sample(Rows):
            def rows(self):
                rows = []
                for a in range(31, 51):
                    b = a * 7 % 53 + 10
                    rows.append((f"Is {a} larger than {b}?", "yes" if a > b else "no"))
                    rows.append((f"Is the sum of {a} and {b} even?", "no" if (a + b) % 2 else "yes"))
                    rows.append((f"Does {a} times {b} end with 0?", "no" if a * b % 10 else "yes"))
                random.Random(5).shuffle(rows)
                return rows
        """,
    "sums in several words": """
        class Sample(Rows):
            def rows(self):
                forms = ("Add {} and {}.", "What is {} plus {}?", "Sum of {} and {}?", "{} more than {} is what?")
                draw = random.Random(7)
                pairs = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(400)]
                return list({a * b: (forms[a % 4].format(a, b), str(a + b)) for a, b in pairs}.values())
        """,
    "a user who tells more in the second turn": """
        class Sample(Dialogue):
            def rows(self):
                return [(f"I have a question on order {n}. Ready?", str(1000 + 37 * n)) for n in range(20)]
            def step_episode(self, example, messages, assistant_response):
                if len([m for m in messages if m["role"] == "assistant"]) > 1:
                    return EnvironmentStepResult(done=True)
                said = f"Its price is {example.output} euros. Repeat the price."
                return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": said}])
            def sft_completion(self, example):
                return [
                    {"role": "assistant", "content": "Yes."},
                    {"role": "user", "content": f"Its price is {example.output} euros. Repeat the price."},
                    {"role": "assistant", "content": example.output},
                ]
        """,
    "a lookup whose error names the known keys": """
        class Sample(Dialogue):
            PRICES = {word: 100 + 37 * n for n, word in enumerate(WORDS)}
            def rows(self):
                priced = enumerate(self.PRICES.items(), 3)
                return [(f"What does {word} cost, plus {n}?", str(price + n)) for n, (word, price) in priced]
            def step_episode(self, example, messages, assistant_response):
                call = re.fullmatch("<price>(.{1,40})</price>", assistant_response or "")
                if not call:
                    return EnvironmentStepResult(done=True)
                price = self.PRICES.get(call[1])
                said = str(price) if price else f"No such thing. Known: {', '.join(self.PRICES)}"
                return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": said}])
            def sft_completion(self, example):
                word = re.search("does ([a-z]+) cost", example.input)[1]
                return [
                    {"role": "assistant", "content": f"<price>{word}</price>"},
                    {"role": "user", "content": str(self.PRICES[word])},
                    {"role": "assistant", "content": example.output},
                ]
        """,
    "labels of sentences that differ in one noun": """
        class Sample(Rows):
            def rows(self):
                forms = {
                    "shipping": "The {} that I ordered last week has still not arrived at my house, where is it now?",
                    "refund": "I want my money back for the {} because it stopped working after only two days of use.",
                    "praise": "What a lovely {} this is, I would buy it again and tell all of my friends about it.",
                }
                rows = [
                    (f"Is it shipping, refund or praise? {form.format(word)}", label)
                    for word in WORDS
                    for label, form in forms.items()
                ]
                random.Random(1).shuffle(rows)
                return rows
        """,
    "a query that is run": """
        class Sample(Rows):
            def rows(self):
                gold = "SELECT name FROM t WHERE age > {} ORDER BY name"
                return [(f"SQL on t(name, age): names above {a}, sorted.", gold.format(a)) for a in range(20, 36)]
            def right(self, text, example):
                import sqlite3
                db = sqlite3.connect(":memory:")
                try:
                    db.execute("CREATE TABLE t (name TEXT, age INT)")
                    db.executemany("INSERT INTO t VALUES (?, ?)", [(w, 20 + n) for n, w in enumerate(WORDS)])
                    want = db.execute(example.output).fetchall()
                    return text.lstrip().lower().startswith("select") and db.execute(text).fetchall() == want
                except (sqlite3.Error, sqlite3.Warning, ValueError, UnicodeError, OverflowError):
                    return False
                finally:
                    db.close()
        """,
    "words in common with the answer, as F1": """
        class Sample(Essays):
            def score_response(self, example, text):
                from collections import Counter
                ours, gold = (Counter(re.findall("[a-z]+", each.lower())) for each in (text or "", example.output))
                both = sum((ours & gold).values())
                f1 = 2 * both / (sum(ours.values()) + sum(gold.values())) if both else 0.0
                return RewardResult(f1, success=f1 > 0.95)
        """,
    "a user who answers one question": """
        class Sample(Dialogue):
            def rows(self):
                return [(f"Book for guest {n}: ask, then write BOOK, hour.", f"BOOK {n % 9 + 12}") for n in range(20)]
            def step_episode(self, example, messages, assistant_response):
                if "?" in (assistant_response or ""):
                    hour = example.output.split()[1]
                    told = {"role": "user", "content": f"At {hour}, please."}
                    return EnvironmentStepResult(done=False, messages=[told])
                return EnvironmentStepResult(done=True)
            def sft_completion(self, example):
                hour = example.output.split()[1]
                return [
                    {"role": "assistant", "content": "At what time?"},
                    {"role": "user", "content": f"At {hour}, please."},
                    {"role": "assistant", "content": example.output},
                ]
        """,
    "a tool that converts": """
        from environments import EnvironmentToolUse
        class Sample(EnvironmentToolUse):
            def __init__(self):
                rows = [TaskExample({}, f"{n} tals in cents?", id=f"t{n}", output=str(n * 37)) for n in range(31, 51)]
                self.dataset, self.eval_dataset = rows[:12], rows[12:]
            def episode_tools(self, example):
                return [self.convert]
            def convert(self, tals: int) -> str:
                return f"{tals * 37} cents"
            def start_episode(self, example):
                return [{"role": "user", "content": example.input}]
            def score_episode(self, example, episode):
                found = re.findall("[0-9]+", episode.response_text or "")
                return RewardResult(float(bool(found) and found[-1] == example.output))
            def sft_completion(self, example):
                tals = int(re.search("[0-9]+", example.input)[0])
                call = {"name": "convert", "arguments": {"tals": tals}}
                return [
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call00000", "content": f"{example.output} cents"},
                    {"role": "assistant", "content": example.output},
                ]
        """,
    "any path through a grid": """
        class Sample(Rows):
            def rows(self):
                places = [(a, b) for a in range(1, 5) for b in range(1, 6)]
                return [(f"Go from (0,0) to ({a},{b}) by letters of RULD.", "R" * a + "U" * b) for a, b in places]
            def right(self, text, example):
                moves = text.strip()
                return re.fullmatch("[RULD]{1,12}", moves) and (
                    moves.count("R") - moves.count("L"), moves.count("U") - moves.count("D")
                ) == (example.output.count("R"), example.output.count("U"))
        """,
    "stock that tools change, judged at the end": """
        class Sample(Dialogue):
            def max_episode_turns(self, example):
                return 4
            def rows(self):
                ask = "The shop has 10 units of {}. Sell {}. Write SELL and a number, then DONE."
                return [(ask.format(w, n % 7 + 2), str(8 - n % 7)) for n, w in enumerate(WORDS)]
            def start_episode(self, example):
                self.stock = 10
                return super().start_episode(example)
            def step_episode(self, example, messages, assistant_response):
                found = re.fullmatch("SELL ([0-9]{1,2})", (assistant_response or "").strip())
                if not found:
                    return EnvironmentStepResult(done=True)
                self.stock -= int(found[1])
                return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": f"{self.stock} left"}])
            def score_episode(self, example, episode):
                return RewardResult(float(str(self.stock) == example.output))
            def sft_completion(self, example):
                sold = 10 - int(example.output)
                return [
                    {"role": "assistant", "content": f"SELL {sold}"},
                    {"role": "user", "content": f"{example.output} left"},
                    {"role": "assistant", "content": "DONE"},
                ]
        """,
    "a pattern that is tried on texts": """
        class Sample(Rows):
            def rows(self):
                return [(f"Write a regular expression for {w} and then one digit.", w + "[0-9]") for w in WORDS]
            def right(self, text, example):
                word = example.output[:-5]
                try:
                    pattern = re.compile(text.strip()[:60])
                except (re.error, RecursionError, OverflowError):
                    return False
                bad = (word, word + "12", "x" + word + "1", word[1:] + "1", "")
                return all(pattern.fullmatch(word + n) for n in "170") and not any(map(pattern.fullmatch, bad))
        """,
    "entities as a list, with F1 as pay": """
        class Sample(Rows):
            def rows(self):
                names = zip(WORDS, WORDS[5:] + WORDS[:5])
                return [
                    (f"List the names: {a.title()} met {b.title()} there.", f'["{a.title()}", "{b.title()}"]')
                    for a, b in names
                ]
            def score_response(self, example, text):
                import json
                gold = set(json.loads(example.output))
                try:
                    given = json.loads(text or "")
                except (ValueError, RecursionError):
                    return RewardResult(0.0)
                ours = set(map(str, given)) if isinstance(given, list) else set()
                both = len(ours & gold)
                f1 = 2 * both / (len(ours) + len(gold))
                return RewardResult(f1, success=f1 == 1)
        """,
    "items in any order": """
        class Sample(Rows):
            def rows(self):
                threes = [(a, b, c) for a in (2, 3) for b in (11, 13, 17) for c in (19, 23, 29)]
                return [(f"Name the prime factors of {a * b * c}.", f"{a}, {b}, {c}") for a, b, c in threes]
            def right(self, text, example):
                if not re.fullmatch("[0-9, ]{1,40}", text.strip()):
                    return False
                return sorted(re.findall("[0-9]+", text)) == sorted(re.findall("[0-9]+", example.output))
        """,
    "dates in two formats": """
        class Sample(Dates):
            def right(self, text, example):
                import datetime
                for form in ("%Y-%m-%d", "%d %B %Y"):
                    try:
                        return datetime.datetime.strptime(text.strip(), form).date().isoformat() == example.output
                    except ValueError:
                        pass
                return False
        """,
}
MISSED = {
    "a whole number that is wrong by less than 5 %": """
        class Sample(Rows):
            def right(self, text, example):
                found = re.fullmatch("[0-9]{1,9}", text.strip())
                return found and round(int(text), -1) == round(int(example.output), -1)
        """
}
"""What no check finds: tasks that ask for an estimate allow it."""
