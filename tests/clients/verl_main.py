"""verl's own program, ``python -m verl.trainer.main_ppo``, for ``.venv-verl``."""

from verl.trainer.main_ppo import main

if __name__ == "__main__":
    main()
