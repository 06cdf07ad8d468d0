"""What pyproject.toml cannot say: the description that a package index shows.

It is README.md, whose links lead to files beside it, of which an index has none. With the address
of the repository they would lead there; until there is one, their text stays, and pictures go.
"""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = ""  # such as https://github.com/owner/xla_fsdp/blob/main/, once it is published
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[\])*)\]\((?!https?:|#)([^)\s]+)\)")


def on_an_index(readme: str, repository: str) -> str:
    """Return the text with links that work where there are no files beside it."""

    def link(found: re.Match[str]) -> str:
        mark, text, path = found.groups()
        if not repository:
            return "" if mark else text
        # The address of a file is that of a page about it, which is no picture.
        return f"{mark}[{text}]({repository}{path}{'?raw=true' if mark else ''})"

    return LINK.sub(link, readme)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text("utf-8")
    setup(
        long_description=on_an_index(readme, REPOSITORY),
        long_description_content_type="text/markdown",
    )
