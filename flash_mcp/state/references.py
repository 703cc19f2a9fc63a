"""Environments by name: `reasoning-gym:chain_sum`, wherever an environment is named.

The name means a folder of two files: an environment.py that calls the adapter with the
dataset's name, and a requirements.txt that pins the package. A run needs a version that never
changes, so `train` publishes the folder, under `reasoning-gym-chain_sum`, the first time. What
configures a dataset goes through environment_args."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import environments
from environments import doors
from environments.process.requirements import REASONING_GYM
from flash_mcp.protocol import base_models
from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.errors import FlashError, nearest
from flash_mcp.protocol.records import LIVE_DEPLOYMENT, EnvironmentVersion, Json, Run
from flash_mcp.protocol.spec import Precision
from flash_mcp.state.owners import LOCAL_OWNER, caller, refuse_server_side
from flash_mcp.state.serving import find_deployment, saved_adapter
from flash_mcp.state.store import Store
from flash_mcp.state.versions import Files, folder_files, inline_files, staged

SOURCE = "reasoning-gym"
REGRESSION = "regression"
REGRESSION_FOLDER = Path(environments.__file__).parent / "regression"
OF_THE_PACKAGE = {"package": "flash-mcp"}
"""What is recorded of an environment that nobody pushed."""
DATASETS = """
ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation
binary_matrix bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic chain_sum circuit_logic
codeio coin_flip color_cube_rotation complex_arithmetic count_bits count_primes countdown
course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery
family_relationships figlet_font fraction_simplification futoshiki game_of_life game_of_life_halting
gcd graph_color group_anagrams gsm_symbolic intermediate_integration isomorphic_strings jugs
kakurasu knight_swap knights_knaves largest_island lcm leg_counting letter_counting letter_jumble
list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid n_queens
needle_haystack number_filtering number_format number_sequence number_sorting palindrome_generation
palindrome_partitioning path_star polynomial_equations polynomial_multiplication pool_matrix
power_function prime_factorization products propositional_logic puzzle24 quantum_lock ransom_note
rearc rectangle_count rotate_matrix rotten_oranges rubiks_cube rush_hour self_reference
sentence_reordering shortest_path simple_equations simple_geometry simple_integration sokoban
spell_backward spiral_matrix string_insertion string_manipulation string_splitting string_synthesis
sudoku survo syllogism time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal
word_sorting zebra_puzzles
""".split()  # noqa: SIM905
"""All of that version but `composite`, which mixes others."""
ENVIRONMENT = '''\
"""The reasoning-gym dataset {dataset}; its arguments are those of the adapter's `load`."""

from environments.adapters import reasoning_gym


def load_environment(**kwargs):
    return reasoning_gym.load("{dataset}", **kwargs)
