"""``dora status``"""

from dora.cli.options import DEFAULT_ADDRESS, AddressOption, JsonOption, TokenOption
from dora.cli.output import plain, print_json, stdout
from dora.cli.service import ask
from dora.cli.tables import status_table

EXAMPLE = "dora status --address 127.0.0.1:7070"


def status(address: AddressOption = DEFAULT_ADDRESS, token: TokenOption = None, as_json: JsonOption = False) -> None:
    """Show where the service stands: window, steps, workers and counters."""
    answer = ask(address, token, lambda operator: operator.status())
    if as_json:
        print_json(plain(answer))
    else:
        stdout().print(status_table(answer))
