"""``dora trajectories --show``"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dora.ops.cli.output import print_json, stderr, stdout

if TYPE_CHECKING:
    from dora.data.conversation import Decode


def show_conversation(trajectory_id: str, record: Path, as_json: bool) -> None:
    """Prints a recorded session. Raises NotFound, and InvalidValue for a folder that is no record."""
    from dora.data.conversation import conversation_of, find_session
    from dora.ops.view.conversation import TEXT_INDENT, conversation_lines
    from dora.ops.view.tables import WIDEST, Note

    branches = find_session(record, trajectory_id)
    found = conversation_of(branches, _decoder(record, branches[0].behaviour_version))
    if as_json:
        print_json(asdict(found))
        return
    console = stdout()
    for line in conversation_lines(found):
        if console.is_terminal:
            console.print(Note(line, indent=len(TEXT_INDENT), widest=WIDEST))
        else:
            console.print(line, soft_wrap=True)


def _decoder(record: Path, version: int) -> "Decode | None":
    """Returns the model's decoder, from the record's versions; None, with the reason on stderr, if none loads."""
    from dora.data.run_record import VERSIONS_FOLDER
    from dora.errors import InvalidValue
    from dora.prompts.tokenizer import ChatTokenizer

    versions = record / VERSIONS_FOLDER
    others = sorted(each for each in versions.glob("*") if each.name.isdigit())
    reason = f"{versions} has no version"
    for folder in dict.fromkeys((versions / str(version), *others[:1])):
        if not folder.is_dir():
            continue
        try:
            tokenizer = ChatTokenizer(folder)
        except InvalidValue as error:
            reason = str(error)
            continue
        return lambda token_ids: tokenizer.decode(token_ids, special_tokens=True)
    stderr().print(f"dora: token ids are shown, as no tokenizer can be loaded: {reason}", markup=False, soft_wrap=True)
    return None
