"""``dora profile``"""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import tomli_w
import typer

from dora.data.engine_samples import ClockName
from dora.data.extras import install
from dora.errors import DoraError, InvalidValue
from dora.ops.cli import completion
from dora.ops.cli.exits import ExitCode, say
from dora.ops.cli.options import JsonOption
from dora.ops.cli.output import print_json, stderr, stdout
from dora.system.files import check_folder

if TYPE_CHECKING:
    from dora.data.engine_samples import Measurement
    from dora.lab.planning.profile import Fit, Validation

EXAMPLE = "dora profile --model smollm2 --out cost.toml"
CONTEXT_TOKENS: Final = 1024  # long enough to measure the cost of a cached token
FORMATS: Final = (".toml", ".json")
Dtype = Literal["float32", "bfloat16"]


def profile(
    model: Annotated[
        str,
        typer.Option(
            autocompletion=completion.models, help="smollm2, tiny, tiny-moe, tiny-hybrid, or a Hugging Face folder."
        ),
    ] = "smollm2",
    slots: Annotated[int, typer.Option(help="Concurrent requests of the engine.")] = 8,
    kv_tokens: Annotated[int, typer.Option(help="The engine's KV cache, in tokens.")] = 16384,
    max_model_len: Annotated[
        int, typer.Option(help=f"Tokens of prompt and response; 0: the model's limit, at most {CONTEXT_TOKENS}.")
    ] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Number format of weights and KV.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the engine.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the prompts and the order of the timed steps.")] = 0,
    rounds: Annotated[
        int, typer.Option(min=1, help="Repetitions of the whole measurement; the fastest time of each step counts.")
    ] = 4,
    clock: Annotated[
        ClockName,
        typer.Option(help="Clock for the steps; cpu: the engine's CPU time, for a busy machine and a single thread."),
    ] = "wall",
    engines: Annotated[
        int, typer.Option(min=1, help="Engines to time at the same time, as they will run; their typical steps count.")
    ] = 1,
    tolerance: Annotated[
        float, typer.Option(help="Largest relative error allowed for the predicted throughput.")
    ] = 0.15,
    out: Annotated[Path | None, typer.Option(help="Output file for the coefficients: FILE.toml or FILE.json.")] = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="Write the file even if the check fails.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Time an engine's steps, fit the cost model to them, and check it against a mixed workload.

    The coefficients go into a scenario's ``cluster.cost``. For a mixture of experts they include how evenly it uses its
    experts. The predicted throughput is compared with the timed steps and, if the machine was quiet, with the clock. If
    the prediction is off by more than the tolerance, the machine was busy or the cost model does not describe the
    engine: the command then exits with 1 and writes nothing.
    """
    if out is not None:
        if out.suffix not in FORMATS:
            raise InvalidValue("--out", str(out), f"a file name ending in {' or '.join(FORMATS)}")
        check_folder("--out", out)
    if not 0.0 < tolerance < 1.0:
        raise InvalidValue("--tolerance", tolerance, "above 0, below 1")
    if clock == "cpu" and threads > 1:
        raise InvalidValue("--clock", clock, f"wall for an engine of {threads} threads: cpu measures only one thread")
    measurement = _measure(model, slots, kv_tokens, max_model_len, dtype, threads, seed, rounds, clock, engines)
    conclude(model, measurement, tolerance, out, force=force, as_json=as_json)


def conclude(
    model: str, measurement: "Measurement", tolerance: float, out: Path | None, *, force: bool, as_json: bool
) -> None:
    """Fits, checks and shows the cost. Writes ``out`` if the check passes or with ``force``; else exits with 1."""
    from dora.lab.planning.profile import fit, validate
    from dora.ops.view.profile import profile_table, profile_tree

    fitted = fit(measurement.decode, measurement.prefill, measurement.experts, measurement.drafts)
    checked = validate(fitted.coefficients, measurement)
    passed = checked.passed(tolerance)
    if as_json:
        print_json(profile_tree(model, measurement, fitted, checked, tolerance))
    else:
        stdout().print(profile_table(model, measurement, fitted, checked, tolerance))
        stdout().print(coefficients_text(fitted, ".toml"), end="", soft_wrap=True, markup=False)
    if out is not None and (passed or force):
        out.write_text(coefficients_text(fitted, out.suffix))
    if not passed:
        for line in failure(fitted, checked, tolerance, None if force else out):
            say(line)
        raise typer.Exit(ExitCode.FAILED)


def failure(fitted: "Fit", checked: "Validation", tolerance: float, unwritten: Path | None) -> list[str]:
    """Describes a failed check and its remedies."""
    allowed = f"{1 - tolerance:.2f} to {1 + tolerance:.2f}"
    lines = [
        f"dora: predicted/{what} throughput = {ratio:.3f} is off: it must be {allowed} (--tolerance)"
        for what, ratio in checked.held.items()
        if abs(ratio - 1.0) > tolerance
    ]
    cost = fitted.coefficients
    zero = [name for name, value in (("k1", cost.kv_token_s), ("k3", cost.request_s), ("k4", cost.step_s)) if not value]
    if zero:
        lines.append(f"  fitted as 0: {', '.join(zero)}; mean error of the fitted steps {fitted.decode_error:.1%}")
    lines.append(f"  the machine took {checked.slowdown:.2f} times as long as the steps that count")
    lines.append(
        "  run nothing else on the machine, or measure longer with --rounds; if that does not help, the cost model "
        "does not describe this engine"
    )
    if unwritten is not None:
        lines.append(f"  {unwritten} was not written; --force writes it anyway")
    return lines


def coefficients_text(fitted: "Fit", suffix: str) -> str:
    """Returns the fit as the text of a file that a scenario can include as ``cluster.cost``."""
    tree = {"cluster": {"cost": fitted.coefficients.model_dump()}}
    return tomli_w.dumps(tree) if suffix == ".toml" else json.dumps(tree, indent=2) + "\n"


def _measure(
    model: str,
    slots: int,
    kv_tokens: int,
    max_model_len: int,
    dtype: Dtype,
    threads: int,
    seed: int,
    rounds: int,
    clock: ClockName,
    engines: int,
) -> "Measurement":
    from dora.data.engine_samples import Experts, pooled
    from dora.models import experts, resolve_model
    from dora.worker.profiling import BATCHES, MIXTURE_BATCHES
    from dora.worker.side_by_side import measure_side_by_side
    from dora.worker.timing import Timing, measure_alone

    if find_spec("torch") is None or find_spec("vllm") is None:
        said = f"profile needs torch and vLLM. Run {install('cpu')}; see docs/install.md."
        raise DoraError(said, "package", "vllm")
    folder = resolve_model(model)
    stderr().print(f"timing {model} ...")
    max_model_len = max_model_len or min(CONTEXT_TOKENS, _context_tokens(folder))
    mixture = experts(folder)
    batches = BATCHES if mixture is None else MIXTURE_BATCHES
    timing = Timing(folder, slots, kv_tokens, max_model_len, dtype, threads, seed, rounds, batches, clock)
    found = measure_alone(timing) if engines == 1 else pooled(measure_side_by_side(timing, engines))
    return replace(found, clock=clock, experts=None if mixture is None else Experts(*mixture))


def _context_tokens(folder: Path) -> int:
    from dora.models import context_tokens

    context = context_tokens(folder)
    if context is None:
        raise InvalidValue("--max-model-len", 0, f"above 0: {folder / 'config.json'} has no max_position_embeddings")
    return context
