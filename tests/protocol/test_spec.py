from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_mcp.protocol.base_models import find, parameters_in_name, unpinned
from flash_mcp.protocol.errors import CODES, FlashError
from flash_mcp.protocol.spec import RECIPES, EvalSpec, RunSpec, read_toml, resolve, stored_spec, validate


def test_unset_fields_take_the_recipes_value_and_say_so():
    resolved = resolve(validate({"environment": "calculator", "steps": 7}))
    assert (resolved.spec.steps, resolved.sources["steps"]) == (7, "argument")
    assert (resolved.spec.lora_rank, resolved.sources["lora_rank"]) == (32, "recipe")
    assert (resolved.spec.learning_rate, resolved.sources["learning_rate"]) == (2e-4, "recipe")
    assert resolved.sources["init_from_adapter"] == "default"
    spec = validate({"environment": "calculator", "steps": 3, "seed": 4})
    assert resolve(spec, file_fields=frozenset({"seed"})).sources["seed"] == "file"


def test_a_stored_spec_lacks_fields_that_are_newer_and_has_some_that_exist_no_more():
    # Valid when the run was created: the model's context decided max_length afterwards.
    fields = {"environment": "e@1", "algorithm": "sft", "max_tokens": 512, "max_length": 128}
    spec = stored_spec({**fields, "batch_size": 3, "gone": 1})
    assert isinstance(spec, RunSpec)
    given = (spec.max_tokens, spec.max_length, spec.batch_size)
    assert (*given, spec.epochs, spec.lora_rank) == (512, 128, 3, 2.0, 32)
    evaluation = stored_spec({"algorithm": "eval", "tasks": [3], "temperature": 0.0})
    assert isinstance(evaluation, EvalSpec)
    assert (evaluation.tasks, evaluation.temperature, evaluation.top_p) == ([3], 0.0, 1.0)


@pytest.mark.parametrize("algorithm", RECIPES)
def test_a_recipe_fills_every_field_but_those_that_the_model_or_the_task_decide(algorithm: str):
    teacher = {"teacher": "run-1"} if algorithm == "distill" else {}
    spec = resolve(validate({"environment": "calculator", "algorithm": algorithm, **teacher})).spec
    empty = {name for name, value in spec.model_dump().items() if value is None}
    of_algorithm = {"grpo": {"epochs", "teacher"}, "sft": {"steps", "group_size", "teacher"}, "distill": {"epochs"}}
    always = "max_length init_from_adapter dataset question answer max_hours max_cost finish_by slurm"
    assert empty == {*always.split()} | of_algorithm[algorithm]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "environment"),
        ({"environment": ""}, "environment"),
        ({"environment": "e", "steps": 0}, "steps"),
        ({"environment": "e", "steps": -3}, "steps"),
        ({"environment": "e", "group_size": 1}, "group_size"),
        ({"environment": "e", "algorithm": "distill"}, "teacher"),
        ({"environment": "e", "teacher": "run-1"}, "algorithm='distill'"),
        ({"environment": "e", "learning_rate": 0}, "learning_rate"),
        ({"environment": "e", "algorithm": "ppo"}, "algorithm"),
        ({"environment": "e", "epochs": 1}, "epochs"),
        ({"environment": "e", "max_staleness": 1, "importance_sampling": "none"}, "needs importance_sampling"),
        ({"environment": "e", "max_staleness": 1, "algorithm": "sft"}, "algorithm='grpo'"),
        ({"environment": "e", "loss_type": "cispo", "importance_sampling": "none"}, "token_truncate"),
        ({"environment": "e", "algorithm": "sft", "group_size": 4}, "group_size"),
        ({"environment": "e", "max_tokens": 600, "max_length": 500}, "max_tokens=600"),
        ({"environment": "e", "temperature": 0.009}, "temperature"),
        ({"environment": "e", "temperature": 2.1}, "temperature"),
        ({"environment": "e", "stepz": 3}, "stepz"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(fields: dict[str, object], named: str):
    with pytest.raises(FlashError) as caught:
        validate(fields)
    assert caught.value.code == "invalid_argument" and named in caught.value.what


def test_several_wrong_fields_are_explained_one_a_line():
    with pytest.raises(FlashError) as caught:
        validate({"environment": "e", "steps": 0, "group_size": 0})
    lines = caught.value.what.strip().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["steps", "group_size"] and "got 0" in lines[0]
    with pytest.raises(FlashError) as caught:  # the only error that it causes
        validate({"environment": "e", "algorithm": "ppo"})
    assert caught.value.what.startswith("algorithm: ")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("steps = ", "is no TOML"),
        ("stepz = 3", "stepz"),
        ("[train]\nrank = 3", "rank"),
        ("steps = 1\n[t]\nsteps = 2", "twice"),
    ],
)
def test_a_toml_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, named: str):
    path = tmp_path / "rl.toml"
    path.write_text(text)
    with pytest.raises(FlashError, match="invalid_argument") as caught:
        read_toml(path)
    assert named in str(caught.value)
    with pytest.raises(FlashError, match="cannot be read"):
        read_toml(tmp_path / "none.toml")


