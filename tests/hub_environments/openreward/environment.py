"""The environment that `orwd init` of openreward writes: one sum a split, answered by a tool."""

import sys
import tempfile
from importlib import import_module
from importlib.resources import files
from pathlib import Path


def load_environment():
    folder = Path(tempfile.mkdtemp())
    template = files("openreward") / "templates" / "basic" / "server.py.tmpl"
    (folder / "template_server.py").write_text(template.read_text())
    sys.path.insert(0, str(folder))
    return import_module("template_server").BasicEnvironment
