"""``dora eval``"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dora.errors import InvalidValue
from dora.ops.cli.control.service import ask
from dora.ops.cli.exits import ExitCode
from dora.ops.cli.options import AddressOption, JsonOption, TokenOption
from dora.ops.cli.output import json_text, print_result, progress_bar, stderr
from dora.ops.stored_token import DEFAULT_ADDRESS

if TYPE_CHECKING:
    from dora.client import Evaluation, Prompts

EXAMPLE: Final = "dora eval test.jsonl --samples 4 --by level --out out/eval"
LATEST: Final = "latest"
RECORD_FILE: Final = "trajectories.jsonl"
REPORT_FILE: Final = "evaluation.json"


def evaluate(
    prompts: Annotated[
        str, typer.Argument(metavar="PROMPTS", help="A .jsonl or .parquet file, or a dataset folder, as `--prompts`.")
    ],
    version: Annotated[
        str, typer.Option(metavar="VERSION", help="A live version, or latest: the newest that workers may load.")
    ] = LATEST,
    share: Annotated[
        float,
        typer.Option(
            help="Share of that version's slots and KV, and of the workers, allotted to the evaluation: 0 to 0.5. "
            "With 0 it uses only slots that training leaves idle."
        ),
    ] = 0.0,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Responses per prompt; default: the file's.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="For all prompts; default: the file's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="For each response; default: the file's.")] = None,
    by: Annotated[str, typer.Option(metavar="COLUMN", help="Add a row for each value of this column.")] = "",
    other_columns: Annotated[
        str, typer.Option(metavar="WHAT", help="For columns that are not prompt fields: refuse, ignore, or verifier.")
    ] = "refuse",
    split: Annotated[str, typer.Option(help="Of a dataset's folder.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use only the first N prompts.")] = None,
    name: Annotated[str, typer.Option(help="Name shown by `dora status`.")] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder for the trajectories and the scores.")
    ] = None,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sample and score prompts under one policy version while training continues. No step trains on them.

    The evaluation keeps its version until it is done. It ends early if service.evaluation_versions other versions are
    kept already, if the weights cannot be loaded, or if the service drains. The command then shows the results so far
    with the reason, and exits with 1. Ctrl-C cancels the evaluation.
    """
    from dora.client import Prompts
    from dora.ops.view.evaluation import evaluation_table, report_of

    rows, value_of = _prompts(prompts, split, other_columns, by, limit)
    for row in rows:
        _override(row, samples, temperature, max_tokens)
    pinned = None if version == LATEST else _version(version)
    record = None if out is None else _new_record(out)

    async def run(client: "Prompts") -> "Evaluation":
        evaluation = client.evaluate(rows, version=pinned, share=share, name=name)
        with progress_bar(stderr(), "evaluating") as tell:
            async for group in evaluation:
                if record is not None:
                    lines = [json.dumps(each.to_json_dict(), allow_nan=False) for each in group.trajectories]
                    record.write("".join(f"{line}\n" for line in lines))
                done = len(evaluation.groups)
                tell(done / len(rows), f"v{evaluation.version}, {done:,} of {len(rows):,} prompts")
        return evaluation

    try:
        evaluation = ask(address, token, run, Prompts)
    finally:
        if out is not None and record is not None:
            record.close()
            if not (out / RECORD_FILE).stat().st_size:  # no results: the folder may be used again
                (out / RECORD_FILE).unlink()
    report = report_of(evaluation, by, value_of)
    tree = asdict(report)
    if out is not None:
        (out / REPORT_FILE).write_text(json_text(tree, indent=2) + "\n")
    print_result(tree, evaluation_table(report), as_json)
    if not report.whole:
        raise typer.Exit(ExitCode.FAILED)


def _prompts(
    source: str, split: str, other_columns: str, by: str, limit: int | None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    from itertools import islice

    from dora.config import PromptsConfig
    from dora.prompts.files import is_file_source, prompt_rows

    if not is_file_source(source):
        raise InvalidValue("PROMPTS", source, "a .jsonl or .parquet file, or a dataset's folder")
    if other_columns not in ("refuse", "ignore", "verifier"):
        raise InvalidValue("--other-columns", other_columns, "refuse, ignore, or verifier")
    rows: list[dict[str, Any]] = []
    value_of: dict[str, str] = {}
    for number, (place, row) in enumerate(islice(prompt_rows(PromptsConfig(source=source, split=split)), limit), 1):
        fields = {field: row[column] for field, column in place.columns.items() if column in row}
        others = {column: value for column, value in row.items() if column not in place.columns.values()}
        for column in sorted(others.keys() - {by}) if other_columns == "refuse" else ():
            raise place.invalid(column, others[column], "a field of a prompt, or covered by --other-columns")
        if other_columns == "verifier":
            fields["verifier"] = {**others, **fields.get("verifier", {})}
        stem = Path(source).stem
        fields = {"prompt_id": f"{stem}:{number}", "task_id": stem, **fields}
        if by:
            values = {**fields.get("verifier", {}), **fields, **others}
            if by not in values:
                raise place.invalid(by, "(none)", "a column of every row, because --by names it")
            value_of[str(fields["prompt_id"])] = str(values[by])
        rows.append(fields)
    if not rows:
        raise InvalidValue("PROMPTS", source, "a file with at least one prompt")
    return rows, value_of


def _override(row: dict[str, Any], samples: int | None, temperature: float | None, max_tokens: int | None) -> None:
    overrides = {"temperature": temperature, "max_tokens": max_tokens}
    sampling = {**row.get("sampling", {}), **{key: value for key, value in overrides.items() if value is not None}}
    if sampling:
        row["sampling"] = sampling
    if samples is not None:
        row["group_size"] = samples


def _version(version: str) -> int:
    if not version.isdecimal():
        raise InvalidValue("--version", version, f"a live version of `dora versions`, or {LATEST}")
    return int(version)


def _new_record(folder: Path) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / RECORD_FILE).open("x", encoding="utf-8")
    except FileExistsError as error:
        raise InvalidValue("--out", str(folder), f"a folder without a {RECORD_FILE}") from error
    except OSError as error:
        raise InvalidValue("--out", str(folder), f"a writable folder ({error.strerror})") from error
