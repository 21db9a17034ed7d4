"""Patches to vLLM's CPU engine. Only this package and ``dora.worker.vllm.device.cpu_rank`` import vLLM's CPU modules.

Their import replaces ``torch.cuda.Stream``, ``Event`` and ``Tensor.pin_memory`` by no-ops in the whole process
(vllm/v1/worker/cpu/shm.py), so a process with an engine on a GPU must never import them.
"""
