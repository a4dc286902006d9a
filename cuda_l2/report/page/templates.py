"""The pages' templates: everything that they are given is escaped, except what they call safe."""

import functools
from pathlib import Path
from typing import Any

from cuda_l2.system.files import imported

HERE = Path(__file__).parent


@functools.cache
def template(name: str) -> Any:
    """One of the templates of `page/` and `watch/`. UserError where a package is missing."""
    jinja = imported("jinja2", "a page needs", "report")
    environment = jinja.Environment(
        loader=jinja.FileSystemLoader([HERE, HERE.parent / "watch"]),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
