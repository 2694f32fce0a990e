"""Made-up implicit data in the files of Taobao."""

from __future__ import annotations

import random
from pathlib import Path


def implicit_files(folder: Path, num_users: int = 60, num_items: int = 40) -> Path:
    """Users who choose items of their own parity, seven each, one of them held out for the test."""
    folder.mkdir()
    draw = random.Random(0)
    chosen = {user: draw.sample(range(user % 2, num_items, 2), 7) for user in range(num_users)}
    files = {
        "u.user": [f"{user} {user % 5} {user % 2} 1 2 0 3 0 {user % 3}" for user in chosen],
        "u.item": [f"{item} {item % 3} {item % 2} 1" for item in range(num_items)],
        "train.txt": [f"{user} {' '.join(map(str, items[:-1]))}" for user, items in chosen.items()],
        "test.txt": [f"{user} {items[-1]}" for user, items in chosen.items()],
    }
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder
