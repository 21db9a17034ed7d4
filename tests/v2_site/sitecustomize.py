"""Python runs this at the start of each process of an engine on Model Runner V2 (``tests.v2_runner``): of its ranks."""

import os

if os.environ.get("DORA_TEST_RUNNER") == "v2":
    from tests.v2_runner import prepare

    prepare()
