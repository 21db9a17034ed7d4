"""The objectives by name, with the settings of their papers; docs/training.md has them in a table."""

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final, get_args

from dora.errors import InvalidValue, one_of
from dora.trainers.objectives.policy_gradient import PolicyGradient

OBJECTIVES: Final[Mapping[str, PolicyGradient]] = {
    "grpo": PolicyGradient("clipped", mean="sequence"),
    "dapo": PolicyGradient("clipped", eps_high=0.28),  # section 4.1
    "dr-grpo": PolicyGradient("clipped", advantage="centred", mean="sequence-sum"),
    # With fresh rollouts every weight is 1, up to the gap between engine and trainer, which makes this the paper's
    # RLOO.
    "rloo": PolicyGradient(
        "reinforce", advantage="leave-one-out", mean="sequence-sum", anchor="proximal", correction="truncate"
    ),
    # Section 5.1. Ratios of responses of other versions lie far outside such narrow limits. In a window above 1, use
    # anchor="proximal" and a correction, so that the limits apply as intended.
    "gspo": PolicyGradient("clipped-sequence", mean="sequence", eps_low=3e-4, eps_high=4e-4),
    "decoupled-ppo": PolicyGradient("clipped", anchor="proximal", correction="full"),
    # Of these, it needs the fewest samples more with stale responses (docs/convergence.md).
    "truncated": PolicyGradient("reinforce", anchor="proximal", correction="truncate"),
    "cispo": PolicyGradient("clipped-weight", eps_low=1.0, eps_high=4.0),  # no lower limit; upper one tuned
}
DEFAULT: Final = "truncated"


def objective(name: str, **settings: Any) -> PolicyGradient:
    """Returns the objective ``name`` of OBJECTIVES, with some of its settings changed.

    Raises InvalidValue for an unknown name or setting, and for a value that is not allowed.
    """
    if name not in OBJECTIVES:
        raise InvalidValue("objective", name, one_of(name, OBJECTIVES))
    names = [each.name for each in fields(PolicyGradient)]
    for setting in settings:
        if setting not in names:
            raise InvalidValue("objective: setting", setting, one_of(setting, names))
    return replace(OBJECTIVES[name], **settings)


def add_objective(parser: argparse.ArgumentParser) -> None:
    """Adds ``--objective`` and an option for every setting of an objective, e.g. ``--eps-high``."""
    parser.add_argument("--objective", default=DEFAULT, help=f"{', '.join(OBJECTIVES)} (%(default)s)")
    options = parser.add_argument_group("settings of the objective", "default: those of the selected objective")
    for each in fields(PolicyGradient):
        names = get_args(each.type)
        kind: dict[str, Any] = {"choices": names} if names else {"type": each.type}
        options.add_argument(_option(each.name), default=None, metavar=None if names else "X", **kind)


def objective_of(options: argparse.Namespace) -> PolicyGradient:
    """Returns the objective selected by the options of :func:`add_objective`. Raises as :func:`objective`."""
    settings = {each.name: getattr(options, each.name) for each in fields(PolicyGradient)}
    return objective(options.objective, **{name: value for name, value in settings.items() if value is not None})


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
