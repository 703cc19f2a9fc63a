"""Each episode has random generators of its own, under the names of the global ones.

    switch_global_generators()           # once, before environment code is imported
    generators = Generators(task_id)     # a new episode; equal seeds draw equal numbers
    generators.use()                     # what runs in this context draws from them

Games draw from the global generators of `random`, `numpy.random` and torch (on the CPU), and many
episodes run in one process. With a shared generator an episode's game would depend on what the
others draw, so the rollouts of a group would play different games. Code that runs outside of every
episode, such as load_environment and threads that the code itself starts, draws from the process's
generators.
Generators that code makes itself are its own. torch's generator has no switch: each function that
draws from it gets the episode's state first. The gate's isolation check finds code that draws in
another way."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TORCH_SEEDS = ("seed", "manual_seed", "initial_seed", "get_rng_state", "set_rng_state")
TORCH_FUNCTIONS = """
bernoulli binomial dropout multinomial normal poisson rand rand_like randint randint_like randn
randn_like randperm _sample_dirichlet _standard_gamma
""".split()  # noqa: SIM905
TORCH_METHODS = """
bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_
uniform_
""".split()  # noqa: SIM905
_torch_lock = threading.RLock()


class Generators:
    def __init__(self, seed: str) -> None:
        self._seed = seed.encode(errors="backslashreplace")  # a task's id may have no UTF-8 form
        self.python = random.Random(self._seed)
        self._numpy: Any = None
        self._torch: Any = None

    def use(self) -> None:
        """Make what runs from here on in this context draw from these generators."""
        _current.set(self)

    def numpy(self, make: Callable[[int], Any]) -> Any:
        """numpy's RandomState, made by `make(seed)` when it is first used."""
        if self._numpy is None:
            self._numpy = make(random.Random(self._seed).getrandbits(32))
        return self._numpy

    def draw_torch(self, shared: Any, function: Callable[[], Any]) -> Any:
        """Call `function` while `shared`, torch's global generator, is in this episode's state."""
        with _torch_lock:
            before = shared.get_state()
            if self._torch is None:
                shared.manual_seed(random.Random(self._seed).getrandbits(32))
            else:
                shared.set_state(self._torch)
            try:
                return function()
            finally:
                self._torch = shared.get_state()
                shared.set_state(before)


_current: ContextVar[Generators | None] = ContextVar("generators", default=None)


def switch_global_generators() -> None:
    """Replace the functions of `random` and, once they are imported, of numpy.random and torch."""
    shared: random.Random = random._inst  # type: ignore[attr-defined]
    for name in random.__all__:
        if getattr(getattr(random, name), "__self__", None) is shared:
            _draw_by_episode(random, name, shared, name, lambda episode: episode.python)
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Switches numpy.random and torch when they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        switch = {"numpy.random": _switch_numpy, "torch": _switch_torch}.get(fullname)
        if switch is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_switch(module: ModuleType) -> None:
                execute(module)
                switch(module)

            spec.loader.exec_module = execute_and_switch
        return spec


def _switch_numpy(module: Any) -> None:
    """Replace the functions that draw from numpy's global RandomState."""
    shared = module.mtrand._rand
    # Three functions that are methods of it under another name.
    methods = {"seed": "seed", "ranf": "random_sample", "sample": "random_sample"}
    for name in dir(module):
        if getattr(getattr(module, name), "__self__", None) is shared:
            methods[name] = name

    def own(episode: Generators) -> Any:
        return episode.numpy(module.RandomState)

    for name, method in methods.items():
        _draw_by_episode(module, name, shared, method, own)


def _draw_by_episode(
    module: ModuleType, name: str, shared: Any, method: str, own: Callable[[Generators], Any]
) -> None:
    """Make a function that is a method of `shared`, the process's generator, draw from an episode's
    `own` within one.
    """

    @functools.wraps(getattr(shared, method))
    def draw(*args: Any, **kwargs: Any) -> Any:
        current = _current.get()
        state = shared if current is None else own(current)
        return getattr(state, method)(*args, **kwargs)

    draw.__module__, draw.__qualname__ = module.__name__, name  # by which it is pickled
    setattr(module, name, draw)


def _switch_torch(module: Any) -> None:
    """Replace the functions and methods that draw from torch's generator for the CPU."""
    owners = (
        (module, (*TORCH_FUNCTIONS, *TORCH_SEEDS)),
        (module.random, TORCH_SEEDS),
        (module.nn.functional, ("dropout",)),
        (module.Tensor, TORCH_METHODS),
    )
    for owner, names in owners:
        for name in names:
            setattr(owner, name, _drawn_in_turn(getattr(owner, name), module.default_generator))


def _drawn_in_turn(function: Callable[..., Any], shared: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        current = _current.get()
        if current is None:
            with _torch_lock:
                return function(*args, **kwargs)
        return current.draw_torch(shared, functools.partial(function, *args, **kwargs))

    return draw
