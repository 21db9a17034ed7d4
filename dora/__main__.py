"""``python -m dora`` is ``dora``."""

from dora.ops.cli import main
from dora.system.environment import take_handed

if __name__ == "__main__":
    take_handed()
    main()
