"""Where the data that comes with specnb lies: inside the package when installed, beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def data_path(name: str = "") -> Path:
    """The file or folder ``data/<name>`` that ships with specnb.

    An installed wheel carries it as ``specnb/data/<name>``; a checkout has it beside the package.

    Raises:
        ValueError: if there is no such data, with the names that there are.
    """
    homes = [PACKAGE / "data", PACKAGE.parent / "data"]
    for home in homes:
        if (home / name).exists():
            return home / name
    there = sorted(path.name for home in homes if home.is_dir() for path in home.iterdir())
    raise ValueError(f"specnb has no data named {name!r}. There is: {', '.join(there) or 'nothing; reinstall specnb'}.")
