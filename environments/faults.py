"""Faults of an environment, in the form that both sides of the process boundary use."""

import json
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from environments.untrusted_text import quoted


@dataclass(eq=False, repr=False)
class EnvironmentFault(Exception):
    """Environment code failed, or could not be given what it needs.

    `code` is an error code of TRAINING.md. Of these, invalid_argument means that settings.toml
    cannot be used or the environment refused its arguments, and not_ready that its packages are
    still being installed.

    `traceback` is the evidence. It may be empty. Environment code chose the words of `traceback`,
    and those of `what` if `is_foreign`: an agent may read them only as `wrote`, marked. `declared`
    are the secrets that environment.toml names. `refusals` counts what the API refused to an agent.
    """

    code: str
    what: str
    traceback: str = ""
    _: KW_ONLY
    is_foreign: bool = False
    declared: Sequence[str] = ()
    refusals: dict[str, int] = field(default_factory=dict[str, int])

    def __str__(self) -> str:
        return self.what

    def reworded(self, what: str, code: str = "") -> "EnvironmentFault":
        """The same fault in other words; a `code` replaces its own."""
        return replace(self, what=what, code=code or self.code)

    def wrote(self, characters: int) -> str:
        """What environment code wrote, with at most so much of the end of the traceback."""
        said = self.what if self.is_foreign else ""
        return f"{said}\n{self.traceback.strip()[-characters:]}".strip()

    @property
    def shown(self) -> str:
        """What happened, for a text that has other lines too."""
        return quoted(self.what) if self.is_foreign else self.what


FIXES = {
    "network_not_granted": "if the operator trusts its code with the network, add that name to "
    "`network` under [environments] in settings.toml of FLASH_HOME; or take `network` out of its "
    "environment.toml",
    "environments_busy": "call again when one of them has ended; the operator allows more with "
    "`at_once` or `at_once_per_owner` under [environments] in settings.toml of FLASH_HOME",
    "environment_unprotected": "use Linux with Landlock (5.13 or newer), which a container may "
    "have to allow; on another system, the server of a Linux machine: "
    "`flash-mcp install CLIENT --ssh USER@HOST`; or, for code that you trust with every file of "
    "this user, set `without_file_protection = true` under [environments] in settings.toml of "
    "FLASH_HOME",
    "environment_unsupported": "choose an environment that needs no container, browser or service, "
    "or another of the same package; docs/hubs.md lists some that run",
    "invalid_argument": "the server's operator corrects settings.toml in FLASH_HOME",
}
"""For faults that only the operator of the machine can remove."""

ARGUMENT_ERROR = re.compile(
    r"raised TypeError: (load_environment|(?!TaskExample\b|Reward)\w+\.__init__)\(\) "
    r"(got an unexpected|missing).* argument"
)
CALLER = re.compile(r'^ *File "[^"\n]+", line \d+, in (\S+)$', re.MULTILINE)


OFF_MAIN_THREAD = re.compile(
    r"^(\w+) raised (?:ValueError|RuntimeError): "
    r".*(?:\b(?:in|from) (?:the )?main thread|threaded environment due to usage of signal)",
    re.DOTALL,
)
"""What `signal` says, and what libraries say that use it for their time limits."""


IMPORT_CODES = ("environment_invalid", "environment_error")
MISSING_MODULE = re.compile(r"No module named '(\w+)")
SAID = (
    (
        r"raised LookupError: .*nltk\.download\('",
        "download the data that it names into the folder with `python -m nltk.downloader -d "
        "nltk_data NAME`, and call nltk.data.path.append(str(Path(__file__).parent / "
        "'nltk_data')) before use",
    ),
    (
        "which is no number",
        "wrap the object that the environment plays, so that its step returns a number",
    ),
    (
        "its action was the model's text",
        "if step takes another kind of action than text, give GymEnvironment a to_action, such as "
        "to_action=int, or to_action=lambda text: EchoAction(message=text)",
    ),
    (
        "^loading environment.py took longer",
        "let load_environment do less, for example with fewer generated tasks by environment_args; "
        "or call again when the machine is less busy",
    ),
)
"""What a fault says, and its fix."""


NO_WHEEL = re.compile(
    r"Wheels are required for `([\w.-]{1,60})`|No matching distribution found for ([\w.-]{1,60})"
    r"|([\w.-]{1,60})(?:==\S+)? ha(?:s|ve) no (?:usable )?wheels"
)
"""What uv writes if a package has no wheel, and its name."""


REASONING_GYM_BUILDS = ("cellpylib", "pycosat", "zss")
"""Packages that reasoning-gym requires and that have no wheel."""


def remedy(fault: EnvironmentFault) -> str | None:
    """The fix of a fault that wrong secrets, wrong environment_args, a call on the wrong thread or
    a missing wheel caused. None for other faults.

    It names a secret only if environment.toml declares it: any code can raise a KeyError with the
    name of a variable that it wants to see."""
    if called := OFF_MAIN_THREAD.match(fault.what):
        if called[1] in ("score_episode", "score_group"):
            what = "set max_score_concurrency = 1 on the environment"
            return f"{what}: {called[1]} then runs on the main thread, one call at a time"
        what = "only load_environment and, with max_score_concurrency = 1, score_episode run on it"
        return f"do this in score_episode, or turn off the time limit of that library: {what}"
    if (module := MISSING_MODULE.search(fault.what)) and fault.code in IMPORT_CODES:
        # Only a name that this interpreter knows: the other one is foreign text.
        from importlib.metadata import packages_distributions  # noqa: PLC0415  a sixth of the start of a process

        packages = packages_distributions().get(module[1], ["the package of that module"])
        return (
            f"add {packages[0]} to requirements.txt next to environment.py. That file has to name "
            "every package that the environment imports: it sees no others"
        )
    for said, fix in SAID:
        if re.search(said, fault.what, re.DOTALL):
            return fix
    if fault.code == "invalid_argument" and fault.is_foreign:
        return "correct environment_args as it says"
    if fault.code == "requirements_failed" and (wheel := NO_WHEEL.search(fault.what)):
        names = list(filter(None, wheel.groups()))
        if "reasoning-gym" in fault.what:
            names = list(REASONING_GYM_BUILDS)
        return (
            f"{', '.join(names)} has no wheel for this Python: choose a version that has one; or "
            "the operator allows the build in settings.toml: [environments] build_from_source = "
            f"{json.dumps(names)}"
        )
    is_load = fault.code == "environment_invalid"
    key = re.search(r"raised KeyError: '([A-Z][A-Z0-9_]+)'", fault.what)
    # After loading, a dict of the environment's own may have lacked such a key, too.
    if key and (is_load or re.search(r"\benviron\b", fault.traceback)):
        if key[1] in fault.declared:
            return (
                f"pass secrets=[{key[1]!r}], if the user lets this environment read that variable "
                "of the server: its environment.toml declares it"
            )
        return (
            "if the code needs a variable of the server, declare it in environment.toml: "
            'secrets = ["NAME"]. Pass it only if the user agrees'
        )
    return _argument_fix(fault) if is_load else None


def _argument_fix(fault: EnvironmentFault) -> str | None:
    arguments = ARGUMENT_ERROR.search(fault.what)
    if arguments is None:
        return None
    # environment_args reach load_environment and what it calls itself, such as a class with **args.
    callers = CALLER.findall(fault.traceback)
    if arguments[1] != "load_environment" and callers[-1:] != ["load_environment"]:
        return None
    if arguments[2] == "missing":
        return "pass the argument that it names in environment_args, or give it a default"
    return "leave the argument that it names out of environment_args, or let the code accept it"
