"""An operator's actions from the page. Each call goes to the service with the browser's own token."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from dora.client import Operator
from dora.errors import MISSING, InvalidValue, one_of
from dora.rpc.dora_pb2 import OperatorReply

WORKERS_MAX: Final = 65_536  # as of `dora scale`
NAME_MAX: Final = 256
Action = Callable[[Operator, Mapping[str, Any]], Awaitable[OperatorReply]]


async def _drain(operator: Operator, arguments: Mapping[str, Any]) -> OperatorReply:
    return await operator.drain(_name(arguments, "worker"))


async def _migrate(operator: Operator, arguments: Mapping[str, Any]) -> OperatorReply:
    return await operator.migrate(_name(arguments, "trajectory"), _name(arguments, "target"))


async def _scale(operator: Operator, arguments: Mapping[str, Any]) -> OperatorReply:
    workers = arguments.get("workers")
    if type(workers) is not int or not 0 <= workers <= WORKERS_MAX:
        raise InvalidValue("workers", MISSING if workers is None else workers, f"a whole number to {WORKERS_MAX}")
    return await operator.scale(workers, _name(arguments, "host") if arguments.get("host") else "")


async def _rebalance(operator: Operator, arguments: Mapping[str, Any]) -> OperatorReply:
    return await operator.rebalance()


ACTIONS: Final[Mapping[str, tuple[Action, tuple[str, ...]]]] = {
    "drain": (_drain, ("worker",)),
    "migrate": (_migrate, ("trajectory", "target")),
    "scale": (_scale, ("workers", "host")),
    "rebalance": (_rebalance, ()),
}  # with the fields that each takes


async def act(name: str, operator: Operator, arguments: Any) -> dict[str, Any]:
    """Returns the service's reply. Raises InvalidValue, and what the service raises."""
    if name not in ACTIONS:
        raise InvalidValue("action", name, one_of(name, ACTIONS))
    action, fields = ACTIONS[name]
    if not isinstance(arguments, dict):
        raise InvalidValue("body", arguments, "a JSON object")
    for field in arguments:
        if field not in fields:
            raise InvalidValue(field, arguments[field], f"one of {', '.join(fields) or 'none'}", why="is not a field")
    reply = await action(operator, arguments)
    return {"message": reply.message, "moves": reply.moves, "loads": reply.loads}


def _name(arguments: Mapping[str, Any], field: str) -> str:
    value = arguments.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= NAME_MAX:
        raise InvalidValue(field, MISSING if value is None else value, f"a text of 1 to {NAME_MAX} characters")
    return value
