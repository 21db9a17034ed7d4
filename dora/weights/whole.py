"""The files beside the weights in a version's folder, and the check that all are unchanged since it arrived."""

import json
import os
from pathlib import Path
from typing import Final

from dora.data.types import Canary
from dora.errors import InvalidValue, NotFound
from dora.weights.files import sum_of
from dora.weights.holds import name_of
from dora.weights.manifest import Manifest, ManifestFile, read_manifest
from dora.weights.reference import INDEX_FILE, WEIGHTS_FILE, open_regular

MANIFEST_FILE: Final = "dora-manifest.json"
CANARY_FILE: Final = "dora-canary.json"


def manifest_in(folder: Path) -> Manifest:
    """Returns the manifest without its canary. Raises NotFound if there is none, InvalidValue if it is damaged."""
    file = folder / MANIFEST_FILE
    try:
        return read_manifest(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFound("manifest", str(file), "in the folder of a published version") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue("manifest", str(file), f"a readable JSON file ({error})") from error


def canary_in(folder: Path) -> Canary | None:
    """Returns the canary, or None if the version was published without one. Raises InvalidValue if it is damaged."""
    file = folder / CANARY_FILE
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        return Canary(tuple(stored["token_ids"]), tuple(stored["logprobs"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidValue("canary", str(file), f"a file written by a store ({error})") from error


def write_canary(folder: Path, canary: Canary) -> None:
    unfinished = folder / f".{CANARY_FILE}"
    unfinished.write_text(json.dumps({"token_ids": canary.token_ids, "logprobs": canary.logprobs}))
    os.rename(unfinished, folder / CANARY_FILE)


def index_of(manifest: Manifest) -> str:
    """Returns the index by which loaders find tensors, or an empty text if they are in one file of the usual name."""
    if {file.name for file in manifest.files} == {WEIGHTS_FILE}:
        return ""
    weight_map = {each.header.name: each.file for each in manifest.tensors}
    total_bytes = sum(each.header.content_bytes for each in manifest.tensors)
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def is_sound(folder: Path) -> bool:
    """Whether ``folder`` has a version whose files all match its manifest. Reads every byte of them."""
    try:
        manifest = manifest_in(folder)
        canary_in(folder)
        index = index_of(manifest)
        return (
            name_of(folder) == manifest.name
            and (not index or (folder / INDEX_FILE).read_text(encoding="utf-8") == index)
            and all(_is_sound_file(folder / file.name, file) for file in manifest.files)
        )
    except (InvalidValue, OSError, UnicodeDecodeError):
        return False


def _is_sound_file(path: Path, file: ManifestFile) -> bool:
    with open_regular(path) as stream:
        return os.fstat(stream.fileno()).st_size == file.file_bytes and all(
            sum_of(stream.read(file.chunk(index)[1])) == file.sums[index] for index in range(file.chunks)
        )
