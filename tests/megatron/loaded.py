"""Loads what a rank needs, where ranks are forked from: importing this takes seconds."""

import importlib

from tests.megatron.cpu import fix_up

fix_up()
for name in ("megatron.core.models.gpt", "megatron.core.optimizer", "dora.trainers.megatron.start"):
    importlib.import_module(name)
