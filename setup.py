"""What pyproject.toml cannot say: the description that a package index shows.

It is README.md, whose links lead to files beside it, of which an index has none. With the address
of the repository they would lead there; until there is one, their text stays, and pictures go.
"""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = ""  # such as https://example.org/xla_fsdp/blob/main/, once it is published
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[\])*)\]\((?!https?:)([^)\s]+)\)")


def on_an_index(readme: str) -> str:
    """Return the text with links that work where there are no files beside it."""
    if REPOSITORY:
        return LINK.sub(rf"\1[\2]({REPOSITORY}\3)", readme)
    return LINK.sub(lambda link: "" if link[1] else link[2], readme)


if __name__ == "__main__":
    setup(
        long_description=on_an_index(Path(__file__).with_name("README.md").read_text("utf-8")),
        long_description_content_type="text/markdown",
    )
