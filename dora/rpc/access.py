"""Who may call what: the roles of each method. The access check, the reference and its test follow from this table.

The owner may call everything except ``Worker``: only workers and pools use that service. Each other role may call what
it needs and nothing else.
"""

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Final

from dora.rpc.errors import PermissionDenied, Unauthenticated
from dora.rpc.roles import CERTIFIED, Caller, Role
from dora.tls.certificate import Holder

PACKAGE: Final = "/dora.v1."

_TRAINER: Final = (Role.TRAINER,)
_SUBMITTER: Final = (Role.SUBMITTER,)
_ENVIRONMENT: Final = (Role.SUBMITTER, Role.ENVIRONMENT)
_SESSION: Final = (Role.SUBMITTER, Role.ENVIRONMENT, Role.SESSION)
_OPERATOR: Final = (Role.OPERATOR,)
_READER: Final = (Role.OPERATOR, Role.METRICS)
_WORKER: Final = (Role.WORKER,)
_HOST: Final = (Role.HOST,)

ACCESS: Final[Mapping[str, tuple[Role, ...]]] = MappingProxyType(
    {
        "Trainer/Attach": _TRAINER,
        "Trainer/KeepAlive": _TRAINER,
        "Trainer/StreamStep": _TRAINER,
        "Trainer/UploadWeights": _TRAINER,
        "Trainer/CommitStep": _TRAINER,
        "Trainer/RepublishVersion": _TRAINER,
        "Prompts/Submit": _SUBMITTER,
        "Prompts/End": _SUBMITTER,
        "Prompts/Cancel": _SUBMITTER,
        "Prompts/Evaluate": _SUBMITTER,
        "Sessions/Attend": _ENVIRONMENT,
        "Sessions/Open": _ENVIRONMENT,
        "Sessions/FindSession": _ENVIRONMENT,
        "Sessions/Withdraw": _ENVIRONMENT,
        "Sessions/Describe": _SESSION,
        "Sessions/Turn": _SESSION,
        "Sessions/EndSession": _SESSION,
        "Sessions/FailSession": _SESSION,
        "Sessions/ServeFront": _ENVIRONMENT,
        "Operator/GetStatus": _READER,
        "Operator/WatchStatus": _READER,
        "Operator/ListTrajectories": _OPERATOR,
        "Operator/ShowTrajectory": _OPERATOR,
        "Operator/Migrate": _OPERATOR,
        "Operator/Drain": _OPERATOR,
        "Operator/Scale": _OPERATOR,
        "Operator/Rebalance": _OPERATOR,
        "Operator/Checkpoint": _OPERATOR,
        "Operator/Examine": _OPERATOR,
        "Worker/Connect": _WORKER,
        "Host/Join": _HOST,
        "Host/ListFiles": _HOST,
        "Host/FetchFile": _HOST,
    }
)  # by service and method of dora.proto


def name_of(method: str) -> str:
    """Returns a method's name in ``ACCESS``, or an empty text for a method of no guarded service."""
    name = method.removeprefix(PACKAGE)
    return name if method.startswith(PACKAGE) and name in ACCESS else ""


def roles_of(method: str) -> tuple[Role, ...]:
    """Returns all roles that may call a method, named as in ``ACCESS``; nobody may call an unknown one."""
    own = ACCESS.get(method, ())
    return own if not own or own == _WORKER else (*own, Role.OWNER)


def may_call(role: Role, method: str) -> bool:
    return role in roles_of(method)


def certified(names: frozenset[str]) -> frozenset[Role]:
    """Returns the roles of a certificate with these names. Roles of the service and of hosts hold for their workers."""
    return frozenset(role for name in names for role in CERTIFIED.get(name, ()))


def caller_by(holder: Holder, method: str) -> Caller | None:
    """Returns the caller of a method with a certificate and no token, in a role that may call it if it has one. Returns
    None if the certificate has no role.
    """
    roles = sorted(certified(holder.roles))
    if not roles:
        return None
    return Caller(next((role for role in roles if may_call(role, method)), roles[0]), name=holder.name)


def check_certificate(holder: Holder, method: str, now: datetime) -> None:
    """Raises Unauthenticated for a certificate that is not valid, and PermissionDenied if it has roles and none of them
    may call the method, whatever token comes over its connection.
    """
    if not holder.is_valid(now):
        raise Unauthenticated("certificate", f"(valid until {holder.ends:%Y-%m-%d %H:%M:%S} UTC)", "one that is valid")
    if holder.roles and not any(may_call(role, method) for role in certified(holder.roles)):
        names = ", ".join(sorted(holder.roles))
        raise PermissionDenied("certificate", f"for {names}", f"for one of {', '.join(roles_of(method))}")


def token_for(method: str) -> str:
    """Names the credentials for a method: for errors."""
    roles = roles_of(method) or (Role.OWNER,)
    own = [str(role) for role in roles if role is not Role.OWNER][::-1]  # the service's own role last
    named = " or ".join(filter(None, (", ".join(own[:-1]), *own[-1:]))) or str(Role.OWNER)
    return f"the service's {named} token" + (", or its owner's" if own and Role.OWNER in roles else "")
