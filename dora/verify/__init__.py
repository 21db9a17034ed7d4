"""``dora verify``: does a record keep what DORA promises, token by token?

Every recorded logprob is recomputed with Hugging Face transformers under the weights of the recorded version, and the
record itself is checked: each trajectory once, groups whole, one version a trajectory, staleness as stated, and every
step that was committed is there with its groups and its version.
"""

from dora.verify.check import VerifyReport, verify

__all__ = ["VerifyReport", "verify"]
