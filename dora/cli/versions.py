"""``dora versions``"""

from dora.cli.options import DEFAULT_ADDRESS, AddressOption, JsonOption, TokenOption
from dora.cli.output import plain, print_json, stdout
from dora.cli.service import ask
from dora.cli.tables import versions_table

EXAMPLE = "dora versions --json"


def versions(address: AddressOption = DEFAULT_ADDRESS, token: TokenOption = None, as_json: JsonOption = False) -> None:
    """List the live policy versions: deadline, DP groups, prompt groups and requests."""
    answer = ask(address, token, lambda operator: operator.status())
    if as_json:
        print_json({"versions": [plain(row) for row in answer.versions]})
    else:
        stdout().print(versions_table(answer))
