"""``dora groups``"""

from dora.cli.options import DEFAULT_ADDRESS, AddressOption, JsonOption, TokenOption
from dora.cli.output import plain, print_json, stdout
from dora.cli.service import ask
from dora.cli.tables import by_version, groups_table

EXAMPLE = "dora groups --address 127.0.0.1:7070"


def groups(address: AddressOption = DEFAULT_ADDRESS, token: TokenOption = None, as_json: JsonOption = False) -> None:
    """List the DP groups by the version they host: state, requests, KV use, tokens/s."""
    answer = ask(address, token, lambda operator: operator.status())
    if as_json:
        print_json({"groups": [plain(worker) for worker in by_version(answer.workers)]})
    else:
        stdout().print(groups_table(answer))
