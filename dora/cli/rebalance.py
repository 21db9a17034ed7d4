"""``dora rebalance``"""

from dora.cli.options import DEFAULT_ADDRESS, AddressOption, JsonOption, TokenOption
from dora.cli.output import print_reply
from dora.cli.service import ask

EXAMPLE = "dora rebalance --json"


def rebalance(address: AddressOption = DEFAULT_ADDRESS, token: TokenOption = None, as_json: JsonOption = False) -> None:
    """Plan now which DP groups host which version, and begin the moves and loads that follow."""
    print_reply(ask(address, token, lambda operator: operator.rebalance()), as_json)