'''


def files_of(reference: str) -> Files | None:
    """The files that `reasoning-gym:DATASET` means; None for a reference of another kind.

    FlashError(unknown_environment) where there is no such dataset.
    """
    source, colon, dataset = reference.partition(":")
    if source != SOURCE or not colon:
        return None
    if dataset not in DATASETS:
        near = ", ".join(f"{SOURCE}:{name}" for name in nearest(dataset, DATASETS))
        what = f"{SOURCE} has no dataset {dataset!r:.100}"
        fix = f"use {near}" if near else f"the datasets are: {', '.join(DATASETS)}"
        raise FlashError("unknown_environment", what, fix=fix)
    source_text = ENVIRONMENT.format(dataset=dataset)
    packages = "\n".join(REASONING_GYM)
    return inline_files({"environment.py": source_text, "requirements.txt": f"{packages}\n"})


def published_name(reference: str) -> str:
    """The name under which `reasoning-gym:DATASET` is published."""
    return reference.replace(":", "-")


def environment(store: Store, reference: str) -> EnvironmentVersion:
    """The version that a reference of any kind means; `reasoning-gym:DATASET` and the package's
    `regression` are published if they were not yet.

    FlashError(unknown_environment).
    """
    files = files_of(reference)
    data: Json = {}
    if reference == REGRESSION and _own_regression(store) is None:
        files = folder_files(REGRESSION_FOLDER)
        data = OF_THE_PACKAGE
    if files is None:
        return store.environment(reference)
    with staged(published_name(reference), files, base=store.base) as stage:
        for row in store.environments():
            if row.path == str(stage.parent / stage.digest):
                return row
        return store.publish(stage, data)[0]


def certificate_of(version: EnvironmentVersion) -> str | None:
    """The certificate of a version on one line, if it has one and they can be read here."""
    signing = doors.each("flash_mcp.versions").get("certificate")
    return signing and signing.line_of(version)


def regression_split(store: Store) -> Json:
    """The tasks that runs of the caller try before and after, as job.json names them: those of an
    environment of theirs called `regression`, or the package's.
    """
    row = _own_regression(store)
    if row:
        return {"name": row.name, "path": row.path, "owner": row.owner}
    return {"name": REGRESSION, "path": str(REGRESSION_FOLDER), "owner": LOCAL_OWNER}


def _own_regression(store: Store) -> EnvironmentVersion | None:
    for row in store.environments():
        is_own = row.name == REGRESSION and row.owner == caller().owner
        if is_own and row.data != OF_THE_PACKAGE:
            return row
    return None


RUN = re.compile(r"(?P<run>run-[0-9a-z]+)(?:@(?P<step>\d+))?")


@dataclass(frozen=True)
class Subject:
    """A model to evaluate: base model `model`, with the adapter of `run` at `step` on it where
    there is one.
    """

    model: str
    context: int | None = None
    step: int = 0
    run: Run | None = None
    adapter: Json | None = None
    deployment: str | None = None
    precision: Precision | None = None
    """That of its run, or of the server of its deployment."""

    @property
    def checkpoint(self) -> str | None:
        if self.run:
            return f"{self.run.id}@{self.step}"
        return None

    @property
    def env_files(self) -> list[str]:
        """Files that may have the secrets of its run."""
        return self.run.env_files if self.run else []

    @property
    def name(self) -> str:
        """For people: what was evaluated."""
        if self.run is None:
            return self.model
        served = f", which {self.deployment} serves" if self.deployment else ""
        start = ", before its training" if self.step == 0 else ""
        return f"{self.model} with {self.checkpoint}{served}{start}"


def base_model(name: str) -> ModelCard:
    """The card of a base model that the caller may name.

    Raises FlashError(unknown_model), and FlashError(local_only) for a folder where the caller is on
    another machine."""
    if base_models.is_folder(name):
        fix = "name a model that catalog(kind='models') lists, or a hub id as OWNER/NAME"
        refuse_server_side("a model folder", fix, model=name)
    return base_models.find(name)


def find_subject(store: Store, reference: str) -> Subject:
    """A base model, RUN, RUN@STEP (0: as before training), or a deployment by id, or, while it is
    served, by name.

    Raises FlashError(unknown_model | unknown_run | unknown_checkpoint | unknown_deployment |
    invalid_argument)."""
    if named := RUN.fullmatch(reference):
        return _checkpoint(store, named["run"], int(named["step"]) if named["step"] else None)
    if not base_models.is_named(reference):  # a deployment cannot replace a model
        rows = store.deployments(LIVE_DEPLOYMENT)
        is_live = any(reference in (row.id, row.name) for row in rows)
        if is_live or reference.startswith("dep-"):
            row = find_deployment(store, reference)
            served = row.id if is_live else None
            subject = _checkpoint(store, row.run_id, row.step)
            precision = store.precision_of(row.server_run) if served else None
            return replace(subject, deployment=served, precision=precision or subject.precision)
    card = base_model(reference)
    return Subject(card.name, card.context)


def _checkpoint(store: Store, run_id: str, step: int | None) -> Subject:
    run = store.run(run_id)
    if run.algorithm == "eval":
        what = f"{run_id} is an evaluation and has no model of its own"
        fix = f"name the model that it evaluated: {run.evaluation.checkpoint or run.model!r}"
        raise FlashError("invalid_argument", what, fix=fix)
    card = base_model(run.model)
    if step == 0:
        return Subject(card.name, card.context, 0, run, run.init_adapter, precision=run.precision)
    checkpoint = store.checkpoint(run_id, step)
    adapter = saved_adapter(store, run, checkpoint)
    step = checkpoint.step
    return Subject(card.name, card.context, step, run, adapter, precision=run.precision)


def split_size(store: Store, run: Run) -> int | None:
    """The tasks of the split that the run's evaluations take, as they were counted when it was
    started, else by env_push; None if that is not known.
    """
    if size := run.lineage.get("tasks", {}).get(run.eval_split):
        return size
    try:
        data = store.environment(run.environment_reference).data
    except FlashError:  # it was removed
        return None
    return data.get("tasks", {}).get(run.eval_split)