def test_tables_of_a_toml_file_only_group_fields_and_one_for_the_freesolo_sdk_is_understood(tmp_path: Path):
    path = tmp_path / "rl.toml"
    tables = "[train]\nsteps = 3\n[rollouts]\ntemperature = 0.5\n[environment_args]\nlevel = 2\n"
    path.write_text(f'environment = "e"\n{tables}')
    grouped = {"environment": "e", "steps": 3, "temperature": 0.5, "environment_args": {"level": 2}}
    assert read_toml(path) == grouped
    text = '[environment]\nid = "sums"\nparams = {hard = true}\n[train]\nsteps = 3\nseeds = '
    path.write_text(f"{text}[7]\n")
    asked = {"environment": "sums", "environment_args": {"hard": True}, "steps": 3, "seed": 7}
    assert read_toml(path) == asked
    path.write_text(f"{text}[7, 8]\n")
    assert read_toml(path) == {**asked, "seeds": [7, 8]}
    path.write_text(f"{text}7\n")
    with pytest.raises(FlashError, match="seeds = 7, which is no list"):
        read_toml(path)


@pytest.mark.parametrize(
    ("fields", "calls"),
    [({}, 32), ({"batch_size": 16}, 128), ({"batch_size": 16, "max_staleness": 1}, 256), ({"batch_size": 99}, 256),
     ({"batch_size": 16, "env_concurrency": 4}, 4)],
)  # fmt: skip
def test_the_calls_of_all_rollouts_that_the_engine_advances_may_run(fields: dict[str, int], calls: int) -> None:
    assert resolve(RunSpec(environment="e", group_size=8, **fields)).spec.env_concurrency == calls


@pytest.mark.parametrize(
    ("name", "parameters", "grpo", "sft"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 135e6, 2e-4, 5e-4),
        ("Qwen/Qwen3.5-0.8B", 0.8e9, 5e-5, 2e-4),
        ("google/gemma-4-E2B-it", 2e9, 2e-5, 1e-4),
        ("Qwen/Qwen3.6-35B-A3B@" + 40 * "b", 35e9, 2e-5, 1e-4),
        ("openai/gpt-oss-20b", 20e9, 2e-5, 1e-4),
        ("zai-org/GLM-4.7-Flash", None, 2e-4, 5e-4),
    ],
)
def test_the_default_learning_rate_falls_with_the_size_that_a_models_name_tells(
    name: str, parameters: float | None, grpo: float, sft: float
):
    assert parameters_in_name(unpinned(name)[0]) == parameters
    for algorithm, rate in (("grpo", grpo), ("sft", sft)):
        resolved = resolve(RunSpec(environment="e", algorithm=algorithm), parameters=parameters)
        assert resolved.spec.learning_rate == rate and resolved.sources["learning_rate"] == "recipe"
    own = resolve(RunSpec(environment="e", learning_rate=1e-3), parameters=parameters)
    assert own.spec.learning_rate == 1e-3


def test_every_field_has_a_description_and_no_two_recipes_name_another():
    assert all(info.description for info in RunSpec.model_fields.values())
    assert {name for recipe in RECIPES.values() for name in recipe} <= set(RunSpec.model_fields)


VALUES = st.dictionaries(st.sampled_from(["a", "b"]), st.integers())


@given(st.sampled_from(sorted(CODES)), st.text(max_size=300), st.text(max_size=50), VALUES)
def test_an_error_survives_the_way_through_json(code: str, what: str, fix: str, values: dict[str, int]):
    error = FlashError(code, what, fix=fix, **values)
    assert str(FlashError.from_dict(error.to_dict())) == str(error)


def test_a_code_that_is_not_registered_is_refused():
    with pytest.raises(ValueError, match="unregistered"):
        FlashError("oops", "what")


@pytest.mark.parametrize(("name", "code"), [("a" * 300, "unknown_model"), ("/" + "a" * 300, "invalid_argument")])
def test_a_name_that_is_too_long_for_a_path_is_refused(name: str, code: str) -> None:
    with pytest.raises(FlashError) as caught:
        find(name)
    assert caught.value.code == code
