"""Checks weights before any is loaded."""

from pathlib import Path

from dora.weights.reference import Reference, TensorHeader, check_tensors, read_header, weight_files


def check_files(folder: Path, reference: Reference) -> tuple[Path, ...]:
    """Returns the safetensors files of ``folder``, whose tensors must be the model's.

    Raises InvalidValue naming the first file or tensor that is missing, unknown, misshapen or of another dtype.
    """
    files = tuple(folder / name for name in weight_files(folder))
    found: dict[str, TensorHeader] = {}
    for file in files:
        found.update(read_header(file))
    check_tensors(found, reference.tensors)
    return files
