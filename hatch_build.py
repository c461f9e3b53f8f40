"""What a package index shows: project links, and the README with absolute links.

The address of the repository stands once, as `repository` under `[tool.hatch.metadata.hooks.custom]` in
`pyproject.toml`. While it is empty the package has no links, and pictures of the README are not shown on an index.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectLinks(MetadataHookInterface):
    """Fill in `urls` and `readme`, which `pyproject.toml` declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the metadata of a build."""
        repository = self.config.get("repository", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository:
            metadata["urls"] = {
                "Repository": repository,
                "Issues": f"{repository}/issues",
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
            }
            text = with_absolute_links(text, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, repository: str) -> str:
    """Return Markdown whose relative links point into the repository; those of pictures to the files themselves."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\1{repository}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{repository}/blob/main/", text)
