"""Whether a bundle is whole, and gives the verdict that it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dsv32_reports.commands.common import Json, command
from dsv32_reports.verify import verify as verify_bundle
from dsv32_reports.wording import printable


@command
def verify(
    bundle: Annotated[Path, typer.Argument(help="Folder that a sign-off wrote.", show_default=False)],
    digest: Annotated[str, typer.Option(help="The digest that the sign-off printed (sha256:...).")] = "",
    json: Json = False,
) -> int:
    """Compute every bound, gate and verdict of a bundle again from its journal, and compare every file.

    Without --digest it finds every edit that leaves the manifest or the journal as it was; with the digest, any edit.

    Exit 0 if nothing differs, 1 with one line for each difference, 2 if the folder is no bundle.
    """
    if digest and not digest.startswith("sha256:"):
        raise ValueError(f"--digest is {digest!r}; give it as the sign-off printed it, sha256:...")
    problems, found = verify_bundle(bundle, digest)
    if json:
        print(msgspec.json.encode({"bundle": str(bundle), "digest": found, "problems": problems}).decode())
        return int(bool(problems))
    for problem in problems:
        print(f"CHANGED {printable(problem)}")
    if not problems:
        known = "the digest is the given one" if digest else "keep the digest elsewhere to see any later edit"
        print(f"VERIFIED {bundle}: files and verdict are what the journal gives; {known}\n{found}")
    return int(bool(problems))
