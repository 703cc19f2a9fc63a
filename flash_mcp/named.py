"""Environments by name: `reasoning-gym:chain_sum`, wherever an environment is named.

The name stands for a folder of two files: an environment.py that calls the adapter with the dataset's name, and a
requirements.txt that pins the package. A run needs a version that never changes, so `train` publishes the folder, under
`reasoning-gym-chain_sum`, the first time. What configures a dataset goes through environment_args.
"""

from __future__ import annotations

from flash_mcp.environments import Files, inline_files, staged
from flash_mcp.errors import FlashError
from flash_mcp.store import EnvironmentRow, Store
from flash_mcp.tools import nearest

SOURCE = "reasoning-gym"
REQUIREMENT = "reasoning-gym==0.1.25"
DATASETS = """
ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation
binary_matrix bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic chain_sum circuit_logic codeio
coin_flip color_cube_rotation complex_arithmetic count_bits count_primes countdown course_schedule cryptarithm
decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships figlet_font
fraction_simplification futoshiki game_of_life game_of_life_halting gcd graph_color group_anagrams
gsm_symbolic intermediate_integration isomorphic_strings jugs kakurasu knight_swap knights_knaves
largest_island lcm leg_counting letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix
maze mini_sudoku modulo_grid n_queens needle_haystack number_filtering number_format number_sequence
number_sorting palindrome_generation palindrome_partitioning path_star polynomial_equations
polynomial_multiplication pool_matrix power_function prime_factorization products propositional_logic puzzle24
quantum_lock ransom_note rearc rectangle_count rotate_matrix rotten_oranges rubiks_cube rush_hour
self_reference sentence_reordering shortest_path simple_equations simple_geometry simple_integration sokoban
spell_backward spiral_matrix string_insertion string_manipulation string_splitting string_synthesis sudoku
survo syllogism time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting
zebra_puzzles
""".split()  # noqa: SIM905
"""All of that version but `composite`, which mixes others."""
ENVIRONMENT = '''"""The reasoning-gym dataset {dataset}; its arguments are those of the adapter's `load`."""

from environments.adapters import reasoning_gym


def load_environment(**kwargs):
    return reasoning_gym.load("{dataset}", **kwargs)
'''


def files_of(reference: str) -> Files | None:
    """The files that `reasoning-gym:DATASET` stands for; None for a reference of another kind.

    FlashError(unknown_environment) where there is no such dataset.
    """
    source, colon, dataset = reference.partition(":")
    if source != SOURCE or not colon:
        return None
    if dataset not in DATASETS:
        near = ", ".join(f"{SOURCE}:{name}" for name in nearest(dataset, DATASETS))
        fix = f"use {near}" if near else f"the datasets are: {', '.join(DATASETS)}"
        raise FlashError("unknown_environment", f"{SOURCE} has no dataset {dataset!r:.100}", fix=fix)
    source_text = ENVIRONMENT.format(dataset=dataset)
    return inline_files({"environment.py": source_text, "requirements.txt": f"{REQUIREMENT}\n"})


def published_name(reference: str) -> str:
    """The name under which `reasoning-gym:DATASET` is published."""
    return reference.replace(":", "-")


def environment(store: Store, reference: str) -> EnvironmentRow:
    """The version that a reference of any kind means; `reasoning-gym:DATASET` is published if it was not yet.

    FlashError(unknown_environment).
    """
    files = files_of(reference)
    if files is None:
        return store.environment(reference)
    with staged(published_name(reference), files, base=store.base) as stage:
        known = [row for row in store.environments() if row["path"] == str(stage.parent / stage.digest)]
        if known:
            return known[0]
        version = stage.commit()
    return store.add_environment(
        name=version.name, digest=version.digest, path=str(version.path), size_bytes=version.size_bytes
    )
